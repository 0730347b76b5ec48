"""How ``ops.fp8`` calls its kernels, and the operators ``torch.ops.astrai.fp8_...``.

Each has a function that launches the kernel, one that knows the shapes of its results, and the
definition for CPU tensors.
"""

from __future__ import annotations

import math

import torch

from astrai.extension.errors import ShapeError
from astrai.extension.ops import _fp8_arguments as arguments
from astrai.extension.ops._fp8_arguments import FP8_DTYPES, FP8_MAX
from astrai.extension.ops._kernel import Kernel
from astrai.extension.ops._registration import define
from astrai.extension.ops.reference import fp8 as reference

QUANTIZE = Kernel("fp8_ops", "quantize")
STEP = Kernel("fp8_ops", "dynamic_step")
ROWWISE = Kernel("fp8_ops", "quantize_rowwise")
BLOCKWISE = Kernel("fp8_ops", "quantize_block")
GEMM = Kernel("fp8_ops", "gemm")


def ring_amax(ring_state: torch.Tensor) -> torch.Tensor:
    return ring_state[ring_state.numel() - 2 : ring_state.numel() - 1]


def _new_codes(x: torch.Tensor, fmt: str) -> torch.Tensor:
    return torch.empty(x.shape, dtype=FP8_DTYPES[fmt], device=x.device)


def _new_transposed(x: torch.Tensor, fmt: str) -> torch.Tensor:
    shape = (x.shape[-1], math.prod(x.shape[:-1]))
    return torch.empty(shape, dtype=FP8_DTYPES[fmt], device=x.device)


# ---- on CUDA ----


def run_quantize(x, scale, fmt, row_major, transposed, amax_out=None):
    arguments.check_quantize("quantize", x, scale, fmt, transposed)
    if amax_out is None:
        amax_out = torch.zeros(1, dtype=torch.float32, device=x.device)
    else:
        arguments.check_scalar("quantize", "amax_out", amax_out, x.device)
    x8 = _new_codes(x, fmt) if row_major else None
    x8_t = _new_transposed(x, fmt) if transposed else None
    QUANTIZE.launch(x.contiguous(), scale, x8, x8_t, amax_out, None, 0, 0.0, 1.0)
    return x8, x8_t, amax_out


def _run_with_ring(x, scale, ring_state, fmt, x8, x8_t, hist_idx, fp8_max, pow2_margin):
    arguments.check_ring("quantize", x, ring_state, hist_idx)
    ring = (ring_state, hist_idx, fp8_max, pow2_margin)
    QUANTIZE.launch(x.contiguous(), scale, x8, x8_t, ring_amax(ring_state), *ring)


def run_ring(x, scale, ring_state, fmt, transposed, hist_idx, fp8_max, pow2_margin):
    arguments.check_quantize("quantize", x, scale, fmt, transposed)
    x8 = _new_transposed(x, fmt) if transposed else _new_codes(x, fmt)
    outputs = (None, x8) if transposed else (x8, None)
    _run_with_ring(x, scale, ring_state, fmt, *outputs, hist_idx, fp8_max, pow2_margin)
    return x8


def run_dual_ring(x, scale, ring_state, fmt, hist_idx, fp8_max, pow2_margin):
    arguments.check_quantize("quantize_dual", x, scale, fmt, True)
    outputs = (_new_codes(x, fmt), _new_transposed(x, fmt))
    _run_with_ring(x, scale, ring_state, fmt, *outputs, hist_idx, fp8_max, pow2_margin)
    return outputs


def run_step(x, fmt="e4m3", pow2_margin=1.0):
    arguments.check_format("dynamic_step", fmt)
    arguments.check_input("dynamic_step", x)
    step = torch.empty(1, dtype=torch.float32, device=x.device)
    STEP.launch(x.contiguous(), FP8_MAX[fmt], pow2_margin, step)
    return step


def run_rowwise(x, fmt="e4m3"):
    x8, step = _fake_rowwise(x, fmt)
    ROWWISE.launch(x.contiguous(), x8, step)
    return x8, step


def run_block(x, block, fmt="e4m3"):
    x8, step = _fake_block(x, block, fmt)
    BLOCKWISE.launch(x.contiguous(), block[0], x8, step)
    return x8, step


def run_gemm(a, b, scale, trans_a, trans_b, bias, scale_b, out_dtype, fast_accum):
    out = _fake_gemm(a, b, scale, trans_a, trans_b, bias, scale_b, out_dtype, fast_accum)
    (a, flip_a), (b, flip_b) = _strided(a), _strided(b)
    layout = (trans_a != flip_a, trans_b != flip_b)
    GEMM.launch(a, b, scale, scale_b, *layout, bias, fast_accum, out)
    return out


def _strided(x: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """The operand as it lies in memory, last stride 1, and whether that is its transpose."""
    if x.stride(-1) == 1 and _rows_apart(x):
        return x, False
    turned = x.mT
    if turned.stride(-1) == 1 and _rows_apart(turned):
        return turned, True
    return x.contiguous(), False


def _rows_apart(x: torch.Tensor) -> bool:
    return x.stride(-2) >= x.shape[-1] or x.shape[-2] <= 1


# ---- shapes, and the definition on the CPU ----


def _fake_quantize(x, scale, fmt="e4m3", transposed=False):
    arguments.check_quantize("quantize", x, scale, fmt, transposed)
    x8 = _new_transposed(x, fmt) if transposed else _new_codes(x, fmt)
    return x8, torch.empty(1, dtype=torch.float32, device=x.device)


def _fake_ring(x, scale, ring_state, fmt, transposed, *_):
    return _fake_quantize(x, scale, fmt, transposed)[0]


def _fake_dual(x, scale, fmt="e4m3"):
    arguments.check_quantize("quantize_dual", x, scale, fmt, True)
    amax = torch.empty(1, dtype=torch.float32, device=x.device)
    return _new_codes(x, fmt), _new_transposed(x, fmt), amax


def _fake_step(x, fmt="e4m3", pow2_margin=1.0):
    arguments.check_format("dynamic_step", fmt)
    arguments.check_input("dynamic_step", x)
    return torch.empty(1, dtype=torch.float32, device=x.device)


def _fake_rowwise(x, fmt="e4m3"):
    arguments.check_format("quantize_rowwise", fmt)
    arguments.check_input("quantize_rowwise", x)
    if x.dim() == 0:
        raise ShapeError("quantize_rowwise: x must be [..., columns], got shape ()")
    return _new_codes(x, fmt), torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)


def _fake_block(x, block, fmt="e4m3"):
    arguments.check_format("quantize_block", fmt)
    arguments.check_input("quantize_block", x)
    arguments.check_block("quantize_block", x, block)
    blocks = [-(-size // side) for size, side in zip(x.shape[-2:], block, strict=True)]
    step = torch.empty((*x.shape[:-2], *blocks), dtype=torch.float32, device=x.device)
    return _new_codes(x, fmt), step


def _fake_gemm(a, b, scale, trans_a, trans_b, bias, scale_b, out_dtype, fast_accum):
    shape = arguments.check_gemm(a, b, scale, scale_b, trans_a, trans_b, bias, out_dtype)
    return torch.empty(shape, dtype=out_dtype, device=a.device)


def _cpu_quantize(x, scale, fmt="e4m3", transposed=False):
    arguments.check_quantize("quantize", x, scale, fmt, transposed)
    x8, x8_t, amax = reference.quantize(x, scale, fmt)
    return (x8_t if transposed else x8), amax


def _cpu_dual(x, scale, fmt="e4m3"):
    arguments.check_quantize("quantize_dual", x, scale, fmt, True)
    return reference.quantize(x, scale, fmt)


def _cpu_dual_ring(x, scale, ring_state, fmt, hist_idx, fp8_max, pow2_margin):
    arguments.check_ring("quantize", x, ring_state, hist_idx)
    x8, x8_t, amax = reference.quantize(x, scale, fmt)
    reference.fold_ring(ring_state, amax, hist_idx, fp8_max, pow2_margin)
    return x8, x8_t


def _cpu_ring(x, scale, ring_state, fmt, transposed, *ring):
    arguments.check_quantize("quantize", x, scale, fmt, transposed)
    return _cpu_dual_ring(x, scale, ring_state, fmt, *ring)[transposed]


def _cpu_checked_dual_ring(x, scale, ring_state, fmt, *ring):
    arguments.check_quantize("quantize_dual", x, scale, fmt, True)
    return _cpu_dual_ring(x, scale, ring_state, fmt, *ring)


def _cpu_step(x, fmt="e4m3", pow2_margin=1.0):
    _fake_step(x, fmt, pow2_margin)
    return reference.step_of(reference.finite_amax(x), FP8_MAX[fmt], pow2_margin)


def _cpu_rowwise(x, fmt="e4m3"):
    _fake_rowwise(x, fmt)
    return reference.quantize_rowwise(x, fmt)


def _cpu_block(x, block, fmt="e4m3"):
    _fake_block(x, block, fmt)
    return reference.quantize_block(x, block, fmt)


def _cpu_gemm(a, b, scale, trans_a, trans_b, bias, scale_b, out_dtype, fast_accum):
    arguments.check_gemm(a, b, scale, scale_b, trans_a, trans_b, bias, out_dtype)
    left, right = (a.mT if trans_a else a), (b.mT if trans_b else b)
    return reference.gemm(left, right, scale, scale_b, bias, out_dtype)


def _cuda_quantize(x, scale, fmt="e4m3", transposed=False):
    x8, x8_t, amax = run_quantize(x, scale, fmt, not transposed, transposed)
    return (x8_t if transposed else x8), amax


def _register() -> None:
    inputs = "Tensor x, Tensor scale"
    ring = "int hist_idx, float fp8_max, float pow2_margin"
    define(
        f'fp8_quantize({inputs}, str fmt="e4m3", bool transposed=False) -> (Tensor, Tensor)',
        _cuda_quantize,
        _fake_quantize,
        _cpu_quantize,
    )
    define(
        f'fp8_quantize_dual({inputs}, str fmt="e4m3") -> (Tensor, Tensor, Tensor)',
        lambda x, scale, fmt="e4m3": run_quantize(x, scale, fmt, True, True),
        _fake_dual,
        _cpu_dual,
    )
    define(
        f"fp8_quantize_ring({inputs}, Tensor(a!) ring_state, str fmt, bool transposed, {ring}) "
        "-> Tensor",
        run_ring,
        _fake_ring,
        _cpu_ring,
    )
    define(
        f"fp8_quantize_dual_ring({inputs}, Tensor(a!) ring_state, str fmt, {ring}) "
        "-> (Tensor, Tensor)",
        run_dual_ring,
        lambda x, scale, ring_state, fmt, *_: _fake_dual(x, scale, fmt)[:2],
        _cpu_checked_dual_ring,
    )
    define(
        'fp8_dynamic_step(Tensor x, str fmt="e4m3", float pow2_margin=1.0) -> Tensor',
        run_step,
        _fake_step,
        _cpu_step,
    )
    define(
        'fp8_quantize_rowwise(Tensor x, str fmt="e4m3") -> (Tensor, Tensor)',
        run_rowwise,
        _fake_rowwise,
        _cpu_rowwise,
    )
    define(
        'fp8_quantize_block(Tensor x, int[2] block, str fmt="e4m3") -> (Tensor, Tensor)',
        run_block,
        _fake_block,
        _cpu_block,
    )
    define(
        "fp8_gemm(Tensor a, Tensor b, Tensor scale, bool trans_a, bool trans_b, Tensor? bias, "
        "Tensor? scale_b, ScalarType out_dtype, bool fast_accum) -> Tensor",
        run_gemm,
        _fake_gemm,
        _cpu_gemm,
    )


_register()
