"""Attention over dense keys, and what its arguments mean."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

Step = float | torch.Tensor | None

NEGATIVE_INFINITY = float("-inf")
# Scores, or elements of keys and values, that are held at a time: 512 MiB in float32.
MAX_ELEMENTS = 1 << 27


@dataclass(frozen=True)
class Features:
    """The arguments that all attention functions share."""

    is_causal: bool = False
    scale: float | None = None
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    k_scale: Step = None
    v_scale: Step = None


@dataclass(frozen=True)
class Lengths:
    """Numbers of queries and keys of each request of a padded batch; int64 [batch]."""

    q: torch.Tensor
    kv: torch.Tensor


def visible(
    q_len: int,
    kv_len: int,
    features: Features,
    device: torch.device,
    lengths: Lengths | None = None,
) -> torch.Tensor | None:
    """Keys inside the causal diagonal, the window and the lengths of each query.

    Returns:
        bool [1, 1, q_len, kv_len], with ``lengths`` [batch, 1, q_len|1, kv_len]; None if every
        query sees every key.
    """
    left, right = features.window
    if features.is_causal:
        right = 0
    if lengths is None and left < 0 and right < 0:
        return None
    diagonal = torch.arange(q_len, device=device)[None, None, :, None]
    keys = torch.arange(kv_len, device=device)[None, None, None, :]
    limits = []
    if lengths is None:
        diagonal = diagonal + (kv_len - q_len)
    else:
        diagonal = diagonal + (lengths.kv - lengths.q)[:, None, None, None]
        limits.append(keys < lengths.kv[:, None, None, None])
    if left >= 0:
        limits.append(keys >= diagonal - left)
    if right >= 0:
        limits.append(keys <= diagonal + right)
    keep = limits[0]
    for limit in limits[1:]:
        keep = keep & limit
    return keep


def permitted(
    mask: torch.Tensor | None,
    q_len: int,
    kv_len: int,
    features: Features,
    device: torch.device,
    lengths: Lengths | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Which keys each query sees, and what is added to their scores.

    Args:
        mask: See ``attention``.
        q_len: Queries.
        kv_len: Keys.
        features: See ``visible``, as the other arguments.
        device: Where the result goes.
        lengths: None = every request has q_len queries and kv_len keys.

    Returns:
        ``keep``: bool, expands to [batch, q_heads, q_len, kv_len]; None = every key. ``bias``:
        floating and finite; None = nothing is added. A mask of -inf is a False in ``keep``, so
        that a row of nothing but -inf is a row without keys.
    """
    keep, bias = visible(q_len, kv_len, features, device, lengths), None
    if mask is not None:
        mask = allowed = mask[(None,) * (4 - mask.dim())]
        if mask.dtype is not torch.bool:
            allowed = mask != NEGATIVE_INFINITY
            bias = mask.masked_fill(~allowed, 0.0)
        keep = allowed if keep is None else keep & allowed
    return keep, bias


def cleared(x: torch.Tensor, keep: torch.Tensor | None) -> torch.Tensor:
    """Keys or values [batch, kv_len, ...] with 0 where no query sees: there may be NaN."""
    if keep is None:
        return x
    return x.where(keep.any(2).any(1)[:, :, None, None], 0.0)


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """What x is computed in."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def _dequantised(x: torch.Tensor, step: Step, dtype: torch.dtype) -> torch.Tensor:
    x = x.to(dtype)
    return x if step is None else x * step


def storable(x: torch.Tensor) -> torch.Tensor:
    """x, as bytes where torch does not index its dtype."""
    return x.view(torch.uint8) if x.dtype is torch.float8_e4m3fn else x


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    features: Features,
    lengths: Lengths | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over dense keys; differentiable, also in rows that see no key.

    Args:
        q: [batch, q_len, q_heads, head_dim].
        k: [batch, kv_len, kv_heads, head_dim].
        v: [batch, kv_len, kv_heads, v_head_dim].
        mask: bool, True = may attend, or floating, added to the scores after softcap; of a shape
            that expands to [batch, q_heads, q_len, kv_len]. None = nothing.
        features: See the class.
        lengths: If given, what lies behind a request's own queries and keys is padding: the keys
            are not seen, and the results of the queries mean nothing.

    Returns:
        out [batch, q_len, q_heads, v_head_dim] in q's dtype, and lse [batch, q_len, q_heads]. A row
        that sees no key has out 0 and lse -inf, or lse = sink.
    """
    dtype = compute_dtype(q)
    batch, q_len, q_heads, _ = q.shape
    kv_len = k.shape[1]
    keep, bias = permitted(mask, q_len, kv_len, features, q.device, lengths)
    keys = cleared(_dequantised(k, features.k_scale, dtype), keep)
    values = cleared(_dequantised(v, features.v_scale, dtype), keep)
    if batch * q_heads * q_len * kv_len <= MAX_ELEMENTS:
        return _attention_of_rows(q, keys, values, keep, bias, features)
    rows = max(1, MAX_ELEMENTS // (batch * q_heads * kv_len))
    parts = []
    for start in range(0, q_len, rows):
        part = slice(start, start + rows)
        masks = [x if x is None or x.shape[2] == 1 else x[:, :, part] for x in (keep, bias)]
        parts.append(_attention_of_rows(q[:, part], keys, values, *masks, features))
    out, lse = (torch.cat(x, 1) for x in zip(*parts, strict=True))
    return out, lse


def _attention_of_rows(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    keep: torch.Tensor | None,
    bias: torch.Tensor | None,
    features: Features,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``attention`` with all scores in memory, on keys and values of the compute dtype."""
    dtype = keys.dtype
    kv_heads = keys.shape[2]
    scale = 1.0 / math.sqrt(q.shape[3]) if features.scale is None else features.scale
    group = q.shape[2] // max(kv_heads, 1)
    grouped = q.to(dtype).unflatten(2, (kv_heads, group))
    scores = torch.einsum("bqhgd,bkhd->bhgqk", grouped, keys).flatten(1, 2) * scale
    if features.softcap > 0:
        scores = features.softcap * torch.tanh(scores / features.softcap)
    if bias is not None:
        scores = scores + bias.to(dtype)
    if keep is not None:
        scores = scores.masked_fill(~keep, NEGATIVE_INFINITY)
    lse = torch.logsumexp(scores, -1)
    if features.sinks is not None:
        lse = torch.logaddexp(lse, features.sinks.to(dtype)[:, None].expand_as(lse))
    # In a row without keys every score and lse are -inf; their difference would be NaN.
    shift = lse.masked_fill(lse == NEGATIVE_INFINITY, 0.0)
    weights = torch.exp(scores - shift[..., None]).unflatten(1, (kv_heads, group))
    out = torch.einsum("bhgqk,bkhd->bqhgd", weights, values).flatten(2, 3)
    return out.to(q.dtype), lse.transpose(1, 2).contiguous()


def expand_mask(mask: torch.Tensor | None) -> torch.Tensor | None:
    """A mask of any rank as [batch, q_heads, q_len, kv_len], with sizes of 1 to expand."""
    if mask is None or mask.dim() == 4:
        return mask
    return mask[:, None, None, :] if mask.dim() == 2 else mask[:, None]


def merge_states(
    o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``ops.merge_states``."""
    dtype = compute_dtype(o_a)
    lse = torch.logaddexp(lse_a, lse_b)
    shift = lse.masked_fill(lse == NEGATIVE_INFINITY, 0.0)
    out = torch.zeros(o_a.shape, dtype=dtype, device=o_a.device)
    for part, part_lse in ((o_a, lse_a), (o_b, lse_b)):
        share = torch.exp(part_lse - shift)[..., None]
        out += (share * part.to(dtype)).where(share > 0, 0.0)
    return out.to(o_a.dtype), lse
