"""Attention over packed queries: runs of requests are padded to one size and computed together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from astrai.extension.ops.reference.dense import (
    MAX_ELEMENTS,
    NEGATIVE_INFINITY,
    Features,
    Lengths,
    attention,
    compute_dtype,
    storable,
)

# So few scores, keys and values that padding costs less than another round of launches.
FEW_ELEMENTS = 1 << 16
FEW_ELEMENTS_ON_GPU = 1 << 22


@dataclass(frozen=True)
class Requests:
    """How many queries and keys each request of a packed call has.

    Attributes:
        q_starts: int64 [batch + 1] on the device, prefix sums of the numbers of queries.
        kv_lens: int64 [batch] on the device.
        q_sizes: The numbers of queries on the host.
        kv_sizes: ``kv_lens`` on the host.
    """

    q_starts: torch.Tensor
    kv_lens: torch.Tensor
    q_sizes: list[int]
    kv_sizes: list[int]

    @staticmethod
    def read(q_starts: torch.Tensor, kv_lens: torch.Tensor) -> Requests:
        """From what the device alone knows: waits for it."""
        q_starts, kv_lens = q_starts.long(), kv_lens.long()
        return Requests(q_starts, kv_lens, q_starts.diff().tolist(), kv_lens.tolist())

    @property
    def q_lens(self) -> torch.Tensor:
        """Numbers of queries, int64 [batch] on the device."""
        return self.q_starts.diff()

    def of_queries(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Request, and position among its keys, of each query: int64 [tokens]."""
        request = _owners(self.q_lens, sum(self.q_sizes))
        place = torch.arange(len(request), device=request.device) - self.q_starts[request]
        return request, place + (self.kv_lens - self.q_lens)[request]

    def of_keys(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Request and position of each key, one request after another: int64 [keys]."""
        request = _owners(self.kv_lens, sum(self.kv_sizes))
        starts = self.kv_lens.cumsum(0) - self.kv_lens
        return request, torch.arange(len(request), device=request.device) - starts[request]


def _owners(lengths: torch.Tensor, total: int) -> torch.Tensor:
    """[0] * lengths[0] + [1] * lengths[1] + ..., ``total`` numbers in all."""
    indices = torch.arange(len(lengths), device=lengths.device)
    return torch.repeat_interleave(indices, lengths, output_size=total)


# (first request, one past the last, kv_len) -> k and v of these requests [requests, kv_len,
# kv_heads, dim], anything where there is no key; and bool [requests, kv_len], which keys there are
# within the requests' lengths, or None for all.
PaddedKeys = Callable[[int, int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]


def packed_attention(
    q: torch.Tensor,
    kv_heads: int,
    v_head_dim: int,
    requests: Requests,
    keys: PaddedKeys,
    mask: torch.Tensor | None,
    features: Features,
    attend: Callable[..., tuple[torch.Tensor, ...]] = attention,
) -> tuple[torch.Tensor, ...]:
    """Attention of packed queries, run by run of requests that are padded to one size.

    Args:
        q: [tokens, q_heads, head_dim]; tokens that no request owns get out 0 and lse -inf.
        kv_heads: Heads of the keys.
        v_head_dim: Head dim of the values.
        requests: See the class.
        keys: See ``PaddedKeys``.
        mask: [batch|1, q_heads|1, rows|1, width] as in ``attention``; positions that it has no row
            or column for may not attend.
        features: See the class.
        attend: ``attention``, or a function of its arguments that returns out, or out and lse.

    Returns:
        As ``attend``, for packed tokens.
    """
    # Nobody asks for the keys of a request without queries.
    sizes = [
        (q_len, kv_len if q_len else 0)
        for q_len, kv_len in zip(requests.q_sizes, requests.kv_sizes, strict=True)
    ]
    width = kv_heads * (q.shape[2] + v_head_dim)
    start, parts = 0, []
    few = FEW_ELEMENTS if q.device.type == "cpu" else FEW_ELEMENTS_ON_GPU
    for first, last in _runs(sizes, q.shape[1], width, few):
        q_sizes, kv_sizes = zip(*sizes[first:last], strict=True)
        count, q_len, kv_len = last - first, max(q_sizes), max(kv_sizes)
        own = q[start : start + sum(q_sizes)]
        if len(own) == 0:
            continue
        lengths = None
        if len(set(sizes[first:last])) > 1:
            lengths = Lengths(requests.q_lens[first:last], requests.kv_lens[first:last])
        padded = len(own) < count * q_len
        if padded:
            starts = requests.q_starts[first:last] - start
            places = starts[:, None] + torch.arange(q_len, device=q.device)
            queries = own[places.clamp_max(len(own) - 1)]
        else:
            queries = own.unflatten(0, (count, q_len))
        k, v, present = keys(first, last, kv_len)
        part = _part_of_mask(mask, first, last, q_len, kv_len)
        if present is not None:
            part = _restricted(part, present[:, None, None])
        results = attend(queries, k, v, part, features, lengths)
        if padded:
            request = _owners(requests.q_lens[first:last], len(own))
            rows = torch.arange(len(own), device=q.device) + request * q_len - starts[request]
            parts.append([x.flatten(0, 1)[rows] for x in results])
        else:
            parts.append([x.flatten(0, 1) for x in results])
        start += len(own)
    if start < len(q) or not parts:
        rest = q[start:]
        lse = q.new_full(rest.shape[:-1], NEGATIVE_INFINITY, dtype=compute_dtype(q))
        parts.append([rest.new_zeros(*rest.shape[:-1], v_head_dim), lse])
    return tuple(torch.cat(x) for x in zip(*parts, strict=False))


def _runs(
    sizes: list[tuple[int, int]], q_heads: int, width: int, few: int
) -> Iterator[tuple[int, int]]:
    """Runs (first, one past the last) of requests that one padded batch can hold.

    ``sizes`` are the requests' numbers of queries and keys. A run ends where its scores, keys and
    values (``width`` elements a position) would take too much memory, or would be more than ``few``
    and a fifth of them padding.
    """

    def elements(q_len: int, kv_len: int) -> int:
        return kv_len * (q_len * q_heads + width)

    first = own = longest_q = longest_kv = 0
    for i, (q_len, kv_len) in enumerate(sizes):
        longest_q, longest_kv = max(longest_q, q_len), max(longest_kv, kv_len)
        own += elements(q_len, kv_len)
        padded = (i + 1 - first) * elements(longest_q, longest_kv)
        if i > first and padded > min(MAX_ELEMENTS, max(own * 5 // 4, few)):
            yield first, i
            first, own, longest_q, longest_kv = i, elements(q_len, kv_len), q_len, kv_len
    if sizes:
        yield first, len(sizes)


def _part_of_mask(
    mask: torch.Tensor | None, first: int, last: int, q_len: int, kv_len: int
) -> torch.Tensor | None:
    """A packed call's mask for some requests, [requests|1, q_heads|1, q_len|1, kv_len]."""
    if mask is None:
        return None
    own = mask if mask.shape[0] == 1 else mask[first:last]
    own = own[:, :, :q_len, :kv_len]
    missing_rows = 0 if mask.shape[2] == 1 else q_len - own.shape[2]
    nothing = False if mask.dtype is torch.bool else NEGATIVE_INFINITY
    missing = (0, kv_len - own.shape[3], 0, missing_rows)
    return torch.nn.functional.pad(own, missing, value=nothing) if any(missing) else own


def _restricted(mask: torch.Tensor | None, present: torch.Tensor) -> torch.Tensor:
    """A mask, or none, that bars what is not present too."""
    if mask is None:
        return present
    if mask.dtype is torch.bool:
        return mask & present
    return mask.masked_fill(~present, NEGATIVE_INFINITY)


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    features: Features,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over packed queries, keys and values; shapes as in ``ops.attn_varlen``."""
    starts = cu_seqlens_k.long()
    requests = Requests.read(cu_seqlens_q, starts.diff())

    def keys(first, last, kv_len):
        places = starts[first:last, None] + torch.arange(kv_len, device=k.device)
        places = places.clamp_max(max(len(k) - 1, 0))
        return *(storable(x)[places].view(x.dtype) for x in (k, v)), None

    out, lse = packed_attention(q, k.shape[1], v.shape[2], requests, keys, None, features)
    return out, lse


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
