"""Stand-ins for flash-attn 2 and flash-attn 4 that run on the CPU.

They have the signatures of the libraries, refuse what the libraries refuse, and return what those
return. What is seen of the arguments is kept in ``calls``.
"""

import math
from types import ModuleType

import torch

from astrai.extension.backend.reference import attention_reference

calls = []


def _record(name, **arguments):
    calls.append((name, arguments))


def _check_tensors(*tensors):
    for x in tensors:
        assert x.dtype in (torch.bfloat16, torch.float16) and x.dtype is tensors[0].dtype
        assert x.stride(-1) == 1, "last dimension must be contiguous"


def _attend(q, k, v, scale, causal, window, softcap, sinks=None):
    """One request: q [q_len, H, D]; returns out [q_len, H, D] and lse [H, q_len]."""
    out, lse = attention_reference(
        q[None].double(),
        k[None].double(),
        v[None].double(),
        None,
        causal,
        scale,
        True,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )
    return out[0].to(q.dtype), lse[0].transpose(0, 1).float()


def _each(q, keys, values, cu_seqlens_q, *features):
    """Packed queries; keys and values are those of each request."""
    ends = cu_seqlens_q.tolist()
    assert ends[0] == 0 and ends[-1] == len(q), "cu_seqlens_q must cover q"
    out = torch.full((*q.shape[:-1], values[0].shape[-1]), math.nan, dtype=q.dtype)
    lse = torch.full((q.shape[1], len(q)), math.nan)
    for b, own in enumerate(zip(keys, values, strict=True)):
        rows = slice(*ends[b : b + 2])
        out[rows], lse[:, rows] = _attend(q[rows], *own, *features)
    return out, lse


def _check_offsets(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
    for cu, largest in ((cu_seqlens_q, max_seqlen_q), (cu_seqlens_k, max_seqlen_k)):
        assert cu.dtype is torch.int32 and cu.is_contiguous()
        assert type(largest) is int and largest >= int(cu.diff().max())


# ---- flash-attn 2 -------------------------------------------------------------------------------


def _check_2(q, scale, window, softcap):
    assert q.shape[-1] <= 256 and q.shape[-1] % 8 == 0
    assert scale is None or scale > 0
    assert type(window) is tuple and all(type(n) is int and n >= -1 for n in window)
    assert softcap >= 0


def _lse_2(lse):
    return lse.masked_fill(lse == -math.inf, math.inf)


def flash_attn_func_2(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    _record("func2", causal=causal, window=window_size)
    _check_tensors(q, k, v)
    _check_2(q, softmax_scale, window_size, softcap)
    assert q.shape[0] == k.shape[0] > 0 and k.shape == v.shape and k.shape[1] > 0
    parts = [
        _attend(*x, softmax_scale, causal, window_size, softcap) for x in zip(q, k, v, strict=True)
    ]
    out, lse = (torch.stack(x) for x in zip(*parts, strict=True))
    return (out, _lse_2(lse), None) if return_attn_probs else out


def flash_attn_varlen_func_2(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    _record("varlen2", max_seqlen_q=max_seqlen_q, paged=block_table is not None)
    _check_tensors(q, k, v)
    _check_2(q, softmax_scale, window_size, softcap)
    _check_offsets(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if max_seqlen_q == 1:
        assert len(q) == len(cu_seqlens_q) - 1, "q is reshaped to one query a request"
    lens = cu_seqlens_k.diff().tolist()
    if block_table is None:
        assert k.shape == v.shape and len(k) == int(cu_seqlens_k[-1])
        keys = [x.split(lens) for x in (k, v)]
    else:
        keys = [_pages_2(x, block_table, lens) for x in (k, v)]
    out, lse = _each(q, *keys, cu_seqlens_q, softmax_scale, causal, window_size, softcap)
    return (out, _lse_2(lse), None) if return_attn_probs else out


def _pages_2(x, block_table, lens):
    """Keys of each request out of pages."""
    assert block_table.dtype is torch.int32 and block_table.stride(-1) == 1
    page_size = x.shape[1]
    assert page_size % 256 == 0, "Paged KV cache block size must be divisible by 256"
    out = []
    for row, n in zip(block_table.tolist(), lens, strict=True):
        pages = row[: -(-n // page_size)]
        assert all(0 <= page < len(x) for page in pages)
        out.append(x[pages].flatten(0, 1)[:n] if pages else x[0, :0])
    return out


def flash_attn_with_kvcache_2(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
):
    _record("kvcache2")
    _check_tensors(q, k_cache, v_cache)
    _check_2(q, softmax_scale, window_size, softcap)
    assert cache_seqlens.dtype is torch.int32 and cache_seqlens.shape == q.shape[:1]
    lens = cache_seqlens.tolist()
    keys = zip(*(_pages_2(x, block_table, lens) for x in (k_cache, v_cache)), strict=True)
    parts = [
        _attend(one, *own, softmax_scale, causal, window_size, softcap)
        for one, own in zip(q, keys, strict=True)
    ]
    out, lse = (torch.stack(x) for x in zip(*parts, strict=True))
    return (out, _lse_2(lse)) if return_softmax_lse else out


def flash_attn_2(version="2.8.3"):
    """The module ``flash_attn`` with flash-attn 2 in it."""
    module = ModuleType("flash_attn")
    module.__path__ = []
    module.__version__ = version
    module.flash_attn_func = flash_attn_func_2
    module.flash_attn_varlen_func = flash_attn_varlen_func_2
    module.flash_attn_with_kvcache = flash_attn_with_kvcache_2
    return module


# ---- flash-attn 4 -------------------------------------------------------------------------------


def _window_4(window):
    assert len(window) == 2 and all(n is None or (type(n) is int and n >= 0) for n in window)
    return tuple(-1 if n is None else n for n in window)


def _check_4(q, scale, sinks):
    assert scale is None or scale > 0
    if sinks is not None:
        assert sinks.shape == (q.shape[-2],) and sinks.dtype is torch.float32


def flash_attn_func_4(
    q,
    k,
    v,
    qv=None,
    gather_kv_indices=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    score_mod=None,
    score_mod_bwd=None,
    mask_mod=None,
    aux_tensors=None,
    aux_scalars=None,
    block_sparse_tensors=None,
    block_sparse_tensors_bwd=None,
    return_lse=False,
    gather_bwd_recompute_p=False,
    gather_bwd_token_chunk=None,
):
    _record("func4", causal=causal, window=window_size)
    _check_tensors(q, k, v)
    _check_4(q, softmax_scale, learnable_sink)
    window = _window_4(window_size)
    assert not causal or q.shape[1] <= k.shape[1], "rows without keys"
    parts = [
        _attend(*x, softmax_scale, causal, window, softcap, learnable_sink)
        for x in zip(q, k, v, strict=True)
    ]
    out, lse = (torch.stack(x) for x in zip(*parts, strict=True))
    return out, lse if return_lse else None


def flash_attn_varlen_func_4(
    q,
    k,
    v,
    qv=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    min_seqlen_k=None,
    seqused_q=None,
    seqused_k=None,
    gather_kv_indices=None,
    page_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    score_mod=None,
    score_mod_bwd=None,
    mask_mod=None,
    block_sparse_tensors=None,
    aux_tensors=None,
    aux_scalars=None,
    return_lse=False,
    scheduler_metadata=None,
    seqlen_k_per_split=None,
    disable_scheduler_metadata=False,
    gather_bwd_recompute_p=False,
    gather_bwd_token_chunk=None,
):
    _record("varlen4", max_seqlen_q=max_seqlen_q)
    _check_tensors(q, k, v)
    _check_4(q, softmax_scale, learnable_sink)
    assert page_table is None, "unused rows of pages would have to be finite"
    assert torch.isfinite(k).all() and torch.isfinite(v).all()
    _check_offsets(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    assert len(k) == len(v) == int(cu_seqlens_k[-1])
    out, lse = _each(
        q,
        k.split(cu_seqlens_k.diff().tolist()),
        v.split(cu_seqlens_k.diff().tolist()),
        cu_seqlens_q,
        softmax_scale,
        causal,
        _window_4(window_size),
        softcap,
        learnable_sink,
    )
    return out, lse if return_lse else None


def flash_attn_4():
    """The module ``flash_attn.cute``."""
    module = ModuleType("flash_attn.cute")
    module.flash_attn_func = flash_attn_func_4
    module.flash_attn_varlen_func = flash_attn_varlen_func_4
    return module
