"""Arguments that rope_append_kv refuses; see ``bad_arguments``."""

import torch

from astrai.extension.errors import DtypeError, ShapeError
from tests.python.ops.bad_arguments import FEATURES


def good_append(t):
    """Arguments that rope_append_kv takes: 7 tokens, pages of 4."""
    return {
        "q": t.randn(7, 4, 64),
        "k": t.randn(7, 2, 64, seed=2),
        "v": t.randn(7, 2, 64, seed=3),
        "cos_sin_cache": t.table(20, 64),
        "positions": torch.arange(7, device=t.device),
        "k_cache": t.randn(5, 4, 2, 64, seed=4),
        "v_cache": t.randn(5, 4, 2, 64, seed=5),
        "slots": torch.arange(7, device=t.device),
    }


APPEND = {
    "q_dtype": (
        lambda t: {"q": t.randn(7, 4, 64, dtype=torch.float16)},
        DtypeError,
        "q must be torch.bfloat16 like k, got torch.float16",
    ),
    "q_tokens": (
        lambda t: {"q": t.randn(8, 4, 64)},
        ShapeError,
        "q must be of shape (7, 4, 64) = [tokens, q_heads, head_dim], got (8, 4, 64)",
    ),
    "q_head_dim": (
        lambda t: {"q": t.randn(7, 4, 32)},
        ShapeError,
        "q must be of shape (7, 4, 64) = [tokens, q_heads, head_dim], got (7, 4, 32)",
    ),
    "q_rank": (
        lambda t: {"q": t.randn(1, 7, 4, 64)},
        ShapeError,
        "q must be 3-D [tokens, heads, head_dim], got 4-D of shape (1, 7, 4, 64)",
    ),
    "q_stride": (
        lambda t: {"q": t.randn(7, 4, 128)[..., ::2]},
        ShapeError,
        "q must be of stride 1 in its last dimension, got strides (512, 128, 2) for shape "
        "(7, 4, 64)",
    ),
    "k_none": (lambda t: {"k": None}, TypeError, "k must be a torch.Tensor, got None"),
    "k_fp32": (
        lambda t: {"k": t.randn(7, 2, 64, dtype=torch.float32)},
        DtypeError,
        "k must be torch.bfloat16 or torch.float16, got torch.float32",
    ),
    "v_dtype": (
        lambda t: {"v": t.randn(7, 2, 64, dtype=torch.float16)},
        DtypeError,
        "v must be torch.bfloat16 like k, got torch.float16",
    ),
    "v_heads": (
        lambda t: {"v": t.randn(7, 4, 64)},
        ShapeError,
        "v must be of shape (7, 2, 64) = [tokens, kv_heads, v_head_dim], got (7, 4, 64)",
    ),
    "table_dtype": (
        lambda t: {"cos_sin_cache": t.table(20, 64).bfloat16()},
        DtypeError,
        "cos_sin_cache must be torch.float32, got torch.bfloat16",
    ),
    "table_wide": (
        lambda t: {"cos_sin_cache": t.table(20, 128)},
        ShapeError,
        "rotary_dim must be even and in 2..64 (head_dim), got 128",
    ),
    "rotary_dim": (
        lambda t: {"rotary_dim": 32},
        ShapeError,
        "cos_sin_cache must be of shape [max_pos, rotary_dim = 32], got (20, 64)",
    ),
    "rotary_dim_without_table": (
        lambda t: {"cos_sin_cache": None, "rotary_dim": 64},
        ShapeError,
        "rotary_dim must be None where cos_sin_cache is, got 64",
    ),
    "positions_none": (
        lambda t: {"positions": None},
        TypeError,
        "positions must be a torch.Tensor, got None",
    ),
    "positions_dtype": (
        lambda t: {"positions": torch.zeros(7, device=t.device)},
        DtypeError,
        "positions must be torch.int32 or torch.int64, got torch.float32",
    ),
    "positions_count": (
        lambda t: {"positions": torch.arange(6, device=t.device)},
        ShapeError,
        "positions must be of shape (7,) = [tokens], got (6,)",
    ),
    "k_cache_rank": (
        lambda t: {"k_cache": t.randn(20, 128)},
        ShapeError,
        "k_cache must be 3-D [slots, kv_heads, dim] or 4-D [pages, page_size, kv_heads, dim], got "
        "2-D of shape (20, 128)",
    ),
    "k_cache_dtype": (
        lambda t: {"k_cache": t.randn(5, 4, 2, 64, dtype=torch.float16)},
        DtypeError,
        "k_cache must be torch.bfloat16 like k or torch.float8_e4m3fn, got torch.float16",
    ),
    "k_cache_heads": (
        lambda t: {"k_cache": t.randn(5, 4, 1, 64)},
        ShapeError,
        "k_cache must be of the heads and head_dim of k, shape (7, 2, 64), got (5, 4, 1, 64)",
    ),
    "k_cache_expanded": (
        lambda t: {"k_cache": t.randn(1, 4, 2, 64).expand(5, 4, 2, 64)},
        ShapeError,
        "k_cache must be a tensor whose elements do not share memory, got shape (5, 4, 2, 64) with "
        "strides (0, 128, 64, 1)",
    ),
    "v_cache_dtype": (
        lambda t: {"v_cache": t.randn(5, 4, 2, 64).to(torch.float8_e4m3fn)},
        DtypeError,
        "v_cache must be torch.bfloat16 like k_cache, got torch.float8_e4m3fn",
    ),
    "v_cache_pages": (
        lambda t: {"v_cache": t.randn(10, 2, 2, 64)},
        ShapeError,
        "v_cache must be of the pages of k_cache, shape (5, 4, 2, 64), got (10, 2, 2, 64)",
    ),
    "v_cache_cpu": (
        lambda t: {"v_cache": t.randn(5, 4, 2, 64).cpu()},
        RuntimeError,
        "v_cache must be a CUDA tensor, got a tensor on cpu",
    ),
    "page_size": (
        lambda t: {
            "k_cache": t.randn(5, 2, 3, 2, 64)[:, 0],
            "v_cache": t.randn(5, 2, 3, 2, 64)[:, 1],
        },
        ShapeError,
        "k_cache must be of a page_size that is a power of two, or of pages that follow each "
        "other, got shape (5, 3, 2, 64) with strides (768, 128, 64, 1)",
    ),
    "caches_in_one_memory": (
        lambda t: dict.fromkeys(("k_cache", "v_cache"), t.randn(5, 4, 2, 64)),
        ShapeError,
        "k_cache must be in memory apart from v_cache, got memory that both share",
    ),
    "slots_none": (lambda t: {"slots": None}, TypeError, "slots must be a torch.Tensor, got None"),
    "slots_dtype": (
        lambda t: {"slots": torch.zeros(7, device=t.device, dtype=torch.int16)},
        DtypeError,
        "slots must be torch.int32 or torch.int64, got torch.int16",
    ),
    "slots_count": (
        lambda t: {"slots": torch.arange(8, device=t.device)},
        ShapeError,
        "slots must be of shape (7,) = [tokens], got (8,)",
    ),
    "slots_stride": (
        lambda t: {"slots": torch.arange(14, device=t.device)[::2]},
        ShapeError,
        "slots must be contiguous, got strides (2,) for shape (7,)",
    ),
    "interleaved": (
        lambda t: {"interleaved": "no"},
        TypeError,
        "interleaved must be a bool, got str",
    ),
    "q_out_shape": (
        lambda t: {"q_out": t.randn(7, 8, 64)},
        ShapeError,
        "q_out must be of shape (7, 4, 64) = [tokens, q_heads, head_dim], got (7, 8, 64)",
    ),
    "q_out_dtype": (
        lambda t: {"q_out": t.randn(7, 4, 64, dtype=torch.float16)},
        DtypeError,
        "q_out must be torch.bfloat16 like q, got torch.float16",
    ),
    **{name: case for name, case in FEATURES.items() if "_scale_" in name},
}
