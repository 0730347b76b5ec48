"""Reading and writing the KV cache of packed (inference) calls.

A packed call holds the tokens of several requests one after another: q ``[tokens, Hq, D]``, k and v
``[tokens, Hk, D]``. The cache object is only looked at through the attributes of ``PackedKVCache``:
this package does not import the inference package.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple, Protocol

import torch

from astrai.extension.errors import DtypeError, ShapeError
from astrai.extension.ops.reference import Step, quantised


class PackedKVCache(Protocol):
    """What the backends read from a KV cache. B = requests of this call.

    Attributes:
        k_buffer, v_buffer: ``[n_layers, slots, Hk, D]``, or ``[n_layers, pages, page_size, Hk, D]``
            with a block table. Float8 e4m3 buffers hold K and V divided by their scales.
        req_to_token: int32 ``[rows, max_seq]``, the slot of each token of each row; negative = no
            token. None with a block table.
        req_pool_indices: int32 ``[B]``, row of each request.
        seq_lens: int ``[B]``, tokens of each request, those of this call included.
        out_cache_loc: int32 ``[tokens]``, slots for the K and V of this call's tokens.
        qo_indptr: int32 ``[B + 1]``, packed offsets of the requests' queries.

    Optional attributes:
        block_table: int32 ``[B, max_pages]``, the pages of each request, in place of
            ``req_to_token``; ``out_cache_loc`` then holds ``page * page_size + offset``.
        page_size: tokens of a page, 1 without a block table.
        k_scale, v_scale: dequantisation steps of a float8 cache, floats or fp32 scalars on the
            device; None = 1.
        kv_indptr: int32 ``[B + 1]``, prefix sums of ``seq_lens``.
        q_tile_to_batch, q_tile_to_index: work map of the paged prefill kernel.
        workspace: memory for the partial results of the kernels.
        contiguous: bool, row r owns the slots from ``r * max_seq`` on.

    Host copies that save a wait for the device; a captured graph is replayed with other lengths,
    so the CUDA backend does not look at them in decode:
        lens: list of int, ``seq_lens``.
        rows: list of int, ``req_pool_indices``.
        q_lens: list of int, tokens of this call by request.
    """

    k_buffer: torch.Tensor
    v_buffer: torch.Tensor
    req_to_token: torch.Tensor | None
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    out_cache_loc: torch.Tensor
    qo_indptr: torch.Tensor


class Segment(NamedTuple):
    """A run of requests that one dense call can serve: equal lengths, consecutive rows."""

    first: int  # index of the first request in the batch
    count: int  # requests
    row: int  # row of the first request in req_to_token; the others follow
    q_start: int  # first packed query token
    q_len: int  # query tokens of each request
    kv_len: int  # keys of each request

    @property
    def q_end(self) -> int:
        """One past the last packed query token."""
        return self.q_start + self.count * self.q_len


def is_contiguous(cache: PackedKVCache) -> bool:
    """Whether row r of the cache owns the slots from ``r * max_seq`` on."""
    return bool(getattr(cache, "contiguous", False))


def _host(cache: PackedKVCache, name: str, tensor_name: str) -> list[int]:
    values = getattr(cache, name, None)
    return getattr(cache, tensor_name).tolist() if values is None else values


def _query_lengths(cache: PackedKVCache, requests: int, tokens: int, fwd: str | None) -> list[int]:
    values = getattr(cache, "q_lens", None)
    if values is not None:
        return values
    if fwd == "decode" and tokens == requests:
        return [1] * requests
    if requests == 1:
        return [tokens]
    offsets = cache.qo_indptr.tolist()
    return [end - start for start, end in pairwise(offsets)]


def segments(cache: PackedKVCache, tokens: int, fwd: str | None) -> list[Segment]:
    """Cut a packed call into runs that a dense attention call can serve.

    Args:
        cache: Cache of the call.
        tokens: Query tokens of the call.
        fwd: ``"prefill"`` or ``"decode"``.

    Raises:
        ShapeError: The cache describes another number of requests or tokens than the call has.
    """
    lens = _host(cache, "lens", "seq_lens")
    rows = _host(cache, "rows", "req_pool_indices")
    q_lens = _query_lengths(cache, len(lens), tokens, fwd)
    if len(rows) != len(lens) or len(q_lens) != len(lens):
        raise ShapeError(
            "attention: kv_cache must give one row, length and query length per request, "
            f"got {len(rows)}, {len(lens)} and {len(q_lens)}"
        )
    if fwd == "decode" and any(n != 1 for n in q_lens):
        raise ShapeError(f"attention: decode must have one query token per request, got {q_lens}")
    if sum(q_lens) != tokens:
        raise ShapeError(
            f"attention: q must have the {sum(q_lens)} tokens that kv_cache describes, got {tokens}"
        )
    merge = is_contiguous(cache)
    runs: list[Segment] = []
    start = 0
    for index, (row, q_len, kv_len) in enumerate(zip(rows, q_lens, lens, strict=True)):
        last = runs[-1] if runs else None
        if (
            merge
            and last is not None
            and last.q_len == q_len
            and last.kv_len == kv_len
            and last.row + last.count == row
        ):
            runs[-1] = last._replace(count=last.count + 1)
        else:
            runs.append(Segment(index, 1, row, start, q_len, kv_len))
        start += q_len
    return runs


def check_new_tokens(cache: PackedKVCache, k: torch.Tensor, v: torch.Tensor) -> None:
    """Check that the K and V of a call's tokens fit the cache.

    Raises:
        ShapeError: k or v do not fit the cache or the number of slots.
        DtypeError: The cache holds another dtype, and is not one of float8.
    """
    tokens = cache.out_cache_loc.numel()
    for name, new, held in (("k", k, cache.k_buffer), ("v", v, cache.v_buffer)):
        wanted = (tokens, *held.shape[-2:])
        if new.shape != wanted:
            raise ShapeError(
                f"attention: {name} must be {wanted} to fit kv_cache, got shape {tuple(new.shape)}"
            )
        if new.dtype is not held.dtype and held.dtype is not torch.float8_e4m3fn:
            raise DtypeError(
                f"attention: {name} must have kv_cache's dtype {held.dtype}, got {new.dtype}"
            )


def steps(cache: PackedKVCache) -> tuple[Step, Step]:
    """Dequantisation steps of K and V; None where the cache holds them as they are."""
    return getattr(cache, "k_scale", None), getattr(cache, "v_scale", None)


def block_table(cache: PackedKVCache) -> torch.Tensor | None:
    """The block table, or None where ``req_to_token`` says where tokens lie."""
    return getattr(cache, "block_table", None)


def append(cache: PackedKVCache, layer_id: int, k: torch.Tensor, v: torch.Tensor) -> None:
    """Write the K and V of this call's tokens into their slots.

    Raises:
        ShapeError, DtypeError: See ``check_new_tokens``.
    """
    check_new_tokens(cache, k, v)
    for held, new, step in zip(_slots(cache, layer_id), (k, v), steps(cache), strict=True):
        stored = quantised(new.detach(), held.dtype, step)
        if held.dtype is torch.float8_e4m3fn:  # index_put takes no float8
            held, stored = held.view(torch.uint8), stored.view(torch.uint8)
        held[cache.out_cache_loc] = stored


def _slots(cache: PackedKVCache, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a layer as ``[slots, Hk, D]`` views."""
    k, v = cache.k_buffer[layer_id], cache.v_buffer[layer_id]
    return (k, v) if k.dim() == 3 else (k.flatten(0, 1), v.flatten(0, 1))


def keys_and_values(
    cache: PackedKVCache, layer_id: int, run: Segment, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """K and V of a segment, each ``[count, kv_len, Hk, D]``, and which of them exist.

    Views in a contiguous cache of ``dtype``. Otherwise gathered; then the third value is bool
    ``[count, kv_len]``, False where the table has a negative entry: such a position has no token
    and must be masked out. Float8 caches are dequantised to ``dtype``.
    """
    held = _slots(cache, layer_id)
    if is_contiguous(cache):
        max_seq = cache.req_to_token.shape[1]
        low, high = run.row * max_seq, (run.row + run.count) * max_seq
        views = [x[low:high].unflatten(0, (run.count, max_seq))[:, : run.kv_len] for x in held]
        return *(_restored(*pair, dtype) for pair in zip(views, steps(cache), strict=True)), None
    slots = _slots_of(cache, run)
    present = slots >= 0
    # A hole would otherwise read whatever slot 0 holds, and 0 * NaN is NaN.
    hole = ~present[..., None, None]
    rows = slots.clamp(min=0)
    k, v = (
        _restored(x[rows], step, dtype).masked_fill(hole, 0)
        for x, step in zip(held, steps(cache), strict=True)
    )
    return k, v, present


def _slots_of(cache: PackedKVCache, run: Segment) -> torch.Tensor:
    """Slots of a segment's tokens, int64 ``[count, kv_len]``; negative = no token."""
    table = block_table(cache)
    if table is None:
        return cache.req_to_token[run.row : run.row + run.count, : run.kv_len].long()
    size = cache.page_size
    pages = table[run.first : run.first + run.count, : -(-run.kv_len // size)].long()
    slots = pages[..., None] * size + torch.arange(size, device=pages.device)
    slots = slots.masked_fill(pages[..., None] < 0, -1)
    return slots.flatten(1)[:, : run.kv_len]


def _restored(x: torch.Tensor, step: Step, dtype: torch.dtype) -> torch.Tensor:
    """Float8 values times their step; others as they are."""
    if x.dtype is not torch.float8_e4m3fn:
        return x
    wide = x.float()
    return (wide if step is None else wide * step).to(dtype)
