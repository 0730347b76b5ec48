"""Reading and writing the KV cache of packed (inference) calls.

A packed call holds the tokens of several requests one after another: q ``[tokens, Hq, D]``, k and v
``[tokens, Hk, D]``. The cache object is only looked at through the attributes of ``PackedKVCache``:
this package does not import the inference package.
"""

from __future__ import annotations

from typing import Protocol

import torch

from astrai.extension.errors import DtypeError, ShapeError
from astrai.extension.ops.reference import (
    PaddedKeys,
    PagedCache,
    Requests,
    Step,
    storable,
    store,
)


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
        complete: bool, every position below a request's length has a token, so that no slot is
            negative there, nor in ``out_cache_loc``; true of contiguous caches. The flash backend
            takes no other.

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


def is_contiguous(cache: PackedKVCache) -> bool:
    """Whether row r of the cache owns the slots from ``r * max_seq`` on."""
    return bool(getattr(cache, "contiguous", False))


def is_complete(cache: PackedKVCache) -> bool:
    """Whether every position of every request is known to have a token."""
    return bool(getattr(cache, "complete", False)) or is_contiguous(cache)


def requests(cache: PackedKVCache, tokens: int, fwd: str | None) -> Requests:
    """How many queries and keys each request of a packed call has.

    Waits for the device where the cache has no host copies of the lengths.

    Args:
        cache: Cache of the call.
        tokens: Query tokens of the call.
        fwd: ``"prefill"`` or ``"decode"``.

    Raises:
        ShapeError: The cache describes another number of requests or tokens than the call has.
    """
    kv_sizes = getattr(cache, "lens", None)
    if kv_sizes is None:
        kv_sizes = cache.seq_lens.tolist()
    count = len(kv_sizes)
    q_sizes = getattr(cache, "q_lens", None)
    if q_sizes is None:
        if fwd == "decode" and tokens == count:
            q_sizes = [1] * count
        else:
            q_sizes = cache.qo_indptr.diff().tolist()
    if len(q_sizes) != count or cache.seq_lens.numel() != count:
        raise ShapeError(
            "attention: kv_cache must give one length and query length per request, "
            f"got {cache.seq_lens.numel()}, {count} and {len(q_sizes)}"
        )
    if fwd == "decode" and any(n != 1 for n in q_sizes):
        raise ShapeError(f"attention: decode must have one query token per request, got {q_sizes}")
    if sum(q_sizes) != tokens:
        raise ShapeError(
            f"attention: q must have the {sum(q_sizes)} tokens that kv_cache describes, "
            f"got {tokens}"
        )
    room = _room(cache)
    if max(kv_sizes, default=0) > room:
        raise ShapeError(
            f"attention: kv_cache's table has room for {room} tokens of a request, "
            f"got a length of {max(kv_sizes)}"
        )
    return Requests(cache.qo_indptr.long(), cache.seq_lens.long(), q_sizes, kv_sizes)


def _room(cache: PackedKVCache) -> int:
    """Tokens that a row of the table can stand for."""
    table = block_table(cache)
    return cache.req_to_token.shape[1] if table is None else table.shape[1] * cache.page_size


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


def paged_cache(cache: PackedKVCache, layer_id: int) -> PagedCache:
    """One layer of a cache as the torch operators take it."""
    table = block_table(cache)
    return PagedCache(
        cache.k_buffer[layer_id],
        cache.v_buffer[layer_id],
        cache.req_to_token if table is None else table,
        cache.req_pool_indices if table is None else None,
        is_complete(cache),
    )


def padded_keys(cache: PackedKVCache, layer_id: int, requests: Requests) -> PaddedKeys:
    """The keys of a layer for ``ops.reference.packed_attention``.

    Of a contiguous cache whose rows are known on the host and follow each other, these are views.
    """
    if not is_contiguous(cache):
        return paged_cache(cache, layer_id).padded(requests)
    max_seq = cache.req_to_token.shape[1]
    held = [x[layer_id].unflatten(0, (-1, max_seq)) for x in (cache.k_buffer, cache.v_buffer)]
    rows = getattr(cache, "rows", None)

    def keys(first: int, last: int, kv_len: int) -> tuple[torch.Tensor, torch.Tensor, None]:
        chosen = None if rows is None else rows[first:last]
        if chosen is not None and chosen == list(range(chosen[0], chosen[0] + len(chosen))):
            part = slice(chosen[0], chosen[-1] + 1)
        else:
            part = cache.req_pool_indices[first:last].long()
        k, v = (storable(x[:, :kv_len])[part].view(x.dtype) for x in held)
        return k, v, None

    return keys


def append(cache: PackedKVCache, layer_id: int, k: torch.Tensor, v: torch.Tensor) -> None:
    """Write the K and V of this call's tokens into their slots; negative slots are passed over.

    Raises:
        ShapeError, DtypeError: See ``check_new_tokens``.
    """
    check_new_tokens(cache, k, v)
    held = cache.k_buffer[layer_id], cache.v_buffer[layer_id]
    for buffer, new, step in zip(held, (k, v), steps(cache), strict=True):
        slots = cache.out_cache_loc.long()
        store(buffer, slots, new.detach(), step, all_valid=is_complete(cache))


def restored(x: torch.Tensor, step: Step, dtype: torch.dtype) -> torch.Tensor:
    """Float8 values times their step; others as they are."""
    if x.dtype is not torch.float8_e4m3fn:
        return x
    wide = x.float()
    return (wide if step is None else wide * step).to(dtype)
