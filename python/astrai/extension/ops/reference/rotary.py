"""Rotary embedding, and the write of rotated keys into a cache."""

from __future__ import annotations

import torch

from astrai.extension.ops.reference.dense import Step, compute_dtype
from astrai.extension.ops.reference.paged import store


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """Rotary embedding of the first ``2 * cos.shape[-1]`` elements of each head; the rest passes.

    Args:
        x: [..., tokens, heads, head_dim].
        cos: [..., tokens, rotary_dim / 2], as sin.
        sin: As cos.
        interleaved: Pairs (2i, 2i + 1), else (i, i + rotary_dim / 2).

    Returns:
        In float64 or float32.
    """
    dtype = compute_dtype(x)
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half].to(dtype), x[..., 2 * half :].to(dtype)
    cos, sin = cos.to(dtype).unsqueeze(-2), sin.to(dtype).unsqueeze(-2)
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned[..., :half], turned[..., half:]
    parts = (first * cos - second * sin, first * sin + second * cos)
    out = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat((out, rest), -1)


def rotate_by_table(
    x: torch.Tensor, cos_sin_cache: torch.Tensor, positions: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """``rotate`` with the table's angles; NaN for a position outside the table."""
    positions = positions.reshape(x.shape[:-2]).long()
    inside = (positions >= 0) & (positions < cos_sin_cache.shape[0])
    rows = (
        cos_sin_cache[torch.where(inside, positions, 0)]
        if len(cos_sin_cache)
        else (cos_sin_cache.new_zeros(*positions.shape, cos_sin_cache.shape[1]))
    )
    cos, sin = rows.where(inside[..., None], float("nan")).chunk(2, -1)
    return rotate(x, cos, sin, interleaved)


def rope_append(
    q: torch.Tensor | None,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin_cache: torch.Tensor | None,
    positions: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    interleaved: bool,
    k_scale: Step,
    v_scale: Step,
) -> torch.Tensor | None:
    """See ``ops.rope_append_kv``; returns the rotated q in its dtype."""
    rotated_q = q
    if cos_sin_cache is not None and positions is not None:
        k = rotate_by_table(k, cos_sin_cache, positions, interleaved)
        if q is not None:
            rotated_q = rotate_by_table(q, cos_sin_cache, positions, interleaved).to(q.dtype)
    store(k_cache, slots.long(), k, k_scale)
    store(v_cache, slots.long(), v, v_scale)
    return rotated_q
