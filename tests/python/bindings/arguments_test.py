"""Arguments of attention and rotary as their kernels get them, and what is refused, without a GPU.

The same cases run on CUDA tensors, through the public functions, in *_errors_gpu_test.py of
tests/python/ops.
"""

import math
import re

import binding_probe as probe
import pytest
import torch

from astrai.extension.errors import ShapeError
from tests.python.ops.bad_arguments import (
    ATTENTION,
    ROTARY,
    Make,
    good_attention,
    good_rotary,
    needs_two_devices,
)

pytestmark = pytest.mark.usefixtures("path")

CPU = Make("cpu")
NAMES = ("attn_decode", "attn_prefill")


def on_one_device(cases):
    return [name for name in cases if not needs_two_devices(name)]


def attention(name, q, k, v, mask=None, is_causal=False, scale=None, out=None, lse=None, **more):
    defaults = {"window": (-1, -1), "softcap": 0.0, "sinks": None, "k_scale": None, "v_scale": None}
    features = (defaults | more).values()
    return probe.dense_params(name, q, k, v, mask, is_causal, scale, *features, out, lse)


def embed(q, k, cos_sin_cache, positions, interleaved=False, rotary_dim=None, inplace=True):
    outs = (q, k)
    if not inplace:
        outs = [x.contiguous().clone() if isinstance(x, torch.Tensor) else x for x in outs]
    return probe.rotary_embed_params(q, k, cos_sin_cache, positions, interleaved, rotary_dim, *outs)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", [name for name in on_one_device(ATTENTION) if name != "group"])
def test_attention_refuses(name, case):
    change, error, text = ATTENTION[case]
    good = good_attention(CPU)
    args = {"out": torch.full_like(good["q"], 7.0), **good, **change(CPU)}
    before = args["out"].clone()
    with pytest.raises(error, match="^" + re.escape(f"{name}: {text}")):
        attention(name, **args)
    assert torch.equal(args["out"], before)


@pytest.mark.parametrize("case", on_one_device(ROTARY))
@pytest.mark.parametrize("inplace", [False, True])
def test_rotary_refuses(case, inplace):
    change, error, text = ROTARY[case]
    with pytest.raises(error, match="^" + re.escape(f"rotary_embed: {text}")):
        embed(**{**good_rotary(CPU), **change(CPU)}, inplace=inplace)


def test_group_above_64_is_left_to_the_kernels_own_check():
    q, k = CPU.randn(1, 1, 130, 64), CPU.randn(1, 4, 2, 64)
    params = attention("attn_decode", q, k, k, out=torch.empty_like(q))
    assert params["why_not"] == "q_heads / kv_heads must be at most 64"


def test_attention_params():
    storage = CPU.randn(2, 3, 5, 4, 128)  # 5: q, two k, two v heads
    q = storage[:, :, 0]
    k, v = storage[:, :, 1, ::2], storage[:, :, 3, 1::2]
    out, lse = torch.empty(3, 2, 4, 128).bfloat16().transpose(0, 1), torch.empty(2, 3, 4)
    params = attention("attn_prefill", q, k, v, None, True, 0.25, out, lse)
    assert params["dtype"] == "bfloat16"
    assert params["sizes"] == (2, 3, 3, 4, 2, 128, 128)
    batch, token = 3 * 5 * 4 * 128, 5 * 4 * 128
    assert params["q"] == (q.data_ptr(), batch, token, 128)
    assert params["k"] == (k.data_ptr(), batch, token, 256)
    assert params["v"] == (v.data_ptr(), batch, token, 256)
    assert params["out"] == (out.data_ptr(), 4 * 128, 2 * 4 * 128, 128)
    assert params["lse"] == lse.data_ptr()
    assert (params["scale"], params["causal"], params["why_not"]) == (0.25, True, "")
    assert params["mask"] == (0, 0, 0, 0, 0, 0)
    assert params["window"] == (-1, -1)
    assert params["steps"] == (1.0, 1.0, 0, 0)
    assert (params["softcap"], params["sinks"], params["kv_dtype"]) == (0.0, 0, "bfloat16")


def test_feature_params():
    q, k = CPU.randn(2, 3, 4, 64), CPU.randn(2, 9, 2, 64).to(torch.float8_e4m3fn)
    sinks, step = torch.zeros(4), torch.ones(1, 1)
    out = torch.empty_like(q)
    more = {"window": [4, 0], "softcap": 20, "sinks": sinks, "k_scale": step, "v_scale": 0.5}
    params = attention("attn_prefill", q, k, k, out=out, **more)
    assert (params["window"], params["softcap"], params["sinks"]) == ((4, 0), 20, sinks.data_ptr())
    assert params["steps"] == (1.0, 0.5, step.data_ptr(), 0)
    assert (params["kv_dtype"], params["why_not"]) == ("float8_e4m3fn", "")


@pytest.mark.parametrize(
    ("given", "read"),
    [((8, 2), (8, 2)), ((9, 3), (-1, -1)), ((2**40, 2**40), (-1, -1)), ((0, 0), (0, 0))],
)
def test_windows_beyond_every_key_are_unlimited(given, read):
    q, k = CPU.randn(2, 3, 4, 64), CPU.randn(2, 9, 2, 64)
    params = attention("attn_prefill", q, k, k, out=torch.empty_like(q), window=given)
    assert params["window"] == read


def test_values_of_128_for_keys_of_192():
    q, k, v = CPU.randn(2, 3, 4, 192), CPU.randn(2, 9, 2, 192), CPU.randn(2, 9, 2, 128)
    params = attention("attn_prefill", q, k, v, out=CPU.randn(2, 3, 4, 128))
    assert params["sizes"] == (2, 3, 9, 4, 2, 192, 128)
    assert params["why_not"] == ""
    with pytest.raises(
        ShapeError, match=r"v must be of head_dim 192 or 128, got shape \(2, 9, 2, 64"
    ):
        attention("attn_prefill", q, k, v[..., :64], out=CPU.randn(2, 3, 4, 64))


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_default_scale_and_no_lse(head_dim):
    q = CPU.randn(1, 1, 2, head_dim, dtype=torch.float16)
    params = attention("attn_decode", q, q.clone(), q.clone(), out=torch.empty_like(q))
    assert params["scale"] == pytest.approx(1 / math.sqrt(head_dim), rel=1e-7)
    assert (params["lse"], params["dtype"]) == (0, "float16")


@pytest.mark.parametrize("head_dim", [0, 1, 36, 100, 257, 264, 512])
def test_case_c09_unsupported_head_dim(head_dim):
    q = CPU.randn(2, 1, 8, head_dim)
    text = f"attn_prefill: unsupported head_dim {head_dim} (supported: multiples of 8 up to 256)"
    with pytest.raises(ShapeError, match="^" + re.escape(text)):
        attention("attn_prefill", q, q, q, out=torch.empty_like(q))


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        # batch, head, q
        ((2, 9), (9, 0, 0)),
        ((1, 9), (0, 0, 0)),
        ((2, 5, 9), (45, 0, 9)),
        ((2, 1, 9), (9, 0, 0)),
        ((2, 4, 5, 9), (180, 45, 9)),
        ((2, 1, 5, 9), (45, 0, 9)),
        ((2, 4, 1, 9), (36, 9, 0)),
        ((1, 1, 5, 9), (0, 0, 9)),
        ((1, 1, 1, 9), (0, 0, 0)),
    ],
    ids=str,
)
def test_mask_strides(shape, strides):
    q, k = CPU.randn(2, 5, 4, 64), CPU.randn(2, 9, 2, 64)
    mask = CPU.ones(*shape)
    params = attention("attn_prefill", q, k, k, mask, out=torch.empty_like(q))
    assert params["mask"] == (mask.data_ptr(), *strides, 5, 9)
    expanded = CPU.ones(1, 9).expand(2, 9)
    params = attention("attn_prefill", q, k, k, expanded, out=torch.empty_like(q))
    assert params["mask"] == (expanded.data_ptr(), 0, 0, 0, 5, 9)


def test_case_d03_size_1_dimensions():
    k = CPU.randn(2, 9, 64).as_strided((2, 9, 1, 64), (9 * 64, 64, 7, 1))
    q = CPU.randn(2, 4, 64).as_strided((2, 1, 4, 64), (4 * 64, 3, 64, 1))
    params = attention("attn_decode", q, k, k, out=torch.empty(2, 1, 4, 64).bfloat16())
    assert params["k"][1:] == (9 * 64, 64, 64)
    assert params["q"][1:] == (4 * 64, 4 * 64, 64)


@pytest.mark.parametrize("sizes", [(0, 3, 5), (2, 0, 5), (2, 3, 0)], ids=str)
def test_case_c02_empty_attention(sizes):
    batch, q_len, kv_len = sizes
    q, k = CPU.randn(batch, q_len, 4, 64), CPU.randn(batch, kv_len, 2, 64)
    params = attention("attn_prefill", q, k, k, out=torch.empty_like(q))
    assert params["sizes"] == (*sizes, 4, 2, 64, 64)
    assert params["why_not"] == ""


@pytest.mark.parametrize("which", ["q", "k", "v", "out"])
def test_attention_autograd(which):
    good = good_attention(CPU)
    args = {**good, "out": torch.empty_like(good["q"])}
    args[which].requires_grad_()
    with pytest.raises(RuntimeError, match=f"attn_decode: {which} requires grad.*autograd"):
        attention("attn_decode", **args)
    with torch.no_grad():
        assert attention("attn_decode", **args)["why_not"] == ""


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_attention_output_that_shares_memory(which):
    storage = CPU.randn(2 * 8 * 64 + 8)
    shared = storage[8:].view(2, 1, 8, 64)
    args = {name: CPU.randn(2, 1, 8, 64) for name in "qkv"} | {which: shared}
    with pytest.raises(ShapeError, match=f"out must be in memory apart from {which}, got"):
        attention("attn_decode", **args, out=storage[:-8].view(2, 1, 8, 64))


def test_lse_is_checked():
    good = good_attention(CPU)
    out = torch.empty_like(good["q"])
    for lse, text in (
        (torch.empty(2, 1, 8).bfloat16(), "lse must be torch.float32, got torch.bfloat16"),
        (torch.empty(2, 8), "lse must be of shape (2, 1, 8) = [batch, q_len, q_heads], got (2, 8)"),
        (torch.empty(2, 1, 16)[..., ::2], "lse must be contiguous, got strides (16, 16, 2)"),
    ):
        with pytest.raises(RuntimeError, match=re.escape(text)):
            attention("attn_decode", **good, out=out, lse=lse)


def test_rotary_embed_params():
    fused = CPU.randn(7, 8 * 64)
    q, k = fused[:, : 4 * 64].view(7, 4, 64), fused[:, 4 * 64 : 6 * 64].view(7, 2, 64)
    cache, positions = CPU.table(20, 32), torch.arange(7, dtype=torch.int32)
    params = embed(q, k, cache, positions, True, 32)
    assert params["dtype"] == "bfloat16"
    assert params["sizes"] == (1, 7, 64, 32)
    assert params["interleaved"] and params["has_work"]
    inplace_q = (q.data_ptr(), 0, 512, 64)
    inplace_k = (k.data_ptr(), 0, 512, 64)
    assert params["q"] == (*inplace_q, *inplace_q, 4)
    assert params["k"] == (*inplace_k, *inplace_k, 2)
    assert (params["angles"], params["max_pos"]) == (cache.data_ptr(), 20)
    assert (params["positions"], params["positions_are_int64"]) == (positions.data_ptr(), False)
    params = embed(q, None, cache, positions.long(), inplace=False)
    assert params["k"][-1] == 0 and params["positions_are_int64"] and not params["interleaved"]
    assert params["q"][0] != params["q"][4] and params["q"][5:] == (0, 256, 64, 4)


def test_rotary_embed_batched():
    q = CPU.randn(2, 7, 4, 64)
    cache = CPU.table(20, 64)
    for positions in (torch.zeros(2, 7, dtype=torch.int64), torch.zeros(14, dtype=torch.int64)):
        params = embed(q, None, cache, positions)
        assert params["sizes"] == (2, 7, 64, 64)
        assert params["q"][1:4] == (7 * 256, 256, 64)
    for shape in ((7,), (7, 2), (1, 14), (2, 7, 1)):
        text = (
            "positions must be of shape (14,) or (2, 7), one position for each token of q, got "
            f"{shape}"
        )
        with pytest.raises(ShapeError, match=re.escape(text)):
            embed(q, None, cache, torch.zeros(shape, dtype=torch.int64))


def test_rotary_emb_params():
    x, freqs = CPU.randn(2, 7, 4, 64), torch.zeros(2, 7, 32, 2)
    out = torch.empty_like(x)
    params = probe.rotary_emb_params(x, freqs, out)
    assert params["sizes"] == (2, 7, 64, 64)
    assert params["interleaved"] and params["k"][-1] == 0
    assert params["q"][0] == x.data_ptr() and params["q"][4] == out.data_ptr()
    assert params["angles"] == freqs.data_ptr()


@pytest.mark.parametrize(
    ("x", "freqs", "text"),
    [
        ((7, 4, 63), (7, 31, 2), "x must be of an even head_dim, got shape (7, 4, 63)"),
        ((7, 4, 0), (7, 0, 2), "x must be of an even head_dim, got shape (7, 4, 0)"),
        (
            (7, 64),
            (7, 32, 2),
            "x must be of shape [tokens, heads, head_dim] or [batch, tokens, heads, head_dim], got "
            "2-D of shape (7, 64)",
        ),
        (
            (7, 4, 64),
            (7, 64),
            "freqs_cis must be of shape (7, 32, 2) = [tokens, head_dim / 2, 2], got (7, 64)",
        ),
        (
            (2, 7, 4, 64),
            (7, 32, 2),
            "freqs_cis must be of shape (2, 7, 32, 2) = [batch, tokens, head_dim / 2, 2], got "
            "(7, 32, 2)",
        ),
    ],
)
def test_rotary_emb_refuses(x, freqs, text):
    x = CPU.randn(*x)
    with pytest.raises(ShapeError, match="^" + re.escape("rotary_emb: " + text)):
        probe.rotary_emb_params(x, torch.zeros(freqs), x)


def test_rotary_without_work():
    cache = CPU.table(20, 64)
    none = torch.zeros(0, dtype=torch.int64)
    assert not embed(CPU.randn(0, 4, 64), None, cache, none)["has_work"]
    assert not embed(CPU.randn(3, 0, 64), None, cache, torch.arange(3))["has_work"]


def test_rotary_in_place_on_shared_memory():
    q = CPU.randn(7, 1, 64).expand(7, 4, 64)
    cache, positions = CPU.table(20, 64), torch.arange(7)
    with pytest.raises(ShapeError, match="q must be a tensor whose elements do not share memory"):
        embed(q, None, cache, positions)
    q = CPU.randn(7, 4, 64)
    with pytest.raises(ShapeError, match="must be in memory apart from"):
        embed(q, q.view(7, 4, 64), cache, positions)
