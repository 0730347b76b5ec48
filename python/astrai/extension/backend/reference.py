"""``attention_reference``: the definition of attention (``ops.reference``) behind checks."""

from __future__ import annotations

import math

import torch

from astrai.extension.backend.masks import UNLIMITED, expand_mask
from astrai.extension.errors import DtypeError, ShapeError
from astrai.extension.ops import reference
from astrai.extension.ops.reference import Features


def check_dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, where: str = "attention"
) -> None:
    """Check q ``[B, Lq, Hq, D]`` against k ``[B, Lk, Hk, D]`` and v ``[B, Lk, Hk, Dv]``.

    Raises:
        ShapeError: Ranks, sizes or head counts do not fit.
        DtypeError: The three do not share one floating dtype.
        ValueError: They do not share one device.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ShapeError(
                f"{where}: {name} must be 4D [batch, seq, heads, head_dim], "
                f"got shape {tuple(tensor.shape)}"
            )
    if k.shape[:-1] != v.shape[:-1]:
        raise ShapeError(
            f"{where}: k and v must have one shape but for the head_dim, got {tuple(k.shape)} and "
            f"{tuple(v.shape)}"
        )
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ShapeError(
            f"{where}: k must have q's batch {q.shape[0]} and head_dim {q.shape[3]}, "
            f"got shape {tuple(k.shape)}"
        )
    if q.shape[3] == 0:
        raise ShapeError(f"{where}: head_dim must be at least 1, got q shape {tuple(q.shape)}")
    check_heads(q.shape[2], k.shape[2], where)
    if not q.dtype.is_floating_point or q.dtype is not k.dtype or q.dtype is not v.dtype:
        raise DtypeError(
            f"{where}: q, k and v must have one floating dtype, got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if q.device != k.device or q.device != v.device:
        raise ValueError(
            f"{where}: q, k and v must be on one device, got {q.device}, {k.device}, {v.device}"
        )


def check_heads(q_heads: int, kv_heads: int, where: str = "attention") -> None:
    """Check that each K/V head serves a whole number of query heads.

    Raises:
        ShapeError: It does not.
    """
    if kv_heads == 0 or q_heads % kv_heads:
        raise ShapeError(
            f"{where}: q_heads must be a multiple of kv_heads {kv_heads}, got {q_heads}"
        )


def check_features(
    window: object, softcap: float, sinks: object, q: torch.Tensor, where: str = "attention"
) -> None:
    """Check window, softcap and sinks of a call with q ``[..., Hq, D]``.

    Raises:
        ShapeError: A number out of range, or sinks of another shape.
        DtypeError: Sinks are not float32 (float64 goes with a float64 q).
        TypeError: Sinks are no tensor.
        ValueError: Sinks are on another device.
    """
    sides = tuple(window) if isinstance(window, (tuple, list)) else ()
    if len(sides) != 2 or not all(isinstance(n, int) and n >= -1 for n in sides):
        raise ShapeError(
            f"{where}: window must be (left, right), integers of -1 (all keys) or more, "
            f"got {window!r}"
        )
    if not 0 <= softcap < math.inf:
        raise ShapeError(f"{where}: softcap must be finite and 0 or more, got {softcap}")
    if sinks is None:
        return
    if not isinstance(sinks, torch.Tensor):
        raise TypeError(f"{where}: sinks must be a torch.Tensor, got {type(sinks).__name__}")
    if sinks.shape != q.shape[-2:-1]:
        raise ShapeError(
            f"{where}: sinks must be [{q.shape[-2]}], one for each head of q, "
            f"got shape {tuple(sinks.shape)}"
        )
    if sinks.dtype is not torch.float32 and not sinks.dtype is q.dtype is torch.float64:
        raise DtypeError(f"{where}: sinks must be float32, got {sinks.dtype}")
    if sinks.device != q.device:
        raise ValueError(f"{where}: sinks must be on q's device {q.device}, got {sinks.device}")


def attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    *,
    window: tuple[int, int] = UNLIMITED,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(softcap(scale * q k^T) + mask) v, written out in torch.

    Any device and floating dtype; float64 inputs are computed in float64, all others in float32.
    Differentiable, also in rows that see no key. Keys that no query sees may hold anything.

    Args:
        q: ``[B, Lq, Hq, D]``.
        k: ``[B, Lk, Hk, D]``, Hq a multiple of Hk; query head h reads K/V head ``h // (Hq // Hk)``.
        v: ``[B, Lk, Hk, Dv]``.
        mask: See ``backend.masks``.
        is_causal: Bottom-right causal mask, on top of ``mask``.
        scale: Factor of q k^T; None = ``1 / sqrt(D)``.
        return_lse: Also return the natural-log sum of exp of each row's scores.
        window: Keys left and right of the bottom-right diagonal that are seen, -1 = all.
        softcap: Scaled scores s become ``softcap * tanh(s / softcap)`` before the mask; 0 = none.
        sinks: ``[Hq]``, natural-log logits that stand in the denominator only, and in lse.

    Returns:
        ``out [B, Lq, Hq, Dv]`` in q's dtype, or ``(out, lse)`` with lse ``[B, Lq, Hq]`` in float32
        (float64 for float64 inputs). A row that sees no key has out 0 and lse -inf, or
        with a sink lse = sink.
    """
    where = "attention_reference"
    check_dense(q, k, v, where)
    check_features(window, softcap, sinks, q, where)
    if mask is not None:
        mask = expand_mask(mask, q.shape[0], q.shape[2], q.shape[1], k.shape[1], where, "mask")
    features = Features(is_causal, scale, tuple(window), softcap, sinks)
    out, lse = reference.attention(q, k, v, mask, features)
    return (out, lse) if return_lse else out
