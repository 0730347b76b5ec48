"""Arguments that the operators refuse, with the words they do it in.

Each case is (change, class of the error, start of the text after "<function>: "); change(t) gives
the arguments that differ from good ones, made by t on its device.
"""

import torch

from astrai.extension.errors import DtypeError, ShapeError
from tests.python.ops import references


class Make:
    """Makes tensors on one device."""

    def __init__(self, device):
        self.device = device

    def randn(self, *shape, dtype=torch.bfloat16, seed=0):
        generator = torch.Generator(device=self.device).manual_seed(seed)
        return torch.randn(*shape, generator=generator, device=self.device).to(dtype)

    def ints(self, *values):
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def ones(self, *shape):
        return torch.ones(shape, dtype=torch.bool, device=self.device)

    def table(self, *args):
        return references.table(*args, device=self.device)


# What every attention function refuses of the arguments that all of them share; 8 query heads.
FEATURES = {
    "window_type": (
        lambda t: {"window": 3},
        TypeError,
        "window must be a pair (left, right) of ints, each -1 (unlimited) or more, got 3",
    ),
    "window_one": (
        lambda t: {"window": (3,)},
        ShapeError,
        "window must be a pair (left, right) of ints, each -1 (unlimited) or more, got (3,)",
    ),
    "window_float": (
        lambda t: {"window": (1.0, 2)},
        TypeError,
        "window must be an int, got float",
    ),
    "window_negative": (
        lambda t: {"window": (0, -2)},
        ShapeError,
        "window must be a pair (left, right) of ints, each -1 (unlimited) or more, got (0, -2)",
    ),
    "softcap_type": (lambda t: {"softcap": None}, TypeError, "softcap must be a float, got None"),
    "softcap_negative": (
        lambda t: {"softcap": -1.0},
        ShapeError,
        "softcap must be finite and 0 or more, got -1",
    ),
    "softcap_infinite": (
        lambda t: {"softcap": float("inf")},
        ShapeError,
        "softcap must be finite and 0 or more, got inf",
    ),
    "sinks_list": (lambda t: {"sinks": [0.0]}, TypeError, "sinks must be a torch.Tensor, got list"),
    "sinks_dtype": (
        lambda t: {"sinks": t.randn(8)},
        DtypeError,
        "sinks must be torch.float32, got torch.bfloat16",
    ),
    "sinks_shape": (
        lambda t: {"sinks": t.randn(2, dtype=torch.float32)},
        ShapeError,
        "sinks must be of shape (8,) = [q_heads], got (2,)",
    ),
    "sinks_stride": (
        lambda t: {"sinks": t.randn(16, dtype=torch.float32)[::2]},
        ShapeError,
        "sinks must be contiguous, got strides (2,) for shape (8,)",
    ),
    "sinks_cpu": (
        lambda t: {"sinks": t.randn(8, dtype=torch.float32).cpu()},
        RuntimeError,
        "sinks must be a CUDA tensor, got a tensor on cpu",
    ),
    **{
        f"{name}_{what}": (lambda t, name=name, value=value: {name: value(t)}, error, name + text)
        for name in ("k_scale", "v_scale")
        for what, value, error, text in (
            ("type", lambda t: "1", TypeError, " must be a float or a torch.Tensor, got str"),
            ("zero", lambda t: 0.0, ShapeError, " must be finite and more than 0 in fp32, got 0"),
            (
                "negative",
                lambda t: -1,
                ShapeError,
                " must be finite and more than 0 in fp32, got -",
            ),
            (
                "nan",
                lambda t: float("nan"),
                ShapeError,
                " must be finite and more than 0 in fp32, got nan",
            ),
            (
                "tiny",
                lambda t: 1e-60,
                ShapeError,
                " must be finite and more than 0 in fp32, got 0",
            ),
            (
                "dtype",
                lambda t: t.randn(1),
                DtypeError,
                " must be torch.float32, got torch.bfloat16",
            ),
            (
                "count",
                lambda t: t.randn(2, dtype=torch.float32),
                ShapeError,
                " must be of one element, got shape (2,)",
            ),
            (
                "cpu",
                lambda t: t.randn(1, dtype=torch.float32).cpu(),
                RuntimeError,
                " must be a CUDA tensor, got a tensor on cpu",
            ),
        )
    },
}


def good_attention(t):
    """Arguments that attn_decode and attn_prefill take."""
    return {
        "q": t.randn(2, 1, 8, 64),
        "k": t.randn(2, 40, 2, 64, seed=2),
        "v": t.randn(2, 40, 2, 64, seed=3),
    }


# q [2, 1, 8, 64], k and v [2, 40, 2, 64]
ATTENTION = {
    "q_none": (lambda t: {"q": None}, TypeError, "q must be a torch.Tensor, got None"),
    "k_list": (lambda t: {"k": [1]}, TypeError, "k must be a torch.Tensor, got list"),
    "q_fp32": (
        lambda t: {"q": t.randn(2, 1, 8, 64, dtype=torch.float32)},
        DtypeError,
        "q must be torch.bfloat16 or torch.float16, got torch.float32",
    ),
    "k_dtype": (
        lambda t: {"k": t.randn(2, 40, 2, 64, dtype=torch.float16)},
        DtypeError,
        "k must be torch.bfloat16 like q or torch.float8_e4m3fn, got torch.float16",
    ),
    "k_e5m2": (
        lambda t: {"k": t.randn(2, 40, 2, 64).to(torch.float8_e5m2)},
        DtypeError,
        "k must be torch.bfloat16 like q or torch.float8_e4m3fn, got torch.float8_e5m2",
    ),
    "v_fp8": (
        lambda t: {"v": t.randn(2, 40, 2, 64).to(torch.float8_e4m3fn)},
        DtypeError,
        "v must be torch.bfloat16 like k, got torch.float8_e4m3fn",
    ),
    "q_rank": (
        lambda t: {"q": t.randn(2, 8, 64)},
        ShapeError,
        "q must be 4-D [batch, q_len, q_heads, head_dim], got 3-D of shape (2, 8, 64)",
    ),
    "k_rank": (
        lambda t: {"k": t.randn(2, 40, 128)},
        ShapeError,
        "k must be 4-D [batch, kv_len, kv_heads, head_dim], got 3-D of shape (2, 40, 128)",
    ),
    "q_scalar": (
        lambda t: {"q": t.randn(1)[0]},
        ShapeError,
        "q must be 4-D [batch, q_len, q_heads, head_dim], got 0-D of shape ()",
    ),
    "k_cpu": (
        lambda t: {"k": t.randn(2, 40, 2, 64).cpu()},
        RuntimeError,
        "k must be a CUDA tensor, got a tensor on cpu",
    ),
    "k_batch": (
        lambda t: {"k": t.randn(3, 40, 2, 64)},
        ShapeError,
        "k must be of shape (2, 40, 2, 64) = [batch, kv_len, kv_heads, head_dim], "
        "got (3, 40, 2, 64)",
    ),
    "v_length": (
        lambda t: {"v": t.randn(2, 41, 2, 64)},
        ShapeError,
        "v must be of shape (2, 40, 2, 64) = [batch, kv_len, kv_heads, head_dim], "
        "got (2, 41, 2, 64)",
    ),
    "k_head_dim": (
        lambda t: {"k": t.randn(2, 40, 2, 128)},
        ShapeError,
        "k must be of shape (2, 40, 2, 64) = [batch, kv_len, kv_heads, head_dim], "
        "got (2, 40, 2, 128)",
    ),
    "v_head_dim": (
        lambda t: {"v": t.randn(2, 40, 2, 32)},
        ShapeError,
        "v must be of head_dim 64, got shape (2, 40, 2, 32)",
    ),
    "head_count": (
        lambda t: {"q": t.randn(2, 1, 7, 64)},
        ShapeError,
        "q must be of a number of heads that is a multiple of the 2 heads of k, got 7 heads",
    ),
    "no_kv_heads": (
        lambda t: {"k": t.randn(2, 40, 0, 64), "v": t.randn(2, 40, 0, 64)},
        ShapeError,
        "q must be of a number of heads that is a multiple of the 0 heads of k, got 8 heads",
    ),
    "group": (
        lambda t: {"q": t.randn(2, 1, 2 * 65, 64), "out": t.randn(2, 1, 2 * 65, 64)},
        ShapeError,
        "q_heads / kv_heads must be at most 64",
    ),
    "q_last_stride": (
        lambda t: {"q": t.randn(2, 1, 8, 128)[..., ::2]},
        ShapeError,
        "q must be of stride 1 in its last dimension, got strides (1024, 1024, 128, 2) for shape "
        "(2, 1, 8, 64)",
    ),
    "k_last_stride": (
        lambda t: {"k": t.randn(2, 40, 64, 2).transpose(2, 3)},
        ShapeError,
        "k must be of stride 1 in its last dimension, got strides (5120, 128, 1, 2) for shape "
        "(2, 40, 2, 64)",
    ),
    "neg": (
        lambda t: {"v": torch._neg_view(t.randn(2, 40, 2, 64))},
        TypeError,
        "v must be a tensor without the negative bit, got a negated view; call .resolve_neg()",
    ),
    "sparse": (
        lambda t: {"k": t.randn(2, 40, 2, 64).to_sparse()},
        TypeError,
        "k must be a dense tensor (layout torch.strided), got layout torch.sparse_coo",
    ),
    "mask_type": (lambda t: {"mask": [True]}, TypeError, "mask must be a torch.Tensor, got list"),
    "mask_dtype": (
        lambda t: {"mask": t.ones(2, 40).float()},
        DtypeError,
        "mask must be torch.bool, got torch.float32",
    ),
    "mask_cpu": (
        lambda t: {"mask": t.ones(2, 40).cpu()},
        RuntimeError,
        "mask must be a CUDA tensor, got a tensor on cpu",
    ),
    "mask_rank_1": (
        lambda t: {"mask": t.ones(40)},
        ShapeError,
        "mask must be 2-D [batch, kv_len], 3-D [batch, q_len, kv_len] or 4-D "
        "[batch, q_heads, q_len, kv_len], got 1-D of shape (40,)",
    ),
    "mask_rank_5": (
        lambda t: {"mask": t.ones(1, 2, 1, 1, 40)},
        ShapeError,
        "mask must be 2-D [batch, kv_len], 3-D [batch, q_len, kv_len] or 4-D "
        "[batch, q_heads, q_len, kv_len], got 5-D of shape (1, 2, 1, 1, 40)",
    ),
    "mask_batch": (
        lambda t: {"mask": t.ones(3, 40)},
        ShapeError,
        "mask must be of size 1 or 2 in its batch dimension, got shape (3, 40)",
    ),
    "mask_kv_len": (
        lambda t: {"mask": t.ones(2, 39)},
        ShapeError,
        "mask must be of kv_len 40 in its last dimension, got shape (2, 39)",
    ),
    "mask_kv_len_1": (
        lambda t: {"mask": t.ones(2, 1)},
        ShapeError,
        "mask must be of kv_len 40 in its last dimension, got shape (2, 1)",
    ),
    "mask_q_len": (
        lambda t: {"mask": t.ones(2, 3, 40)},
        ShapeError,
        "mask must be of size 1 or 1 in its q_len dimension, got shape (2, 3, 40)",
    ),
    "mask_heads": (
        lambda t: {"mask": t.ones(2, 2, 1, 40)},
        ShapeError,
        "mask must be of size 1 or 8 in its q_heads dimension, got shape (2, 2, 1, 40)",
    ),
    "mask_stride": (
        lambda t: {"mask": t.ones(2, 80)[:, ::2]},
        ShapeError,
        "mask must be of stride 1 in its last dimension, got strides (80, 2) for shape (2, 40)",
    ),
    "is_causal": (lambda t: {"is_causal": "yes"}, TypeError, "is_causal must be a bool, got str"),
    "scale_type": (lambda t: {"scale": "1"}, TypeError, "scale must be a float, got str"),
    "scale_nan": (
        lambda t: {"scale": float("nan")},
        ShapeError,
        "scale must be finite in fp32, got nan",
    ),
    "scale_large": (lambda t: {"scale": 1e300}, ShapeError, "scale must be finite in fp32, got 1"),
    **FEATURES,
    "out_dtype": (
        lambda t: {"out": t.randn(2, 1, 8, 64, dtype=torch.float16)},
        DtypeError,
        "out must be torch.bfloat16 like q, got torch.float16",
    ),
    "out_shape": (
        lambda t: {"out": t.randn(2, 8, 1, 64)},
        ShapeError,
        "out must be of shape (2, 1, 8, 64) = [batch, q_len, q_heads, v_head_dim], "
        "got (2, 8, 1, 64)",
    ),
    "out_expanded": (
        lambda t: {"out": t.randn(2, 1, 1, 64).expand(2, 1, 8, 64)},
        ShapeError,
        "out must be a tensor whose elements do not share memory, got shape (2, 1, 8, 64) with "
        "strides (64, 0, 0, 1)",
    ),
    "out_cpu": (
        lambda t: {"out": t.randn(2, 1, 8, 64).cpu()},
        RuntimeError,
        "out must be a CUDA tensor, got a tensor on cpu",
    ),
}


def good_rotary(t):
    """Arguments that rotary_embed takes."""
    return {
        "q": t.randn(7, 4, 64),
        "k": t.randn(7, 2, 64, seed=2),
        "cos_sin_cache": t.table(20, 64),
        "positions": torch.arange(7, device=t.device),
    }


ROTARY = {
    "q_list": (lambda t: {"q": [1]}, TypeError, "q must be a torch.Tensor, got list"),
    "q_fp32": (
        lambda t: {"q": t.randn(7, 4, 64, dtype=torch.float32)},
        DtypeError,
        "q must be torch.bfloat16 or torch.float16, got torch.float32",
    ),
    "k_dtype": (
        lambda t: {"k": t.randn(7, 2, 64, dtype=torch.float16)},
        DtypeError,
        "k must be torch.bfloat16 like q, got torch.float16",
    ),
    "q_rank": (
        lambda t: {"q": t.randn(7, 256)},
        ShapeError,
        "q must be of shape [tokens, heads, head_dim] or [batch, tokens, heads, head_dim], got 2-D "
        "of shape (7, 256)",
    ),
    "k_tokens": (
        lambda t: {"k": t.randn(8, 2, 64)},
        ShapeError,
        "k must be of q's batch, tokens and head_dim, q being (7, 4, 64), got (8, 2, 64)",
    ),
    "k_rank": (
        lambda t: {"k": t.randn(1, 7, 2, 64)},
        ShapeError,
        "k must be of q's batch, tokens and head_dim, q being (7, 4, 64), got (1, 7, 2, 64)",
    ),
    "k_cpu": (
        lambda t: {"k": t.randn(7, 2, 64).cpu()},
        RuntimeError,
        "k must be a CUDA tensor, got a tensor on cpu",
    ),
    "cache_dtype": (
        lambda t: {"cos_sin_cache": t.table(20, 64).bfloat16()},
        DtypeError,
        "cos_sin_cache must be torch.float32, got torch.bfloat16",
    ),
    "cache_none": (
        lambda t: {"cos_sin_cache": None},
        TypeError,
        "cos_sin_cache must be a torch.Tensor, got None",
    ),
    "cache_rank": (
        lambda t: {"cos_sin_cache": torch.zeros(20, 32, 2, device=t.device)},
        ShapeError,
        "cos_sin_cache must be 2-D [max_pos, rotary_dim], got 3-D of shape (20, 32, 2)",
    ),
    "cache_strides": (
        lambda t: {"cos_sin_cache": t.table(20, 128)[:, :64]},
        ShapeError,
        "cos_sin_cache must be contiguous, got strides (128, 1) for shape (20, 64)",
    ),
    "cache_wider_than_head": (
        lambda t: {"cos_sin_cache": t.table(20, 128)},
        ShapeError,
        "rotary_dim must be even and in 2..64 (head_dim), got 128",
    ),
    "rotary_dim_odd": (
        lambda t: {"rotary_dim": 33},
        ShapeError,
        "rotary_dim must be even and in 2..64 (head_dim), got 33",
    ),
    "rotary_dim_zero": (
        lambda t: {"rotary_dim": 0},
        ShapeError,
        "rotary_dim must be even and in 2..64 (head_dim), got 0",
    ),
    "rotary_dim_other": (
        lambda t: {"rotary_dim": 32},
        ShapeError,
        "cos_sin_cache must be of shape [max_pos, rotary_dim = 32], got (20, 64)",
    ),
    "rotary_dim_type": (
        lambda t: {"rotary_dim": 32.0},
        TypeError,
        "rotary_dim must be an int, got float",
    ),
    "positions_dtype": (
        lambda t: {"positions": torch.zeros(7, device=t.device)},
        DtypeError,
        "positions must be torch.int32 or torch.int64, got torch.float32",
    ),
    "positions_count": (
        lambda t: {"positions": torch.arange(6, device=t.device)},
        ShapeError,
        "positions must be of shape (7,), one position for each token of q, got (6,)",
    ),
    "positions_cpu": (
        lambda t: {"positions": torch.arange(7)},
        RuntimeError,
        "positions must be a CUDA tensor, got a tensor on cpu",
    ),
    "q_last_stride": (
        lambda t: {"q": t.randn(7, 4, 128)[..., ::2]},
        ShapeError,
        "q must be of stride 1 in its last dimension, got strides (512, 128, 2) for shape "
        "(7, 4, 64)",
    ),
    "interleaved": (
        lambda t: {"interleaved": "no"},
        TypeError,
        "interleaved must be a bool, got str",
    ),
}


def needs_two_devices(case):
    """Whether a case is about a tensor on the CPU among tensors on a GPU."""
    return case.endswith("_cpu")
