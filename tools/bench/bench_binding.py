"""Host time of a call: the binding alone, the binding with its launch, and the whole Python call.

    python -m tools.bench.bench_binding

The binding alone reads and checks three tensors of which one is a preallocated output, and launches
nothing: on the CPU through the test module binding_probe, on a GPU through rotary_emb with no
tokens. Times are of the calling thread and of one call; the GPU works behind.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from absl import app, flags

from tools.bench import harness  # its flags --json and --rounds

_CALLS = flags.DEFINE_integer(
    "calls", 1000, "Calls per round on a GPU (ten times that on the CPU)."
)


def host_ns(call: Callable[[], Any], calls: int, rounds: int, settle: Callable[[], None]) -> float:
    """Returns the median nanoseconds of one call, the loop's own time subtracted.

    Args:
      call: to time.
      calls: per round.
      rounds: to take the median of.
      settle: called before each round: waits until queued work is done.
    """

    def loop(function: Callable[[], Any]) -> int:
        settle()
        start = time.perf_counter_ns()
        for _ in range(calls):
            function()
        return time.perf_counter_ns() - start

    loop(call)
    empty = statistics.median(loop(lambda: None) for _ in range(rounds))
    return (statistics.median(loop(call) for _ in range(rounds)) - empty) / calls


def cpu_calls() -> dict[str, Callable[[], Any]]:
    """Returns what can be timed without a GPU; empty where the test module is not on the path."""
    import torch

    try:
        import binding_probe
    except ImportError:
        return {}
    a, b = torch.randn(2, 1, 1)
    out = torch.empty(1, 1)
    return {
        "binding alone, 3 CPU tensors": lambda: binding_probe.add(a, b, out),
        "the same through pybind11's dispatch": lambda: binding_probe.add_pybind(a, b, out),
        "torch.add(out=), 3 CPU tensors": lambda: torch.add(a, b, out=out),
    }


def gpu_calls() -> dict[str, Callable[[], Any]]:
    """Returns what can be timed on a GPU."""
    import torch

    from astrai.extension import loader, ops

    module = loader.get_module("rotary_emb")
    x = torch.randn(1, 1, 128, device="cuda", dtype=torch.bfloat16)
    freqs = torch.randn(1, 64, 2, device="cuda")
    out = torch.empty_like(x)
    none, no_freqs, none_out = x[:0], freqs[:0], out[:0]
    return {
        "binding alone, 3 GPU tensors": lambda: module.rotary_emb(none, no_freqs, none_out),
        "binding and launch": lambda: module.rotary_emb(x, freqs, out),
        "ops.rotary_emb(out=)": lambda: ops.rotary_emb(x, freqs, out=out),
        "ops.rotary_emb, allocating": lambda: ops.rotary_emb(x, freqs),
        "torch.add(out=)": lambda: torch.add(x, x, out=out),
    }


def run() -> int:
    """Prints the host times, and writes them to --json."""
    import torch

    lines = []
    has_gpu = torch.cuda.is_available()
    # A queue that is full would make a launch wait for the GPU: fewer calls per round there.
    groups = [(cpu_calls(), 10 * _CALLS.value, lambda: None)]
    if has_gpu:
        groups.append((gpu_calls(), min(_CALLS.value, 500), torch.cuda.synchronize))
    with torch.no_grad():
        for calls, count, settle in groups:
            for name, call in calls.items():
                nanoseconds = host_ns(call, count, harness.rounds(), settle)
                print(f"{nanoseconds / 1e3:8.3f} us  {name}", flush=True)
                lines.append(
                    {"op": "host_time", "variant": name, "us": round(nanoseconds / 1e3, 4)}
                )
    if not lines:
        print(
            "Nothing to time here: there is no GPU, and the test module binding_probe is not on "
            "the path (run it as bazel run //tools:bench_binding).",
            file=sys.stderr,
        )
        return 1
    if harness.json_path():
        with open(harness.json_path(), "w", encoding="utf-8") as stream:
            stream.writelines(json.dumps(line) + "\n" for line in lines)
    return 0


if __name__ == "__main__":
    app.run(lambda argv: sys.exit(run()))
