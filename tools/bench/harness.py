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
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from absl import app, flags

from tools.bench import goals, plot, results

DEVICE = "cuda"
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
_PART = flags.DEFINE_string(
    "part", "1/1", "K/N: the K-th of N parts of the rows, each from all over the table."
)
_SECONDS = flags.DEFINE_float("seconds", None, "Starts no row after so many seconds.", 0.0)
_ROUNDS = flags.DEFINE_integer("rounds", 9, "Rounds to take the median of.", MIN_ROUNDS)

# Norm of the difference over the norm of the result: of two bf16 kernels that are both right.
_AGREE = 2e-2

Call = Callable[[], Any]


@dataclass(frozen=True)
class Candidate:
    """What is timed, and how to see whether it computes the same as ours.

    Attributes:
        calls: The same call on each set of inputs.
        result: Brings what a call returns into the layout of ours; None: not compared.
    """

    calls: Sequence[Call]
    result: Callable[[Any], Any] | None = None


@dataclass
class _Journal:
    """What a run has to tell beside its rows."""

    start: float = field(default_factory=time.monotonic)
    row: str = ""  # the one that is being measured
    failures: list[str] = field(default_factory=list)  # ours
    peer_failures: dict[str, list[str]] = field(default_factory=dict)  # reason -> rows
    left_out: list[str] = field(default_factory=list)


_journal = _Journal()


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


def measure(candidates: Mapping[str, Sequence[Call] | Candidate]) -> dict[str, float]:
    """Times candidates side by side.

    Args:
      candidates: name -> the same call on each set of inputs. The first is ours and must run;
        another that raises (a peer that does not take this shape) is left out with a line on
        stderr. The results of Candidates are compared with ours.

    Returns:
      Microseconds per call by name.
    """
    graphs: dict[str, _Graph] = {}
    ours = next(iter(candidates.values()))
    for name, candidate in candidates.items():
        calls = candidate.calls if isinstance(candidate, Candidate) else candidate
        try:
            graphs[name] = _Graph(calls)
        except Exception as error:  # of whatever kind: peers bring compilers and loaders along
            if candidate is ours:
                raise
            note_peer_failure(name, error)
            continue
        if candidate is not ours:
            _compare(name, candidate, ours)
    names = list(graphs)
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds()):
        for index in mirrored_order(len(names)):
            times[names[index]].append(graphs[names[index]].time_us())
    return {name: statistics.median(values) for name, values in times.items()}


def note_peer_failure(name: str, error: BaseException) -> None:
    """Says that a peer does not run, now and at the end."""
    text = str(error).strip()
    reason = f"{name} does not run here: {(text.splitlines()[0] if text else repr(error))[:160]}"
    print(reason, file=sys.stderr)
    _journal.peer_failures.setdefault(reason, []).append(_journal.row)


def _compare(name: str, candidate: Any, ours: Any) -> None:
    """Notes a failure if a candidate's first call does not give what ours gives."""
    both = (candidate, ours)
    if not all(isinstance(c, Candidate) and c.result is not None for c in both):
        return
    theirs, mine = (c.result(c.calls[0]()).double() for c in both)
    difference = float((theirs - mine).norm() / theirs.norm())
    if not difference <= _AGREE:
        note_failure(f"the result differs from that of {name} by {difference:.2g}")


def note_failure(problem: str) -> None:
    """Says that ours fails on the row at hand, now and at the end; the run's status is then 1."""
    problem = f"{_journal.row}: {problem}"
    print(problem, file=sys.stderr)
    _journal.failures.append(problem)


def each(
    op: str, shapes: Iterable[dict[str, Any]], rows: Callable[[dict[str, Any]], Iterator[Any]]
) -> Iterator[Any]:
    """Yields what `rows` yields for each shape of this run's part.

    A shape on which ours fails is told at the end and the next one tried, unless the GPU is beyond
    use; one that --seconds leaves no time for is told too.
    """
    import torch

    for shape in part_of(list(shapes)):
        words = " ".join(f"{key}={value}" for key, value in shape.items())
        _journal.row = f"{op} {words}"
        if _SECONDS.value is not None and time.monotonic() - _journal.start > _SECONDS.value:
            _journal.left_out.append(_journal.row)
            continue
        try:
            yield from rows(shape)
        except Exception as error:  # the other rows are worth having
            note_failure(f"{type(error).__name__}: {error}")
            torch.cuda.synchronize()  # raises if every further call would fail


def part_of(shapes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the shapes of this run's part: every N-th, beginning with the K-th.

    Raises:
      ValueError: --part is not K/N with K from 1 to N.
    """
    first, _, parts = _PART.value.partition("/")
    if not (first.isdigit() and parts.isdigit() and 1 <= int(first) <= int(parts)):
        raise ValueError(f"--part: must be K/N with K from 1 to N, got {_PART.value!r}")
    return shapes[int(first) - 1 :: int(parts)]


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
    """Prints the rows that `generate` yields, and writes what --json and --plot ask for.

    Returns:
      The exit status: 0 if everything of ours ran.
    """
    global _journal
    reason = needs_gpu()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 1
    _journal = _Journal()
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
        print("\n".join(summary(rows)), flush=True)
    if _PLOT.value:
        for line in plot.write_charts(rows, _PLOT.value):
            print(line)
    return 1 if _journal.failures else 0


def summary(rows: Sequence[results.Row]) -> list[str]:
    """Returns the last lines of a run: goals, and all that did not run."""
    lines = goals.table(goals.judge(rows))
    for reason, where in _journal.peer_failures.items():
        lines.append(f"{reason} ({len(where)} rows, the first: {where[0]})")
    lines += [f"left out, the time was over: {row}" for row in _journal.left_out]
    lines += [f"FAILED {problem}" for problem in _journal.failures]
    return [*lines, f"{time.monotonic() - _journal.start:.0f} s"]


def main(generate: Callable[[], Iterator[results.Row]]) -> None:
    """Runs a benchmark from its command line."""
    app.run(lambda argv: sys.exit(run(generate)))
