"""The operators written out in torch: their definition, and their implementation on the CPU.

Any device; float64 inputs are computed in float64, all others in float32. Ragged and paged calls
loop over requests, with lengths read on the host. Arguments are taken to be good.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

Step = float | torch.Tensor | None

NEGATIVE_INFINITY = float("-inf")


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


def visible(q_len: int, kv_len: int, features: Features, device: torch.device) -> torch.Tensor:
    """Keys inside the causal diagonal and the window of each query, bool [q_len, kv_len]."""
    diagonal = torch.arange(q_len, device=device)[:, None] + kv_len - q_len
    keys = torch.arange(kv_len, device=device)[None, :]
    keep = torch.ones(q_len, kv_len, dtype=torch.bool, device=device)
    left, right = features.window
    if features.is_causal:
        right = 0
    if left >= 0:
        keep &= keys >= diagonal - left
    if right >= 0:
        keep &= keys <= diagonal + right
    return keep


def _compute_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def _dequantised(x: torch.Tensor, step: Step, dtype: torch.dtype) -> torch.Tensor:
    x = x.to(dtype)
    return x if step is None else x * step


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keep: torch.Tensor | None,
    features: Features,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over dense keys.

    Args:
        q: [batch, q_len, q_heads, head_dim].
        k: [batch, kv_len, kv_heads, head_dim].
        v: [batch, kv_len, kv_heads, v_head_dim].
        keep: bool, True = may attend, of a shape that expands to [batch, q_heads, q_len, kv_len].
        features: See the class.

    Returns:
        out [batch, q_len, q_heads, v_head_dim] in q's dtype, and lse [batch, q_len, q_heads].
    """
    dtype = _compute_dtype(q)
    q_len, q_heads, head_dim = q.shape[1:]
    kv_len, kv_heads = k.shape[1:3]
    group = q_heads // max(kv_heads, 1)
    scale = 1.0 / math.sqrt(head_dim) if features.scale is None else features.scale
    seen = visible(q_len, kv_len, features, q.device)
    if keep is not None:
        seen = seen & keep.expand(q.shape[0], q_heads, q_len, kv_len)
    # Keys that nobody sees may hold anything.
    used = seen.expand(q.shape[0], q_heads, q_len, kv_len).any(2).any(1)[:, :, None, None]
    keys = _dequantised(k, features.k_scale, dtype).where(used, 0.0).repeat_interleave(group, 2)
    values = _dequantised(v, features.v_scale, dtype).where(used, 0.0).repeat_interleave(group, 2)

    scores = torch.einsum("bqhd,bkhd->bhqk", q.to(dtype), keys) * scale
    if features.softcap > 0:
        scores = features.softcap * torch.tanh(scores / features.softcap)
    scores = scores.masked_fill(~seen, NEGATIVE_INFINITY)
    lse = torch.logsumexp(scores, -1)
    if features.sinks is not None:
        lse = torch.logaddexp(lse, features.sinks.to(dtype)[:, None].expand_as(lse))
    # In a row without keys every score and lse are -inf; their difference would be NaN.
    shift = lse.masked_fill(lse == NEGATIVE_INFINITY, 0.0)
    out = torch.einsum("bhqk,bkhd->bqhd", torch.exp(scores - shift[..., None]), values)
    return out.to(q.dtype), lse.transpose(1, 2).contiguous()


def expand_mask(mask: torch.Tensor | None) -> torch.Tensor | None:
    """A mask of any rank as [batch, q_heads, q_len, kv_len], with sizes of 1 to expand."""
    if mask is None or mask.dim() == 4:
        return mask
    return mask[:, None, None, :] if mask.dim() == 2 else mask[:, None]


def _empty_result(q: torch.Tensor, v_head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Results of packed queries of which none was computed yet."""
    out = q.new_zeros(*q.shape[:-1], v_head_dim)
    return out, torch.full(q.shape[:-1], NEGATIVE_INFINITY, dtype=_compute_dtype(q)).to(q.device)


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    features: Features,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over packed queries, keys and values; shapes as in ``ops.attn_varlen``."""
    out, lse = _empty_result(q, v.shape[-1])
    for (q0, q1), (k0, k1) in zip(_ranges(cu_seqlens_q), _ranges(cu_seqlens_k), strict=True):
        one = attention(q[None, q0:q1], k[None, k0:k1], v[None, k0:k1], None, features)
        out[q0:q1], lse[q0:q1] = one[0][0], one[1][0]
    return out, lse


def _ranges(indptr: torch.Tensor) -> Iterator[tuple[int, int]]:
    ends = indptr.tolist()
    return pairwise(ends)


@dataclass(frozen=True)
class PagedCache:
    """Keys and values in pages, and where the tokens of each request lie.

    Attributes:
        k: [slots, kv_heads, head_dim] or [pages, page_size, kv_heads, head_dim].
        v: Likewise.
        table: [rows, width], entries of pages; with ``rows`` of slots.
        rows: [batch], the table's row of each request; the request itself if None.
    """

    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    rows: torch.Tensor | None

    def slots(self, request: int, kv_len: int) -> torch.Tensor:
        """Slots [kv_len] of a request's tokens; negative where the table has a hole."""
        row = self.table[request if self.rows is None else int(self.rows[request])]
        page_size = 1 if self.rows is not None or self.k.dim() == 3 else self.k.shape[1]
        positions = torch.arange(kv_len, device=row.device)
        entries = row[positions // page_size].long()
        return torch.where(entries < 0, -1, entries * page_size + positions % page_size)

    def gather(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [len(slots), kv_heads, dim]."""
        k, v = (_storable(x)[_place(x, slots.clamp_min(0))].view(x.dtype) for x in (self.k, self.v))
        return k, v


def _place(cache: torch.Tensor, slots: torch.Tensor) -> object:
    """An index of a cache's token dimensions."""
    return slots if cache.dim() == 3 else (slots // cache.shape[1], slots % cache.shape[1])


def _storable(x: torch.Tensor) -> torch.Tensor:
    """x, as bytes where torch does not index its dtype."""
    return x.view(torch.uint8) if x.dtype is torch.float8_e4m3fn else x


def _store(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, step: Step) -> None:
    """Writes rows [len(slots), kv_heads, dim] into the cache; negative slots are passed over."""
    keep = (slots >= 0) & (slots < math.prod(cache.shape[:-2]))
    values = quantised(rows[keep], cache.dtype, step)
    _storable(cache)[_place(cache, slots[keep])] = _storable(values)


def quantised(x: torch.Tensor, dtype: torch.dtype, step: Step) -> torch.Tensor:
    """What a cache of ``dtype`` gets for x: rounded, or divided by the step and saturating."""
    if dtype is not torch.float8_e4m3fn:
        return x.to(dtype)
    x = x.float() if step is None else x.float() / step
    return x.clamp(-448.0, 448.0).to(dtype)


def paged_attention(
    q: torch.Tensor,
    cache: PagedCache,
    kv_indptr: torch.Tensor,
    qo_indptr: torch.Tensor | None,
    new_k: torch.Tensor | None,
    new_v: torch.Tensor | None,
    mask: torch.Tensor | None,
    features: Features,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over a paged cache, which takes the new keys and values first.

    Args:
        q: [tokens, q_heads, head_dim]; without ``qo_indptr`` each token is a request.
        cache: See the class.
        kv_indptr: [batch + 1], prefix sums of the requests' numbers of keys.
        qo_indptr: [batch + 1], prefix sums of their numbers of queries, or None.
        new_k: [tokens, kv_heads, head_dim], or None.
        new_v: Likewise.
        mask: [batch|1, width] or [batch|1, q_heads|1, rows, width]; positions that it has no row or
            column for may not attend.
        features: See the class.

    Returns:
        As ``attention``, for packed tokens.
    """
    out, lse = _empty_result(q, cache.v.shape[-1])
    if qo_indptr is None:
        qo_indptr = torch.arange(q.shape[0] + 1)
    mask = expand_mask(mask)
    lengths = (end - start for start, end in _ranges(kv_indptr))
    for b, ((q0, q1), kv_len) in enumerate(zip(_ranges(qo_indptr), lengths, strict=True)):
        q_len = q1 - q0
        slots = cache.slots(b, kv_len)
        if new_k is not None and new_v is not None:
            fresh = min(q_len, kv_len)
            for x, rows, step in (
                (cache.k, new_k, features.k_scale),
                (cache.v, new_v, features.v_scale),
            ):
                _store(x, slots[kv_len - fresh :], rows[q1 - fresh : q1], step)
        keep = (slots >= 0)[None, None, None]
        if mask is not None:
            keep = keep & _request_mask(mask, b, q_len, kv_len)
        k, v = cache.gather(slots)
        one = attention(q[None, q0:q1], k[None], v[None], keep, features)
        out[q0:q1], lse[q0:q1] = one[0][0], one[1][0]
    return out, lse


def _request_mask(mask: torch.Tensor, request: int, q_len: int, kv_len: int) -> torch.Tensor:
    """One request's [1, q_heads|1, q_len, kv_len] of a paged call's mask."""
    own = mask[request if mask.shape[0] > 1 else 0][None]
    if own.shape[2] == 1:
        own = own.expand(-1, -1, q_len, -1)
    own = own[:, :, :q_len, :kv_len]
    missing = (0, kv_len - own.shape[3], 0, q_len - own.shape[2])
    return torch.nn.functional.pad(own, missing, value=False)


def merge_states(
    o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``ops.merge_states``."""
    dtype = _compute_dtype(o_a)
    lse = torch.logaddexp(lse_a, lse_b)
    shift = lse.masked_fill(lse == NEGATIVE_INFINITY, 0.0)
    out = torch.zeros(o_a.shape, dtype=dtype, device=o_a.device)
    for part, part_lse in ((o_a, lse_a), (o_b, lse_b)):
        share = torch.exp(part_lse - shift)[..., None]
        out += (share * part.to(dtype)).where(share > 0, 0.0)
    return out.to(o_a.dtype), lse


def q_work_map(qo_indptr: torch.Tensor, size: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``ops.build_q_work_map``: tiles of ``rows`` queries, in maps of ``size`` entries."""
    lengths = qo_indptr.diff()
    tiles = (lengths + rows - 1) // rows
    batch = torch.repeat_interleave(torch.arange(len(lengths)), tiles)
    index = torch.arange(len(batch)) - torch.repeat_interleave(tiles.cumsum(0) - tiles, tiles)
    pad = (0, size - len(batch))
    return (
        torch.nn.functional.pad(batch, pad, value=-1).int(),
        torch.nn.functional.pad(index, pad, value=0).int(),
    )


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
    dtype = _compute_dtype(x)
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
    _store(k_cache, slots.long(), k, k_scale)
    _store(v_cache, slots.long(), v, v_scale)
    return rotated_q
