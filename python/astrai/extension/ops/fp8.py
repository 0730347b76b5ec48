"""Quantisation to fp8, and matrix products of fp8 operands: one call is one kernel, or an error.

Formats: "e4m3" (torch.float8_e4m3fn, largest value 448) and "e5m2" (torch.float8_e5m2, 57344);
Micikevicius et al., "FP8 Formats for Deep Learning", 2022. A tensor x is held as codes ``x8`` and a
dequantisation *step*: ``x ~ x8 * step``. ``quantize`` takes the reciprocal of the step, ``mm_fp8``
the product of the steps of both operands.

Rounding is to nearest, ties to even, and saturates: what is out of range, infinities too, becomes
the largest finite value of its sign. NaN stays NaN.

There is no autograd here: ``astrai.extension.fp8`` has the policy. CUDA tensors take the kernel
(compute capability 8.9 or newer), CPU tensors the definition.
"""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

from astrai.extension.ops._fp8 import (
    BLOCKWISE,
    GEMM,
    QUANTIZE,
    ROWWISE,
    STEP,
    ring_amax,
    run_block,
    run_dual_ring,
    run_gemm,
    run_quantize,
    run_ring,
    run_rowwise,
    run_step,
)
from astrai.extension.ops._fp8_arguments import BLOCK
from astrai.extension.ops._kernel import Kernel

__all__ = [
    "dynamic_step",
    "mm_fp8",
    "quantize",
    "quantize_block",
    "quantize_dual",
    "quantize_rowwise",
]


def quantize(
    x: torch.Tensor,
    scale: torch.Tensor,
    fmt: str = "e4m3",
    transposed: bool = False,
    ring_state: torch.Tensor | None = None,
    hist_idx: int = 0,
    fp8_max: float = 448.0,
    pow2_margin: float = 1.0,
    *,
    amax_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds ``x * scale`` to fp8, and finds the largest |x|, in one pass.

    Args:
        x: bf16, fp16 or fp32; a copy is made if it is not contiguous.
        scale: fp32, one element, on x's device: the reciprocal of the step.
        fmt: "e4m3" or "e5m2".
        transposed: Whether the codes come transposed: x [..., columns] as [columns, rows].
        ring_state: fp32 [n + 4]: the amaxes of n steps, the step that follows from them, the number
            of amaxes that were not finite, and two slots of the kernel's own that are 0 between
            calls. This call's amax becomes entry ``hist_idx``, and the step becomes
            ``max(max(entries) / fp8_max / pow2_margin, 1e-12)``. An amax that is not finite is
            counted and changes nothing else.
        hist_idx: Entry of the ring, in [0, n).
        fp8_max: Largest value of the format that the ring's step is for.
        pow2_margin: Divides the ring's step: below 1 it leaves headroom.
        amax_out: fp32, one element, on x's device: it becomes the larger of itself and this call's
            amax (NaN is the largest of all), and is returned as the amax.

    Returns:
        (codes, amax): amax is fp32 [1], over x as it came (NaN if x has one); with ``ring_state``
        it is the ring's slot, which reads 0.

    Raises:
        ValueError: An unknown format; (ShapeError) a shape or index that does not fit.
        TypeError: An argument that is no tensor, or (DtypeError) of another dtype.
        RuntimeError: No kernel for this machine; tensors that are not on one device; an argument
            requires grad while grad mode is on.
    """
    if ring_state is not None:
        ring = (ring_state, fmt, transposed, hist_idx, fp8_max, pow2_margin)
        if _by_operator(QUANTIZE, x, scale, ring_state):
            x8 = torch.ops.astrai.fp8_quantize_ring(x, scale, *ring)
        else:
            x8 = run_ring(x, scale, *ring)
        return x8, ring_amax(ring_state)
    if _by_operator(QUANTIZE, x, scale, amax_out):
        x8, amax = torch.ops.astrai.fp8_quantize(x, scale, fmt, transposed)
        return x8, _combined(amax, amax_out)
    x8, x8_t, amax = run_quantize(x, scale, fmt, not transposed, transposed, amax_out)
    return (x8_t if transposed else x8), amax


def quantize_dual(
    x: torch.Tensor,
    scale: torch.Tensor,
    fmt: str = "e4m3",
    ring_state: torch.Tensor | None = None,
    hist_idx: int = 0,
    fp8_max: float = 448.0,
    pow2_margin: float = 1.0,
    *,
    amax_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``quantize`` in both orientations from one read of x.

    Args:
        x: [..., columns], of two dimensions at least; the rest as for ``quantize``.
        scale: As there.
        fmt: As there.
        ring_state: As there.
        hist_idx: As there.
        fp8_max: As there.
        pow2_margin: As there.
        amax_out: As there.

    Returns:
        (codes in x's shape, codes [columns, rows], amax).

    Raises:
        ValueError, TypeError, RuntimeError: As ``quantize``.
    """
    if ring_state is not None:
        ring = (ring_state, fmt, hist_idx, fp8_max, pow2_margin)
        if _by_operator(QUANTIZE, x, scale, ring_state):
            x8, x8_t = torch.ops.astrai.fp8_quantize_dual_ring(x, scale, *ring)
        else:
            x8, x8_t = run_dual_ring(x, scale, *ring)
        return x8, x8_t, ring_amax(ring_state)
    if _by_operator(QUANTIZE, x, scale, amax_out):
        x8, x8_t, amax = torch.ops.astrai.fp8_quantize_dual(x, scale, fmt)
        return x8, x8_t, _combined(amax, amax_out)
    return run_quantize(x, scale, fmt, True, True, amax_out)


def dynamic_step(x: torch.Tensor, fmt: str = "e4m3", pow2_margin: float = 1.0) -> torch.Tensor:
    """The step with which the largest finite |x| becomes the format's largest value.

    Args:
        x: bf16, fp16 or fp32; a copy is made if it is not contiguous.
        fmt: "e4m3" or "e5m2".
        pow2_margin: Divides the step: below 1 it leaves headroom.

    Returns:
        fp32 [1], ``max(amax / fp8_max / pow2_margin, 1e-12)``.

    Raises:
        ValueError, TypeError, RuntimeError: As ``quantize``.
    """
    if _by_operator(STEP, x):
        return torch.ops.astrai.fp8_dynamic_step(x, fmt, pow2_margin)
    return run_step(x, fmt, pow2_margin)


def quantize_rowwise(x: torch.Tensor, fmt: str = "e4m3") -> tuple[torch.Tensor, torch.Tensor]:
    """Codes with a step for each row: ``max(largest finite |row| / fp8_max, 1e-12)``.

    Args:
        x: bf16, fp16 or fp32 [..., columns]; a copy is made if it is not contiguous.
        fmt: "e4m3" or "e5m2".

    Returns:
        (codes in x's shape, steps fp32 [...]).

    Raises:
        ValueError, TypeError, RuntimeError: As ``quantize``.
    """
    if _by_operator(ROWWISE, x):
        return torch.ops.astrai.fp8_quantize_rowwise(x, fmt)
    return run_rowwise(x, fmt)


def quantize_block(
    x: torch.Tensor, block: tuple[int, int] = (1, BLOCK), fmt: str = "e4m3"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes with a step for each block: ``max(largest finite |block| / fp8_max, 1e-12)``.

    Args:
        x: bf16, fp16 or fp32 [..., rows, columns]; a copy is made if it is not contiguous.
        block: (1, 128) or (128, 128); blocks at the edges may be smaller.
        fmt: "e4m3" or "e5m2".

    Returns:
        (codes in x's shape, steps fp32 [..., ceil(rows / block[0]), ceil(columns / block[1])]).

    Raises:
        ValueError, TypeError, RuntimeError: As ``quantize``; ValueError for another block.
    """
    if _by_operator(BLOCKWISE, x):
        return torch.ops.astrai.fp8_quantize_block(x, block, fmt)
    return run_block(x, block, fmt)


def mm_fp8(
    a: torch.Tensor,
    b: torch.Tensor,
    scale: torch.Tensor,
    trans_a: bool = False,
    trans_b: bool = False,
    bias: torch.Tensor | None = None,
    *,
    scale_b: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    fast_accum: bool = True,
) -> torch.Tensor:
    """``A @ B`` of fp8 operands, dequantised: products and sums fp32, one rounding at the end.

    A is ``a``, or its transpose [M, K] if ``trans_a``; B is ``b`` or its transpose [K, N]. A weight
    [N, K] is ``b`` with ``trans_b=True``.

    Args:
        a: e4m3 or e5m2, [rows, columns] or [batch, rows, columns]. Views whose last two strides are
            those of a transposed tensor are read where they lie; of others a copy is made.
        b: Likewise; its format may differ. Batches of 1 (or none) broadcast.
        scale: fp32. Without ``scale_b`` one element, the product of both steps. With it the step of
            a: one element, [M], or one for each block of 128 along K, [M, ceil(K / 128)] or
            [ceil(M / 128), ceil(K / 128)].
        trans_a: See above.
        trans_b: See above.
        bias: bf16, fp16 or fp32 [N], added in fp32 before the rounding; None or empty for none.
        scale_b: fp32, the step of b: one element, [N], [N, ceil(K / 128)] or
            [ceil(N / 128), ceil(K / 128)]. Either both have blocks along K, or neither.
        out_dtype: bfloat16, float16 or float32.
        fast_accum: Whether the tensor cores may sum all of K in their own accumulators, which hold
            fewer bits than fp32 on some GPUs (about 14 on Hopper); else sums go to fp32 every 128
            elements of K. The CPU sums in fp32 either way.

    Returns:
        [M, N], or [batch, M, N] if an operand has a batch. K = 0 gives zeros (plus bias).

    Raises:
        ValueError: (ShapeError) shapes that do not fit.
        TypeError: An argument that is no tensor, or (DtypeError) of another dtype.
        RuntimeError: As ``quantize``.
    """
    if isinstance(bias, torch.Tensor) and bias.numel() == 0:
        bias = None
    args = (a, b, scale, trans_a, trans_b, bias, scale_b, out_dtype, fast_accum)
    if _by_operator(GEMM, a, b, scale, bias, scale_b):
        return torch.ops.astrai.fp8_gemm(*args)
    return run_gemm(*args)


def _by_operator(kernel: Kernel, x: object, *others: object) -> bool:
    """Whether a call goes to the registered operator, which also serves CPU tensors."""
    if is_compiling():
        return True
    on_cpu = isinstance(x, torch.Tensor) and x.device.type == "cpu"
    return on_cpu or not kernel.direct(x, *others)


def _combined(amax: torch.Tensor, amax_out: torch.Tensor | None) -> torch.Tensor:
    if amax_out is None:
        return amax
    return amax_out.copy_(torch.maximum(amax_out, amax))
