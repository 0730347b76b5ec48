"""The paged cache: how tokens are found in it, written to it and attended to."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from astrai.extension.ops.reference.dense import Features, Step, expand_mask, storable
from astrai.extension.ops.reference.packed import PaddedKeys, Requests, packed_attention


@dataclass(frozen=True)
class PagedCache:
    """Keys and values in pages, and where the tokens of each request lie.

    Attributes:
        k: [slots, kv_heads, head_dim] or [pages, page_size, kv_heads, head_dim].
        v: Likewise.
        table: [rows, width], entries of pages; with ``rows`` of slots.
        rows: [batch], the table's row of each request; the request itself if None.
        complete: Whether it is known that the table has no holes.
    """

    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    rows: torch.Tensor | None
    complete: bool = False

    @property
    def page_size(self) -> int:
        """Tokens that an entry of the table stands for."""
        return 1 if self.rows is not None or self.k.dim() == 3 else self.k.shape[1]

    def slots(
        self, request: torch.Tensor, position: torch.Tensor, requests: Requests
    ) -> torch.Tensor:
        """Slots of tokens, int64; -1 outside of a request's length and in holes of the table."""
        inside = (position >= 0) & (position < requests.kv_lens[request])
        # Entries past a request's last page may hold anything.
        position = torch.where(inside, position, 0)
        row = request if self.rows is None else self.rows.long()[request]
        entry = self.table[row, position // self.page_size].long()
        slot = entry * self.page_size + position % self.page_size
        return torch.where(inside & (entry >= 0), slot, -1)

    def gather(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [*slots.shape, kv_heads, dim], those of any slot for a negative one."""
        k, v = (storable(x)[_place(x, slots.clamp_min(0))].view(x.dtype) for x in (self.k, self.v))
        return k, v

    def padded(self, requests: Requests) -> PaddedKeys:
        """The keys of requests, for ``packed_attention``."""

        def keys(first, last, kv_len):
            request = torch.arange(first, last, device=self.table.device)[:, None]
            position = torch.arange(kv_len, device=self.table.device)[None]
            slots = self.slots(request, position, requests)
            return *self.gather(slots), None if self.complete else slots >= 0

        return keys


def _place(cache: torch.Tensor, slots: torch.Tensor) -> object:
    """An index of a cache's token dimensions."""
    return slots if cache.dim() == 3 else (slots // cache.shape[1], slots % cache.shape[1])


def store(
    cache: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    step: Step,
    all_valid: bool = False,
) -> None:
    """Writes rows [len(slots), kv_heads, dim] into the cache; slots outside it are passed over.

    ``all_valid``: it is known that there are none.
    """
    capacity = math.prod(cache.shape[:-2])
    if len(slots) == 0 or capacity == 0:
        return
    held, values = storable(cache), storable(quantised(rows, cache.dtype, step))
    if not all_valid:
        # To choose the rows by a mask would wait for the device. A row without a slot repeats what
        # the first row with one writes; if there is none, it writes back what the cache holds.
        keep = (slots >= 0) & (slots < capacity)
        first = keep.int().argmax(keepdim=True)
        slots = torch.where(keep, slots, slots[first].clamp(0, capacity - 1))
        there = held[_place(held, slots)]
        substitute = torch.where(keep[first][:, None, None], values[first], there)
        values = torch.where(keep[:, None, None], values, substitute)
    held[_place(held, slots)] = values


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
    if qo_indptr is None:
        qo_indptr = torch.arange(q.shape[0] + 1, device=q.device)
    requests = Requests.read(qo_indptr, kv_indptr.diff())
    if new_k is not None and new_v is not None:
        slots = cache.slots(*requests.of_queries(), requests)
        store(cache.k, slots, new_k[: len(slots)], features.k_scale)
        store(cache.v, slots, new_v[: len(slots)], features.v_scale)
    out, lse = packed_attention(
        q,
        cache.k.shape[-2],
        cache.v.shape[-1],
        requests,
        cache.padded(requests),
        expand_mask(mask),
        features,
    )
    return out, lse
