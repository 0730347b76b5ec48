"""FP8 GEMM and quantization against torch._scaled_mm and torch's cast.

    python -m tools.bench.bench_fp8 --quick --json fp8.jsonl

As long as the module fp8_ops is not built, this says so in one sentence and exits with 0.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from absl import app

from tools.bench import harness
from tools.bench.results import Row, Work

MODULE = "fp8_ops"
NOT_BUILT = "The fp8 family is not built yet: this package has no module 'fp8_ops'."

DEFAULTS: dict[str, Any] = {"m": 2048, "n": 4096, "k": 4096}
TABLE = [
    {"m": m, "n": n, "k": k}
    for n, k in ((4096, 4096), (14336, 4096), (4096, 14336), (8192, 8192), (28672, 8192))
    for m in (1, 16, 64, 128, 512, 2048, 8192)
]
QUICK = [{"m": m, "n": 4096, "k": 4096} for m in (16, 2048)]


def is_built() -> bool:
    """Returns whether the package holds the fp8 module; a machine without a GPU may hold it too."""
    from astrai.extension import loader

    return MODULE in loader.KERNEL_NAMES


def gemm_work(shape: dict[str, Any]) -> Work:
    """Returns the work of fp8 [M, K] x [N, K]^T to a 16-bit [M, N]."""
    m, n, k = shape["m"], shape["n"], shape["k"]
    return Work(num_bytes=m * k + n * k + 2 * m * n, flops=2 * m * n * k, unit="tflops")


def _gemm_candidates(shape: dict[str, Any], sets: int, fast: bool) -> dict[str, list[harness.Call]]:
    import torch

    from astrai.extension.ops import fp8

    one = torch.ones((), device="cuda")
    candidates: dict[str, list[harness.Call]] = {"astrai": [], "cublaslt": []}

    def operand(rows):
        x = torch.randn(rows, shape["k"], device="cuda", dtype=torch.bfloat16)
        return x.to(torch.float8_e4m3fn)

    for _ in range(sets):
        a, b = operand(shape["m"]), operand(shape["n"])
        candidates["astrai"].append(
            lambda a=a, b=b: fp8.mm_fp8(a, b, one, trans_b=True, fast_accum=fast)
        )
        candidates["cublaslt"].append(
            lambda a=a, b=b: torch._scaled_mm(
                a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=fast
            )
        )
    return candidates


def generate() -> Iterator[Row]:
    """Yields the rows of the shapes that the flags ask for, with fast and split accumulation."""
    for shape in harness.shapes_to_run(TABLE, QUICK, DEFAULTS):
        work = gemm_work(shape)
        sets = harness.input_sets((shape["m"] + shape["n"]) * shape["k"], rotated=True)
        for variant in ("fast", "split"):
            times = harness.measure(_gemm_candidates(shape, sets, variant == "fast"))
            yield from harness.rows_of("fp8_gemm", shape, "float8_e4m3fn", variant, work, times)


def run() -> int:
    """Measures, or says that there is nothing to measure yet."""
    if not is_built():
        print(NOT_BUILT)
        return 0
    return harness.run(generate)


if __name__ == "__main__":
    app.run(lambda argv: sys.exit(run()))
