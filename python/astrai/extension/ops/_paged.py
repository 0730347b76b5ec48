"""Attention over a paged cache; see ``ops.attention``."""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

from astrai.extension.errors import ShapeError
from astrai.extension.ops import reference
from astrai.extension.ops._attention import (
    FEATURE_SCHEMA,
    FEATURES,
    UNLIMITED,
    AttentionOperators,
    Result,
    Window,
    kernel_arguments,
    outputs,
    pack_features,
    schema_arguments,
)
from astrai.extension.ops._kernel import Kernel, require_tensor
from astrai.extension.ops._registration import define
from astrai.extension.ops.reference import Step

_DECODE = Kernel("attn_paged_decode", "attn_paged_decode")
_PREFILL = Kernel("attn_paged_prefill", "attn_paged_prefill")
_WORK_MAP = Kernel("attn_paged_prefill", "build_q_work_map")

Q_TILE_ROWS = 64  # query positions of one entry of a work map


def attn_paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor | None,
    req_pool_indices: torch.Tensor | None,
    kv_indptr: torch.Tensor,
    new_k: torch.Tensor | None = None,
    new_v: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
    o_part_buf: torch.Tensor | None = None,
    ml_part_buf: torch.Tensor | None = None,
    out_buf: torch.Tensor | None = None,
    *,
    block_table: torch.Tensor | None = None,
    qo_indptr: torch.Tensor | None = None,
    max_q_len: int | None = None,
    workspace: torch.Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    window: Window = UNLIMITED,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: Step = None,
    v_scale: Step = None,
    deterministic: bool = False,
) -> Result:
    """Attention of 1 to 16 queries per request over a paged cache, which may take new tokens first.

    Request b has ``kv_indptr[b + 1] - kv_indptr[b]`` keys, new ones included; only these
    differences count. Lengths and tables are read on the device when the kernel runs: a captured
    CUDA graph follows them. A negative table entry holds no token, and its keys are skipped;
    entries past the length are never read.

    Args:
        q: bf16 or fp16 CUDA tensor [batch, q_heads, head_dim], the newest token of each request; or
            with ``qo_indptr`` packed [tokens, q_heads, head_dim]. Head dims, head counts and
            strides as ``attn_decode``.
        k_cache: [slots, kv_heads, head_dim] or [pages, page_size, kv_heads, head_dim], page_size a
            power of two up to 256; like q, or float8_e4m3fn. Any strides, but 1 in the last
            dimension: views of a cache that interleaves keys and values are taken as they are.
        v_cache: Likewise with v_head_dim.
        req_to_token: int32 [requests, max_len]: the slot of each token. The slot of a cache of
            larger pages is ``page * page_size + row``, and pages must follow each other in memory.
        req_pool_indices: int32 [batch]: the row of ``req_to_token`` of each request.
        kv_indptr: int32 [batch + 1], prefix sums of the numbers of keys.
        new_k: [tokens of q, kv_heads, head_dim] like q: the keys of the tokens of q, written into
            the cache at the last positions of their requests, and attended to. Exact in a cache of
            q's dtype; for e4m3 divided by ``k_scale``, rounded to nearest, saturating.
        new_v: Likewise with v_head_dim and ``v_scale``; given with ``new_k`` or not at all.
        mask: bool, True = may attend: [batch, width] or [batch, q_heads, q_len, width], columns
            being positions of the request's keys, rows those of its queries. Sizes of 1 broadcast,
            but for the width. Positions without a row or column may not attend: the width should be
            at least the longest request's.
        is_causal: No effect: with ``qo_indptr`` rows are causal anyway, and one query is the last
            position.
        o_part_buf: fp32, contiguous: memory that serves as workspace if none is given, if it is
            large enough, and ``ml_part_buf`` is given too.
        ml_part_buf: fp32, contiguous; not used but for that.
        out_buf: Contiguous [at least the rows of q, q_heads, v_head_dim] like q; the result is
            written to its first rows.
        block_table: int32 [batch, max_pages], the pages of each request, in place of
            ``req_to_token`` and ``req_pool_indices``, which must be None.
        qo_indptr: int32 [batch + 1]: the rows of q of each request, at most 16 each, the newest
            tokens of it; causal among each other.
        max_q_len: No request has more rows of q; 16 if None.
        workspace: Contiguous CUDA memory of at least ``attn_paged_decode_workspace_size(...)``
            bytes, of any dtype and contents, 16-byte aligned. Taken from torch's allocator if None.
        scale: As ``attn_decode``, and so are the following.
        return_lse: Whether to return lse too.
        window: Keys left and right of the diagonal.
        softcap: Bound of the scores.
        sinks: fp32 [q_heads].
        k_scale: Dequantisation step of k_cache.
        v_scale: Dequantisation step of v_cache.
        deterministic: Whether a row's result must not depend on the other requests of the call.

    Returns:
        out [rows of q, q_heads, v_head_dim]: new and contiguous, or a view of ``out_buf``; with
        ``return_lse`` also lse, fp32 [rows of q, q_heads], natural logarithm. A request without
        keys has out 0 and lse -inf.

    Raises:
        ValueError, TypeError, RuntimeError: As ``attn_decode``.
    """
    tensors = (q, k_cache, v_cache, req_to_token, req_pool_indices, block_table, kv_indptr)
    steps = (k_scale, v_scale)
    buffers = (workspace, o_part_buf, ml_part_buf)
    out = None if out_buf is None else _rows_of(out_buf, q)
    lengths = (qo_indptr, max_q_len)
    if is_compiling() or not _DECODE.direct(
        *tensors, qo_indptr, new_k, new_v, mask, sinks, *steps, *buffers, out_buf
    ):
        features = schema_arguments(is_causal, scale, window, softcap, sinks, *steps)
        inputs = (*tensors, *lengths, mask, *features, deterministic)
        return _DECODE_OPERATORS.call(inputs, (new_k, new_v), out, return_lse, workspace)
    out, lse = outputs("attn_paged_decode", q, v_cache, "v_cache", out, return_lse)
    features = (is_causal, scale, window, softcap, sinks, *steps)
    _DECODE.launch(
        *tensors, *lengths, new_k, new_v, mask, *features, out, lse, deterministic, *buffers
    )
    return out if lse is None else (out, lse)


def attn_paged_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor | None,
    req_pool_indices: torch.Tensor | None,
    kv_indptr: torch.Tensor,
    qo_indptr: torch.Tensor,
    q_tile_to_batch: torch.Tensor | None = None,
    q_tile_to_index: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
    *,
    block_table: torch.Tensor | None = None,
    max_q_len: int | None = None,
    workspace: torch.Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    window: Window = UNLIMITED,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: Step = None,
    v_scale: Step = None,
) -> Result:
    """Attention of any number of packed queries per request over a paged cache.

    The cache holds the keys of the queries already: ``rope_append_kv`` puts them there.

    Args:
        q: bf16 or fp16 CUDA tensor [tokens, q_heads, head_dim]; otherwise as ``attn_paged_decode``.
        k_cache: As ``attn_paged_decode``, and so are the following four.
        v_cache: See there.
        req_to_token: See there.
        req_pool_indices: See there.
        kv_indptr: See there.
        qo_indptr: int32 [batch + 1]: the rows of q of each request, the newest tokens of it.
        q_tile_to_batch: int32 [tiles], with ``q_tile_to_index`` from ``build_q_work_map``. Made in
            the call, by one more kernel, if None.
        q_tile_to_index: int32 [tiles].
        mask: bool, True = may attend: [batch, width] or [batch, q_heads, q_len, width] as
            ``attn_paged_decode``.
        is_causal: Whether query i of a request sees only keys up to ``i + kv_len - q_len``.
        block_table: As ``attn_paged_decode``.
        max_q_len: No request has more rows of q; the number of tokens if None.
        workspace: At least ``attn_paged_prefill_workspace_size(...)`` bytes.
        scale: As ``attn_decode``, and so are the following.
        return_lse: Whether to return lse too.
        window: Keys left and right of the diagonal.
        softcap: Bound of the scores.
        sinks: fp32 [q_heads].
        k_scale: Dequantisation step of k_cache.
        v_scale: Dequantisation step of v_cache.

    Returns:
        out [tokens, q_heads, v_head_dim], new and contiguous; with ``return_lse`` also lse, fp32
        [tokens, q_heads], natural logarithm.

    Raises:
        ValueError, TypeError, RuntimeError: As ``attn_decode``.
    """
    tensors = (q, k_cache, v_cache, req_to_token, req_pool_indices, block_table, kv_indptr)
    steps = (k_scale, v_scale)
    lengths = (qo_indptr, max_q_len)
    tiles = (q_tile_to_batch, q_tile_to_index)
    if is_compiling() or not _PREFILL.direct(
        *tensors, qo_indptr, *tiles, mask, sinks, *steps, workspace
    ):
        features = schema_arguments(is_causal, scale, window, softcap, sinks, *steps)
        inputs = (*tensors, *lengths, *tiles, mask, *features)
        return _PREFILL_OPERATORS.call(inputs, (), None, return_lse, workspace)
    out, lse = outputs("attn_paged_prefill", q, v_cache, "v_cache", None, return_lse)
    features = (is_causal, scale, window, softcap, sinks, *steps)
    _PREFILL.launch(*tensors, *lengths, None, None, mask, *features, out, lse, *tiles, workspace)
    return out if lse is None else (out, lse)


def build_q_work_map(
    qo_indptr: torch.Tensor, total_q: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The map from blocks of ``attn_paged_prefill`` to their queries: O(1) for each block.

    Entry t stands for queries ``64 * q_tile_to_index[t]`` and the 63 behind it of request
    ``q_tile_to_batch[t]``; entries left over have batch -1.

    Args:
        qo_indptr: int32 contiguous [batch + 1], prefix sums of the requests' numbers of queries.
        total_q: The last of them. Read from the device if None, which waits for it.

    Returns:
        (q_tile_to_batch, q_tile_to_index), int32 [total_q // 64 + min(batch, total_q)].

    Raises:
        ValueError, TypeError, RuntimeError: As ``attn_decode``.
    """
    require_tensor("build_q_work_map", "qo_indptr", qo_indptr)
    if total_q is None:
        total_q = int(qo_indptr[-1])
    if is_compiling() or not _WORK_MAP.direct(qo_indptr):
        return torch.ops.astrai.build_q_work_map(qo_indptr, total_q)
    return _run_work_map(qo_indptr, total_q)


def _rows_of(out_buf: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The first rows of ``out_buf``, as many as q has."""
    require_tensor("attn_paged_decode", "out_buf", out_buf)
    require_tensor("attn_paged_decode", "q", q)
    rows = q.shape[0] if q.dim() > 0 else 1
    if out_buf.dim() == 0 or out_buf.shape[0] < rows:
        raise ShapeError(
            f"attn_paged_decode: out_buf must be of at least {rows} rows like q, got shape "
            f"{tuple(out_buf.shape)}"
        )
    return out_buf.narrow(0, 0, rows)


# ---- Operators ----------------------------------------------------------------------------------

_CACHE_SCHEMA = (
    "Tensor q, Tensor k_cache, Tensor v_cache, Tensor? req_to_token, Tensor? req_pool_indices, "
    "Tensor? block_table, Tensor kv_indptr"
)


def _cache_of(inputs):
    _, k_cache, v_cache, req_to_token, req_pool_indices, block_table, _ = inputs
    if block_table is not None:
        return reference.PagedCache(k_cache, v_cache, block_table, None)
    return reference.PagedCache(k_cache, v_cache, req_to_token, req_pool_indices)


def _reference_decode(inputs, extra):
    qo_indptr, _, mask, *features = inputs[7:]
    is_causal = features[0] or qo_indptr is not None
    rule = pack_features(is_causal, *features[1:FEATURES])
    cache = _cache_of(inputs[:7])
    return reference.paged_attention(inputs[0], cache, inputs[6], qo_indptr, *extra, mask, rule)


def _reference_prefill(inputs, extra):
    qo_indptr, _, _, _, mask, *features = inputs[7:]
    rule = pack_features(*features)
    cache = _cache_of(inputs[:7])
    return reference.paged_attention(inputs[0], cache, inputs[6], qo_indptr, None, None, mask, rule)


def _launch_decode(inputs, extra, out, lse, workspace):
    *inputs, deterministic = inputs
    features = kernel_arguments(inputs[10:])
    _DECODE.launch(
        *inputs[:9], *extra, inputs[9], *features, out, lse, deterministic, workspace, None, None
    )


def _launch_prefill(inputs, extra, out, lse, workspace):
    tiles, mask, features = inputs[9:11], inputs[11], kernel_arguments(inputs[12:])
    _PREFILL.launch(*inputs[:9], None, None, mask, *features, out, lse, *tiles, workspace)


_DECODE_OPERATORS = AttentionOperators(
    name="attn_paged_decode",
    schema=f"{_CACHE_SCHEMA}, Tensor? qo_indptr=None, SymInt? max_q_len=None, Tensor? mask=None, "
    f"{FEATURE_SCHEMA}, bool deterministic=False",
    v=2,
    launch=_launch_decode,
    reference=_reference_decode,
    extra="Tensor? new_k, Tensor? new_v",
    mutates=(1, 2),
)
_PREFILL_OPERATORS = AttentionOperators(
    name="attn_paged_prefill",
    schema=f"{_CACHE_SCHEMA}, Tensor qo_indptr, SymInt? max_q_len=None, "
    "Tensor? q_tile_to_batch=None, Tensor? q_tile_to_index=None, Tensor? mask=None, "
    f"{FEATURE_SCHEMA}",
    v=2,
    launch=_launch_prefill,
    reference=_reference_prefill,
)


def _work_map_size(qo_indptr: torch.Tensor, total_q: int) -> int:
    return total_q // Q_TILE_ROWS + torch.sym_min(max(qo_indptr.shape[0] - 1, 0), total_q)


def _new_work_map(qo_indptr: torch.Tensor, total_q: int) -> tuple[torch.Tensor, torch.Tensor]:
    size = _work_map_size(qo_indptr, total_q)
    return tuple(qo_indptr.new_empty(size, dtype=torch.int32) for _ in range(2))


def _run_work_map(qo_indptr, total_q):
    maps = _new_work_map(qo_indptr, total_q)
    _WORK_MAP.launch(qo_indptr, *maps)
    return maps


def _reference_work_map(qo_indptr, total_q):
    return reference.q_work_map(qo_indptr, _work_map_size(qo_indptr, total_q), Q_TILE_ROWS)


def _register() -> None:
    _DECODE_OPERATORS.register()
    _PREFILL_OPERATORS.register()
    define(
        "build_q_work_map(Tensor qo_indptr, SymInt total_q) -> (Tensor, Tensor)",
        _run_work_map,
        _new_work_map,
        _reference_work_map,
    )


_register()
