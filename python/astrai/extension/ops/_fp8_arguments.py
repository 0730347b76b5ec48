"""Formats, and the checks of the arguments of ``ops.fp8``."""

from __future__ import annotations

import torch

from astrai.extension.errors import DtypeError, ShapeError
from astrai.extension.ops._kernel import require_tensor

# OCP 8-bit floating point: e4m3 without infinities, e5m2 with IEEE's.
FP8_MAX = {"e4m3": 448.0, "e5m2": 57344.0}
FP8_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
MIN_STEP = 1e-12  # of tensors that are (nearly) zero, so that 1 / step is finite
BLOCK = 128  # elements of K that share a step
BLOCKS = ((1, BLOCK), (BLOCK, BLOCK))
MAX_BATCH = 65535
INPUTS = (torch.bfloat16, torch.float16, torch.float32)


def check_format(function: str, fmt: object) -> None:
    """Raises ValueError for a name that is no format."""
    if fmt not in FP8_MAX:
        raise ValueError(
            f"{function}: unsupported fp8 format: fmt must be 'e4m3' or 'e5m2', got {fmt!r}"
        )


def check_input(function: str, x: object) -> None:
    """Raises TypeError for what cannot be quantised."""
    require_tensor(function, "x", x)
    if x.dtype not in INPUTS:
        raise DtypeError(
            f"{function}: x must be bf16/fp16/fp32 (fp8 quantize requires bf16/fp16/fp32 input), "
            f"got {x.dtype}"
        )


def check_scalar(function: str, name: str, value: object, device: torch.device) -> None:
    """Raises for what is not one float32 on the device."""
    require_tensor(function, name, value)
    if value.dtype is not torch.float32 or value.numel() != 1 or value.device != device:
        kind = DtypeError if value.dtype is not torch.float32 else ShapeError
        raise kind(
            f"{function}: {name} must be a float32 scalar on the input device {device}, got "
            f"{value.dtype} of {value.numel()} elements on {value.device}"
        )


def check_quantize(function: str, x: object, scale: object, fmt: object, two_d: bool) -> None:
    """Raises for arguments that ``quantize`` and ``quantize_dual`` do not take."""
    check_format(function, fmt)
    check_input(function, x)
    check_scalar(function, "scale", scale, x.device)
    if two_d and x.dim() < 2:
        raise ShapeError(
            f"{function}: transposed quantize layouts need a 2D+ tensor, got x of shape "
            f"{tuple(x.shape)}"
        )


def check_ring(function: str, x: torch.Tensor, ring_state: object, hist_idx: int) -> None:
    """Raises for a ring that ``quantize`` does not take."""
    require_tensor(function, "ring_state", ring_state)
    if ring_state.dtype is not torch.float32:
        raise DtypeError(f"{function}: ring_state must be float32, got {ring_state.dtype}")
    fits = ring_state.dim() == 1 and ring_state.numel() > 4 and ring_state.is_contiguous()
    if not fits or ring_state.device != x.device:
        raise ShapeError(
            f"{function}: ring_state must be contiguous [n + 4] with n > 0 on {x.device}, got "
            f"shape {tuple(ring_state.shape)} on {ring_state.device}"
        )
    if not 0 <= hist_idx < ring_state.numel() - 4:
        raise ShapeError(
            f"{function}: hist_idx must be in [0, {ring_state.numel() - 4}), got {hist_idx}"
        )


def check_block(function: str, x: torch.Tensor, block: object) -> None:
    """Raises for a block or a rank that ``quantize_block`` does not take."""
    if tuple(block) not in BLOCKS:
        raise ValueError(f"{function}: block must be one of {list(BLOCKS)}, got {block}")
    if x.dim() < 2:
        raise ShapeError(f"{function}: x must be [..., rows, columns], got {tuple(x.shape)}")


def check_gemm(
    a: object,
    b: object,
    scale: object,
    scale_b: object,
    trans_a: bool,
    trans_b: bool,
    bias: object,
    out_dtype: torch.dtype,
) -> tuple[int, ...]:
    """Raises for arguments that ``mm_fp8`` does not take; returns the shape of the result."""
    function = "mm_fp8"
    for name, value in (("a", a), ("b", b)):
        require_tensor(function, name, value)
        if value.dtype not in FP8_DTYPES.values():
            raise DtypeError(f"{function}: a and b must be fp8, got {name} of {value.dtype}")
        if value.dim() not in (2, 3):
            raise ShapeError(
                f"{function}: {name} must have rank 2 or 3, got shape {tuple(value.shape)}"
            )
    if a.device != b.device:
        raise ShapeError(f"{function}: b must be on a's device {a.device}, got {b.device}")
    if out_dtype not in INPUTS:
        raise DtypeError(
            f"{function}: out_dtype must be bfloat16, float16 or float32, got {out_dtype}"
        )
    m, k = (a.shape[-1], a.shape[-2]) if trans_a else a.shape[-2:]
    k_of_b, n = (b.shape[-1], b.shape[-2]) if trans_b else b.shape[-2:]
    if k != k_of_b:
        raise ShapeError(f"{function}: inner dim mismatch: b must have K = {k}, got {k_of_b}")
    batch = _batch(a, b)
    _check_scales(a, scale, scale_b, m, n, k)
    if bias is not None:
        require_tensor(function, "bias", bias)
        if bias.dtype not in INPUTS:
            raise DtypeError(f"{function}: bias must be bf16, fp16 or fp32, got {bias.dtype}")
        if bias.dim() != 1 or bias.numel() not in (0, n) or bias.device != a.device:
            raise ShapeError(
                f"{function}: bias must be [{n}] on {a.device}, got shape {tuple(bias.shape)} on "
                f"{bias.device}"
            )
    return (*batch, m, n)


def _batch(a: torch.Tensor, b: torch.Tensor) -> tuple[int, ...]:
    sizes = [x.shape[0] if x.dim() == 3 else 1 for x in (a, b)]
    if sizes[0] != sizes[1] and 1 not in sizes:
        raise ShapeError(
            f"mm_fp8: batch dim mismatch: b must have batch {sizes[0]} or 1, got {sizes[1]}"
        )
    if a.dim() == 2 and b.dim() == 2:
        return ()
    batch = sizes[1] if sizes[0] == 1 else sizes[0]
    if batch > MAX_BATCH:
        raise ShapeError(f"mm_fp8: batch must be at most {MAX_BATCH}, got {batch}")
    return (batch,)


def _check_scales(a: torch.Tensor, scale: object, scale_b: object, m: int, n: int, k: int) -> None:
    require_tensor("mm_fp8", "scale", scale)
    if scale_b is None:
        check_scalar("mm_fp8", "scale", scale, a.device)
        return
    require_tensor("mm_fp8", "scale_b", scale_b)
    blocks = -(-k // BLOCK)
    for name, value, rows in (("scale", scale, m), ("scale_b", scale_b, n)):
        if value.dtype is not torch.float32:
            raise DtypeError(f"mm_fp8: {name} must be float32, got {value.dtype}")
        tall = -(-rows // BLOCK)
        if value.dim() >= 2:
            good = value.shape[-1] == blocks and value.shape[-2] in (rows, tall)
        else:
            good = value.numel() == 1 or value.shape == (rows,)
        if not good or value.device != a.device:
            raise ShapeError(
                f"mm_fp8: {name} must be one element, [{rows}], [{rows}, {blocks}] or "
                f"[{tall}, {blocks}] on {a.device}, got shape {tuple(value.shape)} on "
                f"{value.device}"
            )
    if (scale.dim() >= 2) != (scale_b.dim() >= 2):
        raise ShapeError(
            "mm_fp8: scale and scale_b must both have steps of blocks or neither, got shapes "
            f"{tuple(scale.shape)} and {tuple(scale_b.shape)}"
        )
