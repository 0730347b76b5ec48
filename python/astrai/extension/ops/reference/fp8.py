"""Quantisation to fp8 and the matrix product of fp8 operands; see ``ops.fp8``.

Quantisation is exact: the bits are those of the definition. The products are summed in float32.
"""

from __future__ import annotations

import torch

from astrai.extension.ops._fp8_arguments import BLOCK, FP8_DTYPES, FP8_MAX, MIN_STEP


def to_fp8(x: torch.Tensor, scale: torch.Tensor, fmt: str) -> torch.Tensor:
    """Rounds ``x * scale`` to the nearest code, ties to even; saturates, and NaN stays NaN.

    Args:
        x: Any float dtype; multiplied in float32.
        scale: float32, broadcastable to x.
        fmt: "e4m3" or "e5m2".
    """
    # clamp lets NaN pass; within the largest finite value torch's cast rounds as we want.
    return (x.float() * scale).clamp(-FP8_MAX[fmt], FP8_MAX[fmt]).to(FP8_DTYPES[fmt])


def amax(x: torch.Tensor) -> torch.Tensor:
    """Largest |x| as float32 [1]: NaN if there is one, 0 of nothing."""
    if x.numel() == 0:
        return torch.zeros(1, dtype=torch.float32, device=x.device)
    return x.abs().amax().float().reshape(1)


def finite_amax(x: torch.Tensor, dim: int | tuple[int, ...] | None = None) -> torch.Tensor:
    """Largest finite |x| as float32, over all elements ([1]) or over ``dim``; 0 of nothing."""
    magnitude = torch.where(torch.isfinite(x), x.abs(), 0).float()
    if dim is not None:
        return magnitude.amax(dim) if magnitude.numel() else magnitude.sum(dim)
    return magnitude.amax().reshape(1) if magnitude.numel() else magnitude.new_zeros(1)


def step_of(amax: torch.Tensor, fp8_max: float, pow2_margin: float = 1.0) -> torch.Tensor:
    """Dequantisation step that maps ``amax`` to the largest code; never below ``MIN_STEP``."""
    return (amax / fp8_max / pow2_margin).clamp_min(MIN_STEP)


def quantize(
    x: torch.Tensor, scale: torch.Tensor, fmt: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes in x's shape, the same transposed [columns, rows], largest |x|)."""
    x8 = to_fp8(x.contiguous(), scale, fmt)
    return x8, transposed(x8), amax(x)


def transposed(x8: torch.Tensor) -> torch.Tensor:
    """Codes of [..., columns] as contiguous [columns, rows]; of fewer dimensions as they are."""
    if x8.dim() < 2:
        return x8
    rows = x8.reshape(x8.shape[:-1].numel(), x8.shape[-1])
    return rows.view(torch.uint8).t().contiguous().view(x8.dtype)


def fold_ring(
    ring_state: torch.Tensor,
    amax: torch.Tensor,
    hist_idx: int,
    fp8_max: float,
    pow2_margin: float,
) -> None:
    """Enters ``amax`` into a ring and publishes its new step; see ``ops.quantize``."""
    size = ring_state.numel() - 4
    history, step, nonfinite = ring_state[:size], ring_state[size], ring_state[size + 1]
    total = torch.maximum(ring_state[size + 2], amax[0])
    good = torch.isfinite(total)
    history[hist_idx] = torch.where(good, total, history[hist_idx])
    step.copy_(torch.where(good, step_of(history.amax(), fp8_max, pow2_margin), step))
    nonfinite.add_(~good)
    ring_state[size + 2 :] = 0


def quantize_rowwise(x: torch.Tensor, fmt: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of x [..., columns] and float32 steps [...], one for each row."""
    step = step_of(finite_amax(x, -1), FP8_MAX[fmt])
    return to_fp8(x.contiguous(), step.reciprocal().unsqueeze(-1), fmt), step


def quantize_block(
    x: torch.Tensor, block: tuple[int, int], fmt: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of x [..., rows, columns] and float32 steps, one for each block; see ``ops.fp8``."""
    (rows, columns), (height, width) = x.shape[-2:], block
    blocks = (-(-rows // height), -(-columns // width))
    padding = (0, blocks[1] * width - columns, 0, blocks[0] * height - rows)
    padded = torch.nn.functional.pad(x, padding)
    split = padded.unflatten(-1, (blocks[1], width)).unflatten(-3, (blocks[0], height))
    step = step_of(finite_amax(split, (-3, -1)), FP8_MAX[fmt])
    scale = expand_blocks(step.reciprocal(), rows, columns, height, width)
    return to_fp8(x.contiguous(), scale, fmt), step


def expand_blocks(
    step: torch.Tensor, rows: int, columns: int, height: int, width: int
) -> torch.Tensor:
    """A value for each element out of one for each block."""
    wide = step.repeat_interleave(height, -2)[..., :rows, :]
    return wide.repeat_interleave(width, -1)[..., :columns]


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale: torch.Tensor,
    scale_b: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """The product of a [..., M, K] and b [..., K, N] (fp8), scaled; see ``ops.mm_fp8``."""
    (m, k), n = a.shape[-2:], b.shape[-1]
    left, right = a.float(), b.float()
    factor = None
    if scale_b is not None and scale.dim() >= 2:  # steps of blocks along K
        left = left * _of_blocks(scale, m, k)
        right = right * _of_blocks(scale_b, n, k).mT
    elif scale_b is None:
        factor = scale.reshape(())
    else:
        rows = scale.reshape(-1, 1) if scale.numel() != 1 else scale.reshape(())
        factor = rows * (scale_b if scale_b.numel() != 1 else scale_b.reshape(()))
    with torch.autocast(a.device.type, enabled=False):  # which would multiply in 16 bits
        out = torch.matmul(left, right)
    if factor is not None:
        out = out * factor
    if bias is not None:
        out = out + bias.float()
    return out.to(out_dtype)


def _of_blocks(step: torch.Tensor, rows: int, k: int) -> torch.Tensor:
    height = 1 if step.shape[-2] == rows else BLOCK
    return expand_blocks(step, rows, k, height, BLOCK)
