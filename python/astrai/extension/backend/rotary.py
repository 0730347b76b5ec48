"""Rotary position embedding: policy entry points, torch fallback and the angle table.

Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021. A pair (x1, x2) of
a head is turned by the angle of its token and frequency: ``y1 = x1 cos - x2 sin``, ``y2 = x1 sin +
x2 cos``, in float32 (float64 for float64 inputs).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from astrai.extension.backend.attention_base import compute_capability, kernel_loaded
from astrai.extension.dispatch import (
    ImplRecord,
    Spec,
    axis,
    register_family,
    resolve,
)
from astrai.extension.errors import DtypeError, ShapeError
from astrai.extension.loader import why_unavailable
from astrai.extension.ops import rotary as rotary_ops

FAMILY = "rotary"
MIN_CAPABILITY = 80


class Rotary(NamedTuple):
    """A rotation of q and k: the arguments of ``rotary_embed`` that are no q and k.

    Attributes:
        cos_sin_cache: As there.
        positions: As there.
        interleaved: As there.
    """

    cos_sin_cache: torch.Tensor
    positions: torch.Tensor
    interleaved: bool = False


def rotary_axes(
    x: torch.Tensor,
    angles: torch.Tensor,
    k: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> dict[str, Any]:
    """Describe a rotary call to the dispatcher.

    Args:
        x: The tensor to rotate (q, if there is a k).
        angles: ``freqs_cis``, or ``cos_sin_cache`` where ``positions`` are given.
        k: Second tensor, or None.
        positions: Positions into the cache, or None.

    Returns:
        ``dtype``, ``device_cuda`` and ``grad_enabled`` of x, ``rank``, ``needs_grad``,
        ``capability`` (90 = sm_90; 0 on a CPU), ``angles_dtype``, ``uniform`` (all tensors on x's
        device, k of x's dtype), ``per_token`` (freqs_cis has exactly one row of angles for every
        token; always true with positions), ``kernel_loaded``.
    """
    grad = torch.is_grad_enabled()
    cuda = x.is_cuda
    device = x.device
    uniform = angles.device == device
    needs_grad = x.requires_grad or angles.requires_grad
    if k is not None:
        uniform = uniform and k.device == device and k.dtype is x.dtype
        needs_grad = needs_grad or k.requires_grad
    if positions is not None:
        uniform = uniform and positions.device == device
        per_token = True
    else:
        per_token = x.dim() > 2 and angles.shape == (*x.shape[:-2], x.shape[-1] // 2, 2)
    return {
        "dtype": x.dtype,
        "device_cuda": cuda,
        "grad_enabled": grad,
        "rank": x.dim(),
        "needs_grad": grad and needs_grad,
        "capability": compute_capability(device.index) if cuda else 0,
        "angles_dtype": angles.dtype,
        "uniform": uniform,
        "per_token": per_token,
        "kernel_loaded": cuda and kernel_loaded("rotary_emb"),
    }


def apply_rotary_emb(x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
    """Rotate the interleaved pairs (2i, 2i + 1) of every head by per-token angles.

    The CUDA kernel runs if it is there, x is a bf16 or fp16 CUDA tensor of rank 3 or 4 with one row
    of fp32 angles for each token, and autograd does not record the call; else torch, which takes
    any rank, dtype and broadcastable freqs_cis.

    Args:
        x: ``[..., heads, head_dim]``, such as ``[tokens, H, D]`` or ``[B, S, H, D]``; D even.
        freqs_cis: fp32 ``[..., D / 2, 2]`` = (cos, sin), with x's axes before the heads. See
            ``get_rotary_emb``.

    Returns:
        A new tensor of x's shape and dtype.

    Raises:
        ShapeError, TypeError: Arguments that do not fit together.
    """
    _check_tensors("apply_rotary_emb", x=x, freqs_cis=freqs_cis)
    return resolve(FAMILY, x, freqs_cis).record.obj.apply(x, freqs_cis)


def rotary_embed(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    inplace: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotate q and k, in one launch on CUDA, by angles looked up by position.

    Args:
        q: ``[tokens, Hq, D]`` or ``[B, S, Hq, D]``.
        k: The same with Hk heads, or None.
        cos_sin_cache: fp32 ``[max_pos, rotary_dim]``: ``rotary_dim / 2`` cosines, then as many
            sines.
        positions: int32 or int64, one per token (``[tokens]``, or ``[B, S]``). The rotated part of
            a token whose position is outside the cache becomes NaN.
        interleaved: Pairs are (2i, 2i + 1); else (i, i + rotary_dim / 2).
        rotary_dim: Leading elements of a head that are rotated; the rest passes through. None = the
            cache's width.
        inplace: Write into q and k and return them.

    Returns:
        (q, k) rotated; k is None if it came as None.

    Raises:
        ShapeError, TypeError: Arguments that do not fit together.
    """
    _check_tensors("rotary_embed", q=q, cos_sin_cache=cos_sin_cache, positions=positions)
    if k is not None:
        _check_tensors("rotary_embed", k=k)
    impl = resolve(FAMILY, q, cos_sin_cache, k, positions).record.obj
    return impl.embed(q, k, cos_sin_cache, positions, interleaved, rotary_dim, inplace)


def get_rotary_emb(
    dim: int, max_len: int, base: float = 10000.0, device: torch.device | str | None = None
) -> torch.Tensor:
    """Table of angles for ``apply_rotary_emb``: index it by position to get freqs_cis.

    Args:
        dim: Head dimension, even.
        max_len: Positions.
        base: Base of the geometric series of frequencies, ``base ** (-2 i / dim)``.
        device: Where the table goes.

    Returns:
        fp32 ``[max_len, dim / 2, 2]`` = (cos, sin). Angles are computed in float64: in float32
        those of late positions would be off by more than the rounding of the result.
    """
    if dim <= 0 or dim % 2:
        raise ShapeError(f"get_rotary_emb: dim must be even and positive, got {dim}")
    exponent = torch.arange(0, dim, 2, dtype=torch.float64) / dim
    positions = torch.arange(max_len, dtype=torch.float64)
    angles = torch.outer(positions, base**-exponent)
    return torch.stack([angles.cos(), angles.sin()], dim=-1).to(torch.float32).to(device)


# ---- implementations ----


class CudaRotary:
    """The rotary kernel."""

    @staticmethod
    def apply(x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
        """See ``apply_rotary_emb``."""
        return rotary_ops.rotary_emb(x, freqs_cis)

    @staticmethod
    def embed(
        q: torch.Tensor,
        k: torch.Tensor | None,
        cos_sin_cache: torch.Tensor,
        positions: torch.Tensor,
        interleaved: bool,
        rotary_dim: int | None,
        inplace: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See ``rotary_embed``."""
        cos_sin_cache = cos_sin_cache.contiguous()
        if not inplace:
            q = q if q.stride(-1) == 1 else q.contiguous()
            k = k if k is None or k.stride(-1) == 1 else k.contiguous()
        return rotary_ops.rotary_embed(
            q, k, cos_sin_cache, positions, interleaved, rotary_dim, inplace
        )


class TorchRotary:
    """The rotation in torch operations; differentiable."""

    @staticmethod
    def apply(x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
        """See ``apply_rotary_emb``."""
        _check_floating("apply_rotary_emb", "x", x)
        _check_floating("apply_rotary_emb", "freqs_cis", freqs_cis)
        if x.dim() < 2 or x.shape[-1] % 2:
            raise ShapeError(
                "apply_rotary_emb: x must be [..., heads, head_dim] with an even head_dim, "
                f"got shape {tuple(x.shape)}"
            )
        if freqs_cis.dim() < 2 or freqs_cis.shape[-2:] != (x.shape[-1] // 2, 2):
            raise ShapeError(
                f"apply_rotary_emb: freqs_cis must end in [{x.shape[-1] // 2}, 2], "
                f"got shape {tuple(freqs_cis.shape)}"
            )
        tokens, angle_tokens = x.shape[:-2], freqs_cis.shape[:-2]
        fits = len(angle_tokens) <= len(tokens) and all(
            have in (1, want) for have, want in zip(angle_tokens[::-1], tokens[::-1], strict=False)
        )
        if not fits:
            raise ShapeError(
                f"apply_rotary_emb: freqs_cis must have x's leading dims {tuple(tokens)} (or 1), "
                f"got shape {tuple(freqs_cis.shape)}"
            )
        angles = freqs_cis.to(_compute_dtype(x)).unsqueeze(-3)
        return _rotate(x, angles[..., 0], angles[..., 1], interleaved=True)

    @staticmethod
    def embed(
        q: torch.Tensor,
        k: torch.Tensor | None,
        cos_sin_cache: torch.Tensor,
        positions: torch.Tensor,
        interleaved: bool,
        rotary_dim: int | None,
        inplace: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See ``rotary_embed``."""
        width = _check_embed(q, k, cos_sin_cache, positions, rotary_dim)
        # As the kernel does: a position outside the cache shows as NaN instead of an index error,
        # which on a GPU would end the process's CUDA context.
        inside = (positions >= 0) & (positions < cos_sin_cache.shape[0])
        if cos_sin_cache.shape[0] == 0:  # there is no row to read, whatever the position
            cos_sin_cache = cos_sin_cache.new_zeros(1, width)
        rows = cos_sin_cache[positions.clamp(0, cos_sin_cache.shape[0] - 1)]
        rows = rows.masked_fill(~inside.unsqueeze(-1), float("nan"))
        rows = rows.to(_compute_dtype(q)).reshape(*q.shape[:-2], 1, width)
        cos, sin = rows.chunk(2, dim=-1)
        rotated = [
            None if x is None else _rotate_part(x, cos, sin, width, interleaved) for x in (q, k)
        ]
        if inplace:
            for x, y in zip((q, k), rotated, strict=True):
                if x is not None:
                    x.copy_(y)
            return q, k
        return rotated[0], rotated[1]


def _compute_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def _rotate_part(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, width: int, interleaved: bool
) -> torch.Tensor:
    if width == x.shape[-1]:
        return _rotate(x, cos, sin, interleaved)
    head = _rotate(x[..., :width], cos, sin, interleaved)
    return torch.cat([head, x[..., width:]], dim=-1)


def _rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """Rotate the whole last dimension; cos, sin ``[..., 1, pairs]`` in the compute dtype."""
    wide = x.to(cos.dtype)
    if interleaved:
        first, second = wide[..., 0::2], wide[..., 1::2]
    else:
        first, second = wide.chunk(2, dim=-1)
    pair = (first * cos - second * sin, first * sin + second * cos)
    out = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return out.to(x.dtype)


def _check_tensors(where: str, **arguments: object) -> None:
    for name, value in arguments.items():
        if not isinstance(value, torch.Tensor):
            kind = "None" if value is None else type(value).__name__
            raise TypeError(f"{where}: {name} must be a torch.Tensor, got {kind}")


def _check_floating(where: str, name: str, x: torch.Tensor) -> None:
    if not x.dtype.is_floating_point:
        raise DtypeError(f"{where}: {name} must be floating, got {x.dtype}")


def _check_embed(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    rotary_dim: int | None,
) -> int:
    """Check the arguments of ``rotary_embed``; returns the rotated width."""
    where = "rotary_embed"
    _check_floating(where, "q", q)
    if q.dim() not in (3, 4):
        raise ShapeError(f"{where}: q must be 3D or 4D, got shape {tuple(q.shape)}")
    if k is not None:
        if k.dtype is not q.dtype:
            raise DtypeError(f"{where}: k must have q's dtype {q.dtype}, got {k.dtype}")
        if k.dim() != q.dim() or k.shape[:-2] != q.shape[:-2] or k.shape[-1] != q.shape[-1]:
            raise ShapeError(
                f"{where}: k must have q's tokens and head_dim {tuple(q.shape)}, "
                f"got shape {tuple(k.shape)}"
            )
    if cos_sin_cache.dim() != 2:
        raise ShapeError(
            f"{where}: cos_sin_cache must be 2D [max_pos, rotary_dim], "
            f"got shape {tuple(cos_sin_cache.shape)}"
        )
    _check_floating(where, "cos_sin_cache", cos_sin_cache)
    width = cos_sin_cache.shape[1] if rotary_dim is None else rotary_dim
    if width <= 0 or width % 2 or width > q.shape[-1]:
        raise ShapeError(
            f"{where}: rotary_dim must be even and 2 to head_dim {q.shape[-1]}, got {width}"
        )
    if cos_sin_cache.shape[1] != width:
        raise ShapeError(
            f"{where}: cos_sin_cache must have rotary_dim {width} columns, "
            f"got shape {tuple(cos_sin_cache.shape)}"
        )
    if positions.dtype not in (torch.int32, torch.int64):
        raise DtypeError(f"{where}: positions must be int32 or int64, got {positions.dtype}")
    tokens = q.shape[:-2].numel()
    if positions.numel() != tokens or (positions.dim() != 1 and positions.shape != q.shape[:-2]):
        raise ShapeError(
            f"{where}: positions must be [{tokens}] or {tuple(q.shape[:-2])}, "
            f"got shape {tuple(positions.shape)}"
        )
    return width


_CUDA_SPEC = (
    axis("device_cuda").truthy()
    & axis("dtype").in_(torch.bfloat16, torch.float16)
    & axis("needs_grad").falsy()
    & axis("rank").in_(3, 4)
    & axis("angles_dtype").is_(torch.float32)
    & axis("uniform").truthy()
    & axis("per_token").truthy()
    & axis("capability").at_least(MIN_CAPABILITY)
    & axis("kernel_loaded").truthy()
)


def _records() -> list[ImplRecord]:
    return [
        ImplRecord(
            FAMILY,
            "cuda",
            CudaRotary,
            _CUDA_SPEC,
            available=lambda: kernel_loaded("rotary_emb"),
            priority=10,
            why_unavailable=lambda: why_unavailable("rotary_emb"),
        ),
        ImplRecord(FAMILY, "torch", TorchRotary, Spec.always()),
    ]


register_family(FAMILY, rotary_axes, _records, "torch")
