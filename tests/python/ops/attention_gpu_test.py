"""Dense decode and prefill against attention in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from astrai.extension.ops import attn_decode, attn_prefill
from tests.python.ops.attention_inputs import check, poisoned, qkv, randn, reference

DTYPES = [torch.bfloat16, torch.float16]
HEAD_DIMS = [64, 128, 256]
HEADS = [(1, 1), (8, 8), (9, 3), (8, 1), (32, 4), (64, 1), (10, 2)]


def run(function, q, k, v, mask=None, is_causal=False, scale=None):
    """Runs into poisoned memory and compares out and lse."""
    out = poisoned(q)
    got, lse = function(q, k, v, mask, is_causal, scale=scale, return_lse=True, out=out)
    assert got is out
    causal = is_causal and function is attn_prefill
    check(out, lse, reference(q, k, v, mask, causal, scale), q.dtype)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("kv_len", [1, 17, 128, 1000, 4097])
def test_decode(dtype, head_dim, heads, kv_len):
    run(attn_decode, *qkv(3, 1, kv_len, *heads, head_dim, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("lens", [(1, 1), (17, 17), (100, 200), (257, 257)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_prefill(dtype, head_dim, heads, lens, is_causal):
    run(attn_prefill, *qkv(2, *lens, *heads, head_dim, dtype=dtype), is_causal=is_causal)


@pytest.mark.parametrize("lens", [(3, 128), (128, 3), (1, 1), (5, 5), (65, 64)], ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_case_c08_causal_is_aligned_to_the_bottom_right(lens, head_dim):
    q_len, kv_len = lens
    q, k, v = qkv(2, q_len, kv_len, 4, 2, head_dim)
    rows = torch.arange(q_len, device="cuda")[:, None]
    mask = torch.arange(kv_len, device="cuda") <= rows + kv_len - q_len
    out = poisoned(q)
    attn_prefill(q, k, v, is_causal=True, out=out)
    explicit = attn_prefill(q, k, v, mask.expand(2, q_len, kv_len))
    torch.testing.assert_close(out, explicit, atol=2e-2, rtol=2e-2)
    run(attn_prefill, q, k, v, is_causal=True)
    if q_len > kv_len:
        out, lse = attn_prefill(q, k, v, is_causal=True, return_lse=True)
        assert (out[:, : q_len - kv_len] == 0).all()
        assert (lse[:, : q_len - kv_len] == float("-inf")).all()


def masks(batch, q_heads, q_len, kv_len):
    shapes = [
        (batch, kv_len),
        (1, kv_len),
        (batch, q_len, kv_len),
        (batch, 1, kv_len),
        (batch, q_heads, q_len, kv_len),
        (batch, 1, q_len, kv_len),
        (batch, q_heads, 1, kv_len),
        (1, 1, q_len, kv_len),
    ]
    generator = torch.Generator(device="cuda").manual_seed(5)
    for shape in shapes:
        mask = torch.rand(shape, generator=generator, device="cuda") < 0.6
        mask[0, ..., :] &= torch.arange(kv_len, device="cuda") % 2 == 0
        yield mask


@pytest.mark.parametrize("index", range(8))
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_masks_of_every_rank(index, is_causal, head_dim):
    mask = list(masks(2, 6, 33, 70))[index]
    run(attn_prefill, *qkv(2, 33, 70, 6, 2, head_dim), mask, is_causal)
    mask = list(masks(2, 6, 1, 300))[index]
    run(attn_decode, *qkv(2, 1, 300, 6, 2, head_dim), mask, is_causal)


def test_masks_with_strides_and_offsets():
    q, k, v = qkv(2, 33, 70, 6, 2, 64)
    wide = torch.rand(2, 6, 33, 150, device="cuda") < 0.5
    run(attn_prefill, q, k, v, wide[..., 3:73])
    run(attn_prefill, q, k, v, wide.transpose(1, 2)[..., 7:77].transpose(1, 2))
    run(attn_prefill, q, k, v, wide[:1, :1, :1, 11:81].expand(2, 6, 33, 70))


def test_rows_without_a_key():
    q, k, v = qkv(2, 9, 40, 4, 2, 64)
    mask = torch.ones(2, 9, 40, dtype=torch.bool, device="cuda")
    mask[0, 3] = False
    mask[1] = False
    out = run(attn_prefill, q, k, v, mask)
    assert (out[0, 3] == 0).all() and (out[1] == 0).all()
    decode_mask = torch.zeros(2, 40, dtype=torch.bool, device="cuda")
    run(attn_decode, q[:, :1], k, v, decode_mask)


@pytest.mark.parametrize("function", [attn_decode, attn_prefill])
def test_keys_that_may_not_be_seen_may_hold_anything(function):
    q, k, v = qkv(2, 1, 64, 4, 2, 64)
    mask = torch.ones(2, 64, dtype=torch.bool, device="cuda")
    mask[:, 40:] = False
    expected = reference(q, k[:, :40], v[:, :40])
    k[:, 40:] = float("inf")
    out, lse = function(q, k, v, mask, return_lse=True)
    check(out, lse, expected, q.dtype)


@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, -0.1])
def test_scale(scale):
    q, k, v = qkv(2, 5, 20, 4, 2, 64)
    run(attn_prefill, q, k, v, scale=scale)
    run(attn_decode, q[:, :1], k, v, scale=scale)


@pytest.mark.parametrize("sizes", [(0, 5, 7), (2, 0, 7)], ids=str)
def test_case_c02_empty_queries(sizes):
    q, k, v = qkv(*sizes, 4, 2, 64)
    out, lse = attn_prefill(q, k, v, return_lse=True)
    assert out.shape == q.shape and lse.shape == q.shape[:-1]
    if sizes[0] == 0:
        assert attn_decode(q[:, :1], k, v).shape == (0, 1, 4, 64)


@pytest.mark.parametrize("is_causal", [False, True])
def test_case_c02_empty_keys(is_causal):
    q, k, v = qkv(2, 5, 0, 4, 2, 64)
    for function, query in ((attn_prefill, q), (attn_decode, q[:, :1])):
        out = poisoned(query)
        _, lse = function(query, k, v, None, is_causal, return_lse=True, out=out)
        assert (out == 0).all() and (lse == float("-inf")).all()


def test_no_heads():
    q = torch.zeros(2, 3, 0, 64, device="cuda", dtype=torch.bfloat16)
    assert attn_prefill(q, q, q).shape == q.shape


@pytest.mark.parametrize("function", [attn_decode, attn_prefill])
def test_case_d01_a_transposed_view_after_a_contiguous_call(function):
    q, k, v = qkv(2, 1, 100, 8, 2, 128)
    for _ in range(2):
        run(function, q, k, v)
        views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
        run(function, *views)


def test_case_d02_interleaved_keys_and_values_and_packed_qkv():
    kv = randn(2, 2, 90, 4, 64)
    k, v = kv[:, 0], kv[:, 1]
    run(attn_decode, randn(2, 1, 8, 64, seed=4), k, v)
    run(attn_prefill, randn(2, 33, 8, 64, seed=4), k, v, is_causal=True)
    q, k, v = randn(2, 50, 3, 4, 128).unbind(2)
    run(attn_prefill, q, k, v, is_causal=True)
    fused = randn(2, 50, (8 + 2 + 2) * 64)
    q, k, v = (x.unflatten(-1, (-1, 64)) for x in fused.split([8 * 64, 2 * 64, 2 * 64], -1))
    run(attn_prefill, q, k, v, is_causal=True)
    interleaved = randn(2, 50, 4, 2, 64)  # k and v of each head side by side
    run(attn_prefill, q[:, :, :4], interleaved[..., 0, :], interleaved[..., 1, :])


def test_values_with_other_strides_than_keys():
    q, k, v = qkv(2, 20, 70, 4, 2, 64)
    run(attn_prefill, q, k, v.transpose(1, 2).contiguous().transpose(1, 2))
    run(attn_decode, q[:, :1], k.transpose(1, 2).contiguous().transpose(1, 2), v)


@pytest.mark.parametrize("function", [attn_decode, attn_prefill])
def test_case_d03_stride_of_a_size_1_dimension(function):
    k = randn(2, 40, 64).as_strided((2, 40, 1, 64), (40 * 64, 64, 7, 1))
    v = randn(2, 40, 64, seed=3).as_strided((2, 40, 1, 64), (40 * 64, 64, 13, 1))
    q = randn(2, 8, 64).as_strided((2, 1, 8, 64), (8 * 64, 3, 64, 1))
    run(function, q, k, v)
    one = randn(40, 64).as_strided((1, 40, 1, 64), (5, 64, 7, 1))
    run(function, q[:1], one, one)


@pytest.mark.parametrize("offset", [0, 1, 3, 4, 8])
@pytest.mark.parametrize("function", [attn_decode, attn_prefill])
def test_any_storage_offset(function, offset):
    def shifted(x):
        flat = torch.empty(x.numel() + offset, dtype=x.dtype, device="cuda")
        view = flat[offset:].view(x.shape)
        return view.copy_(x)

    run(function, *(shifted(x) for x in qkv(2, 1, 100, 8, 2, 128)))


def test_rows_that_are_not_16_byte_aligned():
    q = randn(2, 9, 4, 67)[..., :64]
    k, v = randn(2, 30, 2, 65)[..., 1:], randn(2, 30, 2, 66, seed=3)[..., :64]
    run(attn_prefill, q, k, v, is_causal=True)
    run(attn_decode, q[:, :1], k, v)


def test_expanded_keys():
    q, k, v = qkv(3, 5, 40, 8, 1, 64)
    run(attn_prefill, q, k[:1].expand(3, -1, 8, -1), v[:1].expand(3, -1, 8, -1))


@pytest.mark.parametrize("function", [attn_decode, attn_prefill])
def test_output_slices_and_nothing_beside_them_is_written(function):
    q, k, v = qkv(2, 1, 50, 4, 2, 64)
    base = torch.full((2, 3, 6, 72), 7.0, dtype=q.dtype, device="cuda")
    out = base[:, 1:2, 1:5, :64]
    check(function(q, k, v, out=out), None, reference(q, k, v), q.dtype)
    untouched = torch.ones_like(base, dtype=torch.bool)
    untouched[:, 1:2, 1:5, :64] = False
    assert (base[untouched] == 7).all()


def test_case_d05_a_large_batch():
    q, k, v = qkv(8300, 1, 1, 16, 16, 128)
    run(attn_prefill, q, k, v)
    run(attn_decode, q, k, v)


def test_case_d05_offsets_beyond_32_bits():
    # 8300 * 130 * 16 * 128 = 2.2e9 elements
    k = torch.zeros(8300, 130, 16, 128, dtype=torch.bfloat16, device="cuda")
    k[-2:] = randn(2, 130, 16, 128)
    q = randn(8300, 1, 16, 128, seed=4)
    expected = reference(q[-2:], k[-2:], k[-2:])
    for function in (attn_decode, attn_prefill):
        out = function(q, k, k)
        check(out[-2:], None, expected, q.dtype)
        assert (out[:-2] == 0).all()


@pytest.mark.parametrize("q_heads", [1, 5, 16, 64])
def test_case_d13_one_kv_head(q_heads):
    run(attn_decode, *qkv(2, 1, 200, q_heads, 1, 128))
    run(attn_prefill, *qkv(2, 40, 200, q_heads, 1, 128), is_causal=True)


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    batch=st.integers(1, 3),
    q_len=st.integers(1, 40),
    kv_len=st.integers(1, 90),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 9),
    head_dim=st.sampled_from(HEAD_DIMS),
    dtype=st.sampled_from(DTYPES),
)
def test_any_shape_and_strides(data, batch, q_len, kv_len, kv_heads, group, head_dim, dtype):
    def strided(x):
        order = data.draw(st.permutations([0, 1, 2]))
        pad = data.draw(st.sampled_from([0, 1, 8]))
        inverse = [order.index(i) for i in range(3)]
        shape = [x.shape[i] for i in order]
        base = torch.empty(*shape, head_dim + pad, dtype=dtype, device="cuda")
        return base[..., :head_dim].permute(*inverse, 3).copy_(x)

    q, k, v = qkv(batch, q_len, kv_len, kv_heads * group, kv_heads, head_dim, dtype=dtype)
    q, k, v = strided(q), strided(k), strided(v)
    is_causal = data.draw(st.booleans())
    rank = data.draw(st.integers(0, 8))
    mask = [None, *masks(batch, kv_heads * group, q_len, kv_len)][rank]
    run(attn_prefill, q, k, v, mask, is_causal)
    run(attn_decode, q[:, :1], k, v)
