"""Measures our operator beside what a user would call instead.

The rules: ours and every peer are captured into CUDA graphs and replayed in the same run, in the
order A B B A, with random inputs that are rotated through more than four times the L2 cache where a
user's data would not be there; the median of at least seven rounds counts. Only the ratio of two
times of one run says something: absolute times drift between machines.
"""

from __future__ import annotations

import gc
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from absl import app, flags

from tools.bench import plot, results

MIN_ROUNDS = 7
# A graph that runs this long is timed well by events, whose resolution is about 0.5 us.
GRAPH_US = 3000.0
MAX_CALLS_PER_GRAPH = 512

_JSON = flags.DEFINE_string("json", None, "File to write one JSON object per row to.")
_PLOT = flags.DEFINE_string(
    "plot",
    None,
    "Draws a roofline and a ratio chart: writes PLOT.png (needs matplotlib) and PLOT.html.",
)
_SHAPES = flags.DEFINE_multi_string(
    "shapes", [], "A further shape as key=value,key=value; may be given several times."
)
_ONLY_SHAPES = flags.DEFINE_bool("only_shapes", False, "Measures the shapes of --shapes alone.")
_QUICK = flags.DEFINE_bool("quick", False, "A few rows instead of the whole table.")
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float16"], "Type of the inputs.")
_ROUNDS = flags.DEFINE_integer("rounds", 9, "Rounds to take the median of.", MIN_ROUNDS)

Call = Callable[[], Any]


def mirrored_order(count: int) -> list[int]:
    """Returns the candidates' order of one round, A B B A: drift of the clock hits all alike."""
    return [*range(count), *reversed(range(count))]


def sets_to_rotate(bytes_per_set: int, l2_bytes: int, free_bytes: int) -> int:
    """Returns how many sets of inputs make each call find the L2 without its own data.

    Args:
      bytes_per_set: of one call's inputs and outputs.
      l2_bytes: size of the L2 cache.
      free_bytes: device memory that the sets may fill.
    """
    wanted = max(2, math.floor(4 * l2_bytes / max(bytes_per_set, 1)) + 1)
    return max(1, min(wanted, free_bytes // max(bytes_per_set, 1)))


def passes_per_graph(us_per_pass: float, calls_per_pass: int) -> int:
    """Returns how often a graph repeats its pass over the sets to run about GRAPH_US."""
    wanted = math.ceil(GRAPH_US / max(us_per_pass, 1e-3))
    return max(1, min(wanted, MAX_CALLS_PER_GRAPH // max(calls_per_pass, 1)))


class _Graph:
    """A CUDA graph of one candidate's calls, and how long one call takes."""

    def __init__(self, calls: Sequence[Call]):
        import torch

        self._torch = torch
        self._calls = calls
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # lazy initialisation is not captured
            for call in (*calls, *calls):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self._graph, self._count = self._capture(1)
        self.time_us()
        passes = passes_per_graph(self.time_us() * len(calls), len(calls))
        if passes > 1:
            self._graph, self._count = self._capture(passes)
            self.time_us()

    def _capture(self, passes: int) -> tuple[Any, int]:
        graph = self._torch.cuda.CUDAGraph()
        with self._torch.cuda.graph(graph):
            for _ in range(passes):
                for call in self._calls:
                    call()
        return graph, passes * len(self._calls)

    def time_us(self) -> float:
        """Returns the microseconds per call of one replay."""
        start = self._torch.cuda.Event(enable_timing=True)
        stop = self._torch.cuda.Event(enable_timing=True)
        start.record()
        self._graph.replay()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) * 1e3 / self._count


def measure(candidates: dict[str, Sequence[Call]]) -> dict[str, float]:
    """Times candidates side by side.

    Args:
      candidates: name -> the same call on each set of inputs. The first must run; another that
        raises (a peer that does not take this shape) is left out with a line on stderr.

    Returns:
      Microseconds per call by name.
    """
    graphs: dict[str, _Graph] = {}
    for index, (name, calls) in enumerate(candidates.items()):
        try:
            graphs[name] = _Graph(calls)
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            if index == 0:
                raise
            reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            print(f"{name} does not run here: {reason[:160]}", file=sys.stderr)
    names = list(graphs)
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds()):
        for index in mirrored_order(len(names)):
            times[names[index]].append(graphs[names[index]].time_us())
    return {name: statistics.median(values) for name, values in times.items()}


def input_sets(bytes_per_set: int, rotated: bool, copies: int = 1) -> int:
    """Returns how many sets of inputs to make on the current GPU.

    Args:
      bytes_per_set: that one call reads.
      rotated: False for one set, whose data then stay in the L2 if they fit.
      copies: of each set that lie in memory, such as the same data in a peer's layout.
    """
    if not rotated:
        return 1
    import torch

    # What the last shape has left in torch's cache counts as free.
    gc.collect()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    l2_bytes = torch.cuda.get_device_properties().L2_cache_size
    return sets_to_rotate(bytes_per_set, l2_bytes, int(free * 0.8) // copies)


def rows_of(
    op: str,
    shape: dict[str, Any],
    dtype: str,
    variant: str,
    work: results.Work,
    times: dict[str, float],
    ours: str = "astrai",
) -> Iterator[results.Row]:
    """Yields one row per peer in `times`, which also holds ours."""
    import torch

    for peer, peer_us in times.items():
        if peer == ours:
            continue
        yield results.Row(
            op=op,
            shape=shape,
            dtype=dtype,
            variant=variant,
            us=times[ours],
            work=work,
            peer=peer,
            peer_us=peer_us,
            gpu=torch.cuda.get_device_name(),
            torch=torch.__version__,
        )


def shapes_to_run(
    table: Sequence[dict[str, Any]], quick: Sequence[dict[str, Any]], defaults: dict[str, Any]
) -> list[dict[str, Any]]:
    """Returns the shapes that the flags ask for, each with every key of `defaults`."""
    chosen = [] if _ONLY_SHAPES.value else list(quick if _QUICK.value else table)
    return [{**defaults, **shape} for shape in chosen] + [
        results.parse_shape(text, defaults) for text in _SHAPES.value
    ]


def dtype() -> str:
    """Returns the name of the inputs' type that --dtype asks for."""
    return _DTYPE.value


def rounds() -> int:
    """Returns how many rounds --rounds asks for."""
    return max(MIN_ROUNDS, _ROUNDS.value)


def json_path() -> str | None:
    """Returns the file that --json names."""
    return _JSON.value


def print_header() -> None:
    """Prints the column names of print_row."""
    print(
        f"{'us':>10} {'rate':>14} {'floor us':>9} {'of floor':>9} {'peer us':>10} {'ratio':>7}  "
        "peer; shape",
        flush=True,
    )


def print_row(row: results.Row) -> None:
    """Prints a row for people."""
    unit = "TFLOP/s" if row.work.unit == "tflops" else "TB/s"
    rate = f"{row.work.rate(row.us):.2f} {unit}"
    print(
        f"{row.us:10.2f} {rate:>14} {row.floor:9.2f} {row.floor / row.us:9.1%} "
        f"{row.peer_us:10.2f} {row.ratio:7.3f}  {row.peer}; {row.label()}",
        flush=True,
    )


def needs_gpu() -> str | None:
    """Returns why nothing can be measured here, or None."""
    try:
        import torch
    except ImportError:
        return "This benchmark needs torch, which is not installed: pip install torch."
    if not torch.cuda.is_available():
        return "This benchmark needs a CUDA GPU, and torch sees none."
    return None


def run(generate: Callable[[], Iterator[results.Row]]) -> int:
    """Prints the rows that `generate` yields and writes what --json and --plot ask for."""
    reason = needs_gpu()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 1
    rows = []
    stream = open(_JSON.value, "w", encoding="utf-8") if _JSON.value else None  # noqa: SIM115
    try:
        print_header()
        for row in generate():
            rows.append(row)
            print_row(row)
            if stream is not None:
                stream.write(row.to_json() + "\n")
                stream.flush()
    finally:
        if stream is not None:
            stream.close()
    if _PLOT.value:
        for line in plot.write_charts(rows, _PLOT.value):
            print(line)
    return 0


def main(generate: Callable[[], Iterator[results.Row]]) -> None:
    """Runs a benchmark from its command line."""
    app.run(lambda argv: run(generate))
