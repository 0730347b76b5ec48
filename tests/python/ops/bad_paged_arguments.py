"""Arguments that the paged, ragged and merging operators refuse; see ``bad_arguments``."""

import torch

from astrai.extension.errors import DtypeError, ShapeError
from tests.python.ops.bad_arguments import FEATURES


def fill(t, *shape):
    return torch.zeros(shape, dtype=torch.int32, device=t.device)


def good_varlen(t):
    """Arguments that attn_varlen takes: sequences of 3 and 4 queries on 5 and 7 keys."""
    return {
        "q": t.randn(7, 8, 64),
        "k": t.randn(12, 2, 64, seed=2),
        "v": t.randn(12, 2, 64, seed=3),
        "cu_seqlens_q": t.ints(0, 3, 7),
        "cu_seqlens_k": t.ints(0, 5, 12),
    }


VARLEN = {
    "q_rank": (
        lambda t: {"q": t.randn(1, 7, 8, 64)},
        ShapeError,
        "q must be 3-D [tokens, q_heads, head_dim], got 4-D of shape (1, 7, 8, 64)",
    ),
    "v_tokens": (
        lambda t: {"v": t.randn(11, 2, 64)},
        ShapeError,
        "v must be of shape (12, 2, 64) = [tokens, kv_heads, head_dim], got (11, 2, 64)",
    ),
    "k_dtype": (
        lambda t: {"k": t.randn(12, 2, 64, dtype=torch.float16)},
        DtypeError,
        "k must be torch.bfloat16 like q or torch.float8_e4m3fn, got torch.float16",
    ),
    "cu_q_list": (
        lambda t: {"cu_seqlens_q": [0, 3, 7]},
        TypeError,
        "cu_seqlens_q must be a torch.Tensor, got list",
    ),
    "cu_q_dtype": (
        lambda t: {"cu_seqlens_q": t.ints(0, 3, 7).long()},
        DtypeError,
        "cu_seqlens_q must be torch.int32, got torch.int64",
    ),
    "cu_q_empty": (
        lambda t: {"cu_seqlens_q": t.ints()},
        ShapeError,
        "cu_seqlens_q must be of shape (batch + 1,), at least one element, got (0,)",
    ),
    "cu_q_rank": (
        lambda t: {"cu_seqlens_q": fill(t, 3, 1)},
        ShapeError,
        "cu_seqlens_q must be 1-D [batch + 1], got 2-D of shape (3, 1)",
    ),
    "cu_k_count": (
        lambda t: {"cu_seqlens_k": t.ints(0, 12)},
        ShapeError,
        "cu_seqlens_k must be of shape (3,) = [batch + 1], got (2,)",
    ),
    "cu_k_stride": (
        lambda t: {"cu_seqlens_k": fill(t, 6)[::2]},
        ShapeError,
        "cu_seqlens_k must be contiguous, got strides (2,) for shape (3,)",
    ),
    "cu_k_cpu": (
        lambda t: {"cu_seqlens_k": t.ints(0, 5, 12).cpu()},
        RuntimeError,
        "cu_seqlens_k must be a CUDA tensor, got a tensor on cpu",
    ),
    "max_q_type": (
        lambda t: {"max_seqlen_q": 3.0},
        TypeError,
        "max_seqlen_q must be an int, got float",
    ),
    "max_k_negative": (
        lambda t: {"max_seqlen_k": -1},
        ShapeError,
        "max_seqlen_k must be 0 or more, got -1",
    ),
    "out_shape": (
        lambda t: {"out": t.randn(8, 8, 64)},
        ShapeError,
        "out must be of shape (7, 8, 64) = [tokens, q_heads, v_head_dim], got (8, 8, 64)",
    ),
    **FEATURES,
}


def good_paged(t):
    """Arguments of both paged operators but for qo_indptr: 2 requests, 6 slots each at most."""
    return {
        "q": t.randn(2, 8, 64),
        "k_cache": t.randn(20, 2, 64, seed=2),
        "v_cache": t.randn(20, 2, 64, seed=3),
        "req_to_token": torch.arange(18, dtype=torch.int32, device=t.device).view(3, 6),
        "req_pool_indices": t.ints(2, 0),
        "kv_indptr": t.ints(0, 6, 9),
    }


PAGED = {
    "q_rank": (
        lambda t: {"q": t.randn(2, 1, 8, 64)},
        ShapeError,
        "q must be 3-D [tokens, q_heads, head_dim], got 4-D of shape (2, 1, 8, 64)",
    ),
    "q_fp32": (
        lambda t: {"q": t.randn(2, 8, 64, dtype=torch.float32)},
        DtypeError,
        "q must be torch.bfloat16 or torch.float16, got torch.float32",
    ),
    "k_cache_rank": (
        lambda t: {"k_cache": t.randn(20, 128)},
        ShapeError,
        "k_cache must be 3-D [slots, kv_heads, dim] or 4-D [pages, page_size, kv_heads, dim], got "
        "2-D of shape (20, 128)",
    ),
    "k_cache_dtype": (
        lambda t: {"k_cache": t.randn(20, 2, 64, dtype=torch.float16)},
        DtypeError,
        "k_cache must be torch.bfloat16 like q or torch.float8_e4m3fn, got torch.float16",
    ),
    "v_cache_dtype": (
        lambda t: {"v_cache": t.randn(20, 2, 64).to(torch.float8_e4m3fn)},
        DtypeError,
        "v_cache must be torch.bfloat16 like k_cache, got torch.float8_e4m3fn",
    ),
    "k_cache_head_dim": (
        lambda t: {"k_cache": t.randn(20, 2, 128)},
        ShapeError,
        "k_cache must be of head_dim 64 like q, got shape (20, 2, 128)",
    ),
    "v_cache_heads": (
        lambda t: {"v_cache": t.randn(20, 1, 64)},
        ShapeError,
        "v_cache must be of 2 heads like k_cache, got shape (20, 1, 64)",
    ),
    "v_cache_head_dim": (
        lambda t: {"v_cache": t.randn(20, 2, 32)},
        ShapeError,
        "v_cache must be of head_dim 64, got shape (20, 2, 32)",
    ),
    "v_cache_slots": (
        lambda t: {"v_cache": t.randn(19, 2, 64)},
        ShapeError,
        "v_cache must be of the pages of k_cache, shape (20, 2, 64), got (19, 2, 64)",
    ),
    "k_cache_stride": (
        lambda t: {"k_cache": t.randn(20, 2, 128)[..., ::2]},
        ShapeError,
        "k_cache must be of stride 1 in its last dimension, got strides (256, 128, 2) for shape "
        "(20, 2, 64)",
    ),
    "k_cache_cpu": (
        lambda t: {"k_cache": t.randn(20, 2, 64).cpu()},
        RuntimeError,
        "k_cache must be a CUDA tensor, got a tensor on cpu",
    ),
    "k_cache_page_gaps": (
        lambda t: {
            "k_cache": t.randn(5, 2, 4, 2, 64)[:, 0],
            "v_cache": t.randn(5, 2, 4, 2, 64)[:, 1],
        },
        ShapeError,
        "k_cache must be of pages that follow each other where req_to_token is given (use "
        "block_table), got strides (1024, 128, 64, 1) for shape (5, 4, 2, 64)",
    ),
    "page_size": (
        lambda t: {
            "k_cache": t.randn(5, 3, 2, 64),
            "v_cache": t.randn(5, 3, 2, 64),
            "block_table": fill(t, 2, 4),
            "req_to_token": None,
            "req_pool_indices": None,
        },
        ShapeError,
        "k_cache must be of a page_size that is a power of two up to 256, got shape (5, 3, 2, 64)",
    ),
    "group": (
        lambda t: {"q": t.randn(2, 7, 64)},
        ShapeError,
        "q must be of a number of heads that is a multiple of the 2 heads of k_cache, got 7 heads",
    ),
    "table_none": (
        lambda t: {"req_to_token": None},
        TypeError,
        "req_to_token must be a torch.Tensor, got None",
    ),
    "table_dtype": (
        lambda t: {"req_to_token": fill(t, 3, 6).long()},
        DtypeError,
        "req_to_token must be torch.int32, got torch.int64",
    ),
    "table_rank": (
        lambda t: {"req_to_token": fill(t, 18)},
        ShapeError,
        "req_to_token must be 2-D [requests, max_len], got 1-D of shape (18,)",
    ),
    "table_stride": (
        lambda t: {"req_to_token": fill(t, 6, 3).T},
        ShapeError,
        "req_to_token must be of stride 1 in its last dimension, got strides (1, 3) for shape "
        "(3, 6)",
    ),
    "rows_none": (
        lambda t: {"req_pool_indices": None},
        TypeError,
        "req_pool_indices must be a torch.Tensor, got None",
    ),
    "rows_dtype": (
        lambda t: {"req_pool_indices": t.ints(2, 0).long()},
        DtypeError,
        "req_pool_indices must be torch.int32, got torch.int64",
    ),
    "rows_count": (
        lambda t: {"req_pool_indices": t.ints(2)},
        ShapeError,
        "req_pool_indices must be of shape (2,) = [batch], got (1,)",
    ),
    "both_tables": (
        lambda t: {"block_table": fill(t, 2, 4)},
        ShapeError,
        "req_to_token must be None where block_table is given, got Tensor",
    ),
    "block_table_and_rows": (
        lambda t: {"block_table": fill(t, 2, 4), "req_to_token": None},
        ShapeError,
        "req_pool_indices must be None where block_table is given, got Tensor",
    ),
    "block_table_rows": (
        lambda t: {
            "block_table": fill(t, 3, 4),
            "req_to_token": None,
            "req_pool_indices": None,
        },
        ShapeError,
        "block_table must be of shape (2, 4) = [batch, max_pages], got (3, 4)",
    ),
    "kv_indptr_none": (
        lambda t: {"kv_indptr": None},
        TypeError,
        "kv_indptr must be a torch.Tensor, got None",
    ),
    "kv_indptr_dtype": (
        lambda t: {"kv_indptr": t.ints(0, 6, 9).long()},
        DtypeError,
        "kv_indptr must be torch.int32, got torch.int64",
    ),
    "kv_indptr_cpu": (
        lambda t: {"kv_indptr": t.ints(0, 6, 9).cpu()},
        RuntimeError,
        "kv_indptr must be a CUDA tensor, got a tensor on cpu",
    ),
    "qo_indptr_dtype": (
        lambda t: {"qo_indptr": t.ints(0, 1, 2).long()},
        DtypeError,
        "qo_indptr must be torch.int32, got torch.int64",
    ),
    "qo_indptr_count": (
        lambda t: {"qo_indptr": t.ints(0, 2)},
        ShapeError,
        "qo_indptr must be of shape (3,) = [batch + 1], got (2,)",
    ),
    "max_q_len_type": (
        lambda t: {"max_q_len": 1.5},
        TypeError,
        "max_q_len must be an int, got float",
    ),
    "mask_rank": (
        lambda t: {"mask": t.ones(2, 1, 6)},
        ShapeError,
        "mask must be 2D or 4D, [batch, kv] or [batch, q_heads, q_len, kv], got 3-D of shape "
        "(2, 1, 6)",
    ),
    "mask_dtype": (
        lambda t: {"mask": fill(t, 2, 6)},
        DtypeError,
        "mask must be torch.bool, got torch.int32",
    ),
    "mask_batch": (
        lambda t: {"mask": t.ones(3, 6)},
        ShapeError,
        "mask must be of size 1 or 2 in its batch dimension, got shape (3, 6)",
    ),
    "mask_heads": (
        lambda t: {"mask": t.ones(2, 2, 1, 6)},
        ShapeError,
        "mask must be of size 1 or 8 in its q_heads dimension, got shape (2, 2, 1, 6)",
    ),
    "mask_stride": (
        lambda t: {"mask": t.ones(2, 12)[:, ::2]},
        ShapeError,
        "mask must be of stride 1 in its last dimension, got strides (12, 2) for shape (2, 6)",
    ),
    "is_causal": (lambda t: {"is_causal": "yes"}, TypeError, "is_causal must be a bool, got str"),
    "scale_nan": (
        lambda t: {"scale": float("nan")},
        ShapeError,
        "scale must be finite in fp32, got nan",
    ),
    **FEATURES,
}

# What attn_paged_decode alone has.
PAGED_DECODE = {
    "kv_indptr_count": (
        lambda t: {"kv_indptr": t.ints(0, 6, 9, 9)},
        ShapeError,
        "kv_indptr must be of shape (3,) = [batch + 1], one query for each request, got (4,)",
    ),
    "max_q_len_17": (
        lambda t: {"max_q_len": 17},
        ShapeError,
        "max_q_len must be in 0..16, got 17",
    ),
    "new_k_alone": (
        lambda t: {"new_k": t.randn(2, 2, 64)},
        ShapeError,
        "new_v must be given where the other of new_k and new_v is, got None",
    ),
    "new_v_alone": (
        lambda t: {"new_v": t.randn(2, 2, 64)},
        ShapeError,
        "new_k must be given where the other of new_k and new_v is, got None",
    ),
    "new_k_shape": (
        lambda t: {"new_k": t.randn(2, 8, 64), "new_v": t.randn(2, 2, 64)},
        ShapeError,
        "new_k must be of shape (2, 2, 64) = [tokens of q, kv_heads, dim], got (2, 8, 64)",
    ),
    "new_v_dtype": (
        lambda t: {"new_k": t.randn(2, 2, 64), "new_v": t.randn(2, 2, 64).half()},
        DtypeError,
        "new_v must be torch.bfloat16 like q, got torch.float16",
    ),
    "new_k_stride": (
        lambda t: {"new_k": t.randn(2, 2, 128)[..., ::2], "new_v": t.randn(2, 2, 64)},
        ShapeError,
        "new_k must be of stride 1 in its last dimension, got strides (256, 128, 2) for shape "
        "(2, 2, 64)",
    ),
    "caches_in_one_memory": (
        lambda t: (
            dict.fromkeys(("k_cache", "v_cache"), t.randn(20, 2, 64))
            | dict.fromkeys(("new_k", "new_v"), t.randn(2, 2, 64))
        ),
        ShapeError,
        "k_cache must be in memory apart from v_cache, got memory that both share",
    ),
    "cache_of_one_slot": (
        lambda t: {
            "k_cache": t.randn(1, 2, 64).expand(20, 2, 64),
            "new_k": t.randn(2, 2, 64),
            "new_v": t.randn(2, 2, 64),
        },
        ShapeError,
        "k_cache must be a tensor whose elements do not share memory, got shape (20, 2, 64) with "
        "strides (0, 64, 1)",
    ),
}


def good_merge(t):
    """Arguments that merge_states takes."""
    return {
        "o_a": t.randn(5, 8, 64),
        "lse_a": t.randn(5, 8, dtype=torch.float32),
        "o_b": t.randn(5, 8, 64, seed=2),
        "lse_b": t.randn(5, 8, dtype=torch.float32, seed=2),
    }


MERGE = {
    "o_a_dtype": (
        lambda t: {"o_a": t.randn(5, 8, 64, dtype=torch.float64)},
        DtypeError,
        "o_a must be torch.bfloat16 or torch.float16 or torch.float32, got torch.float64",
    ),
    "o_a_rank": (
        lambda t: {"o_a": t.randn(1)[0]},
        ShapeError,
        "o_a must be of shape [..., head_dim], got ()",
    ),
    "o_b_dtype": (
        lambda t: {"o_b": t.randn(5, 8, 64, dtype=torch.float16)},
        DtypeError,
        "o_b must be torch.bfloat16 like o_a, got torch.float16",
    ),
    "o_b_shape": (
        lambda t: {"o_b": t.randn(5, 4, 64)},
        ShapeError,
        "o_b must be of shape (5, 8, 64) like o_a, got (5, 4, 64)",
    ),
    "lse_a_dtype": (
        lambda t: {"lse_a": t.randn(5, 8)},
        DtypeError,
        "lse_a must be torch.float32, got torch.bfloat16",
    ),
    "lse_b_shape": (
        lambda t: {"lse_b": t.randn(8, 5, dtype=torch.float32)},
        ShapeError,
        "lse_b must be of shape (5, 8), that of o_a without head_dim, got (8, 5)",
    ),
    "lse_b_cpu": (
        lambda t: {"lse_b": t.randn(5, 8, dtype=torch.float32).cpu()},
        RuntimeError,
        "lse_b must be a CUDA tensor, got a tensor on cpu",
    ),
}
