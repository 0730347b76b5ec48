"""Window, softcap, sinks, steps, head dims and workspace of dense attention, against float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from astrai.extension.errors import ShapeError
from astrai.extension.ops import (
    attn_decode,
    attn_decode_workspace_size,
    attn_prefill,
    attn_prefill_workspace_size,
    merge_states,
    reference,
)
from astrai.extension.ops.reference import Features
from tests.python.ops.attention_inputs import check, qkv, randn

E4M3 = torch.float8_e4m3fn


def run(function, q, k, v, mask=None, out=None, **features):
    """Into poisoned memory, and compares out and lse."""
    if out is None:
        out = torch.full((*q.shape[:-1], v.shape[-1]), torch.nan, dtype=q.dtype, device="cuda")
    got, lse = function(q, k, v, mask, return_lse=True, out=out, **features)
    assert got is out
    features.pop("deterministic", None), features.pop("workspace", None)
    if function is attn_decode:
        features.pop("is_causal", None)
    keep = reference.expand_mask(mask)
    check(out, lse, reference.attention(q.double(), k, v, keep, Features(**features)), q.dtype)
    return out, lse


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_case_c09_every_head_dim(head_dim):
    for dtype in (torch.bfloat16, torch.float16):
        run(attn_decode, *qkv(2, 1, 300, 6, 2, head_dim, dtype=dtype))
        run(attn_prefill, *qkv(1, 70, 133, 6, 2, head_dim, dtype=dtype), is_causal=True)


@pytest.mark.parametrize("head_dim", [0, 4, 36, 260, 264])
@pytest.mark.parametrize("function", [attn_decode, attn_prefill])
def test_case_c09_unsupported_head_dims_are_named(function, head_dim):
    q = randn(1, 1, 2, head_dim)
    with pytest.raises(
        ShapeError, match=rf"unsupported head_dim {head_dim} \(supported: multiples"
    ):
        function(q, q, q)


@pytest.mark.parametrize("is_causal", [False, True])
def test_values_of_128_for_keys_of_192(is_causal):
    for kv_len, q_len in ((1, 1), (77, 20), (1000, 200)):
        q, k = randn(2, q_len, 8, 192), randn(2, kv_len, 2, 192, seed=2)
        v = randn(2, kv_len, 2, 128, seed=3)
        run(attn_prefill, q, k, v, is_causal=is_causal)
        run(attn_decode, q[:, :1], k, v)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 17, 33, 64])
def test_case_c11_groups_and_sinks(group):
    sinks = torch.randn(2 * group, device="cuda")
    run(attn_decode, *qkv(2, 1, 200, 2 * group, 2, 128), sinks=sinks)
    run(attn_prefill, *qkv(2, 19, 90, 2 * group, 2, 128), sinks=sinks, is_causal=True)


@pytest.mark.parametrize(
    "window", [(-1, -1), (0, 0), (0, -1), (-1, 0), (5, -1), (-1, 3), (64, 0), (100, 17), (3, 200)]
)
@pytest.mark.parametrize("lens", [(1, 300), (5, 5), (65, 64), (130, 300), (40, 7)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_windows(window, lens, is_causal):
    q, k, v = qkv(2, *lens, 6, 2, 64)
    run(attn_prefill, q, k, v, window=window, is_causal=is_causal)
    run(attn_decode, q[:, -1:], k, v, window=window)


@pytest.mark.parametrize("softcap", [0.5, 5.0, 30.0, 1000.0])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_softcap(softcap, head_dim):
    q, k, v = qkv(2, 33, 150, 8, 2, head_dim)
    run(attn_prefill, q * 4, k, v, softcap=softcap, is_causal=True)
    run(attn_decode, q[:, :1] * 4, k, v, softcap=softcap)


def test_sinks_of_rows_without_a_key():
    q, k, v = qkv(1, 5, 3, 4, 2, 64)
    sinks = torch.tensor([0.0, -3.0, 8.0, float("-inf")], device="cuda")
    out, lse = run(attn_prefill, q, k, v, sinks=sinks, is_causal=True)
    assert not out[:, :2].any()
    assert torch.equal(lse[0, 0], sinks)
    empty = k[:, :0]
    out, lse = run(attn_decode, q[:, :1], empty, empty, sinks=sinks)
    assert not out.any() and torch.equal(lse[0, 0], sinks)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_e4m3_keys_and_values_with_steps(on_device, dtype):
    for head_dim in (64, 80, 128, 256):
        q, k, v = qkv(2, 30, 333, 8, 2, head_dim, dtype=dtype)
        k, v = (k / 0.03).to(E4M3), (v / 0.011).to(E4M3)
        steps = {"k_scale": 0.03, "v_scale": 0.011}
        if on_device:
            steps = {name: torch.tensor([x], device="cuda") for name, x in steps.items()}
        run(attn_prefill, q, k, v, is_causal=True, **steps)
        run(attn_decode, q[:, :1], k, v, **steps)


def test_every_code_of_e4m3_is_read_right():
    codes = torch.arange(256, dtype=torch.uint8, device="cuda")
    codes = codes[codes & 0x7F != 0x7F]  # without NaN
    v = torch.zeros(1, len(codes), 1, 64, dtype=torch.uint8, device="cuda")
    v += codes[None, :, None, None]
    k = torch.zeros_like(v)
    for function in (attn_decode, attn_prefill):
        for i in range(0, len(codes), 17):
            mask = (torch.arange(len(codes), device="cuda") == i)[None]
            q = randn(1, 1, 1, 64)
            out = function(q, k.view(E4M3), v.view(E4M3), mask)
            assert (out == v.view(E4M3)[:, i].to(q.dtype)).all()


def test_step_of_16_bit_keys():
    q, k, v = qkv(2, 3, 40, 4, 2, 64)
    run(attn_prefill, q, k, v, k_scale=0.5, v_scale=torch.tensor(3.0, device="cuda"))


def test_case_c01_very_negative_logits():
    """Two keys with logits near -66854 are keys like any other."""
    q = randn(1, 1, 8, 128).abs() + 0.5
    k = -q[:, :, :1].repeat(1, 2, 1, 1) * torch.tensor([1.0, 1.002], device="cuda").view(1, 2, 1, 1)
    k = k.to(q.dtype)
    v = randn(1, 2, 1, 128, seed=4)
    scale = 66854.0 / float(q[0, 0, 0].float() @ q[0, 0, 0].float())
    for function in (attn_decode, attn_prefill):
        out = function(q[:, :, :1], k, v, scale=scale)
        want, _ = reference.attention(q[:, :, :1].double(), k, v, None, Features(scale=scale))
        torch.testing.assert_close(out.double(), want, atol=0.05, rtol=0.05)
        mask = torch.zeros(1, 2, dtype=torch.bool, device="cuda")
        out, lse = function(q[:, :, :1], k, v, mask, return_lse=True)
        assert not out.any() and (lse == float("-inf")).all()


def test_case_c06_scores_of_masked_keys_are_nan():
    for function in (attn_decode, attn_prefill):
        q, k, v = qkv(2, 1, 200, 4, 2, 128)
        mask = torch.arange(200, device="cuda").expand(2, 200) < 130
        k[:, 130:], v[:, 130:] = torch.nan, torch.finfo(v.dtype).max
        run(function, q, k, v, mask, is_causal=True)


def test_merging_two_halves_is_attention_over_both():
    q, k, v = qkv(3, 1, 500, 8, 2, 128)
    halves = [
        attn_decode(q, k[:, s], v[:, s], return_lse=True) for s in (slice(200), slice(200, 500))
    ]
    out, lse = merge_states(*halves[0], *halves[1])
    check(out, lse, reference.attention(q.double(), k, v, None, Features()), q.dtype)


@pytest.mark.parametrize("batch", [1, 3, 64])
def test_case_e13_deterministic_rows_do_not_depend_on_the_batch(batch):
    for kv_len, heads in ((4097, (32, 8)), (100, (8, 1)), (20000, (16, 2))):
        q, k, v = qkv(batch, 1, kv_len, *heads, 128)
        whole = attn_decode(q, k, v, deterministic=True, return_lse=True)
        row = [x[-1:].contiguous() for x in (q, k, v)]
        alone = attn_decode(*row, deterministic=True, return_lse=True)
        assert torch.equal(whole[0][-1:], alone[0]) and torch.equal(whole[1][-1:], alone[1])
        if batch * kv_len < 70000:
            run(attn_decode, q, k, v, deterministic=True)


def guarded(size):
    """A workspace between two canaries, full of NaN."""
    memory = torch.full((size + 512,), 0xFF, dtype=torch.uint8, device="cuda")
    memory[:256], memory[-256:] = 0xA5, 0xA5
    return memory, memory[256 : 256 + size]


@pytest.mark.parametrize("deterministic", [False, True])
def test_case_e06_decode_workspace(deterministic):
    sizes = ((1, 8, 1, 128), (4, 32, 8, 128), (64, 8, 8, 64), (2, 64, 1, 256), (1, 4, 4, 72))
    for batch, q_heads, kv_heads, head_dim in sizes:
        size = attn_decode_workspace_size(
            batch, q_heads, kv_heads, head_dim, deterministic=deterministic
        )
        for kv_len in (1, 500, 9000):
            q, k, v = qkv(batch, 1, kv_len, q_heads, kv_heads, head_dim)
            memory, workspace = guarded(size)
            for _ in range(2):  # nothing is cleared between the calls
                run(attn_decode, q, k, v, workspace=workspace, deterministic=deterministic)
            assert (memory[:256] == 0xA5).all() and (memory[-256:] == 0xA5).all()


def test_case_e06_a_small_workspace_is_named_with_both_figures():
    q, k, v = qkv(1, 1, 50000, 8, 1, 128)
    workspace = torch.empty(48, dtype=torch.uint8, device="cuda")
    with pytest.raises(ShapeError, match=r"workspace must be of at least \d+ bytes, got 48 bytes"):
        attn_decode(q, k, v, workspace=workspace)
    with pytest.raises(ShapeError, match="workspace must be aligned to 16 bytes"):
        attn_decode(q, k, v, workspace=torch.empty(10**8, dtype=torch.uint8, device="cuda")[1:])
    with pytest.raises(ShapeError, match="workspace must be contiguous"):
        attn_decode(q, k, v, workspace=torch.empty(10**8, dtype=torch.int16, device="cuda")[::2])
    with pytest.raises(TypeError, match=r"workspace must be a torch\.Tensor, got int"):
        attn_decode(q, k, v, workspace=1000)


def test_case_e06_prefill_workspace():
    for q_len, kv_len in ((1, 9000), (16, 5000), (100, 100)):
        q, k, v = qkv(1, q_len, kv_len, 8, 2, 128)
        memory, workspace = guarded(attn_prefill_workspace_size(1, q_len, 8, 2, 128))
        for _ in range(2):
            run(attn_prefill, q, k, v, workspace=workspace, is_causal=True)
        assert (memory[:256] == 0xA5).all() and (memory[-256:] == 0xA5).all()


def test_case_e06_workspace_is_bounded_by_the_gpu_not_the_batch():
    sizes = [attn_decode_workspace_size(batch, 32, 8, 128) for batch in (64, 1024, 65536)]
    assert len(set(sizes)) == 1 and sizes[0] < 2**26
    with pytest.raises(
        ShapeError, match=r"attn_decode_workspace_size: head_dim must be a multiple"
    ):
        attn_decode_workspace_size(1, 8, 8, 12)


@settings(max_examples=80, deadline=None)
@given(
    data=st.data(),
    batch=st.integers(1, 3),
    q_len=st.integers(1, 80),
    kv_len=st.integers(1, 200),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 9),
    head_dim=st.integers(1, 32).map(lambda x: 8 * x),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    e4m3=st.booleans(),
    window=st.tuples(st.integers(-1, 150), st.integers(-1, 150)),
    softcap=st.sampled_from([0.0, 3.0, 50.0]),
    is_causal=st.booleans(),
)
def test_any_combination(
    data, batch, q_len, kv_len, kv_heads, group, head_dim, dtype, e4m3, window, softcap, is_causal
):
    q_heads = kv_heads * group
    q, k, v = qkv(batch, q_len, kv_len, q_heads, kv_heads, head_dim, dtype=dtype)
    features = {"window": window, "softcap": softcap}
    if e4m3:
        k, v = (k * 8).to(E4M3), (v * 8).to(E4M3)
        features |= {"k_scale": 0.125, "v_scale": 0.125}
    if data.draw(st.booleans()):
        features["sinks"] = torch.randn(q_heads, device="cuda")
    mask = None
    if data.draw(st.booleans()):
        mask = torch.rand(batch, q_heads, q_len, kv_len, device="cuda") < 0.7
    run(attn_prefill, q, k, v, mask, is_causal=is_causal, **features)
    if mask is not None:
        mask = mask[:, :, :1]
    run(attn_decode, q[:, :1], k, v, mask, deterministic=data.draw(st.booleans()), **features)
