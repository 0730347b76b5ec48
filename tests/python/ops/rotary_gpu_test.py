"""Rotary embedding against float64, strides, partial rotation and in place."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from astrai.extension.ops import rotary_emb, rotary_embed
from tests.python.ops.attention_inputs import randn
from tests.python.ops.references import rotate, table

DTYPES = [torch.bfloat16, torch.float16]
# One rounding at the end, of values up to about 6.
TOLERANCE = {
    torch.bfloat16: {"atol": 1e-3, "rtol": 2**-8},
    torch.float16: {"atol": 1e-4, "rtol": 2**-10},
}


def close(got, want, dtype):
    assert got.dtype == dtype and got.shape == want.shape
    torch.testing.assert_close(got.double(), want, **TOLERANCE[dtype])


def expected_embed(x, cache, positions, interleaved):
    cos, sin = cache[positions.long()].double().chunk(2, -1)
    cos, sin = cos.reshape(*x.shape[:-2], -1), sin.reshape(*x.shape[:-2], -1)
    return rotate(x.double(), cos, sin, interleaved)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 1, 2), (7, 3, 64), (130, 32, 128), (2, 9, 4, 80), (3, 5, 1, 256)], ids=str
)
def test_rotary_emb(dtype, shape):
    x = randn(*shape, dtype=dtype)
    angles = torch.randn(*shape[:-2], shape[-1] // 2, device="cuda") * 10
    freqs = torch.stack((angles.cos(), angles.sin()), -1)
    want = rotate(x.double(), freqs[..., 0].double(), freqs[..., 1].double(), True)
    before = x.clone()
    close(rotary_emb(x, freqs), want, dtype)
    assert torch.equal(x, before)
    out = torch.full_like(x, float("nan"))
    assert rotary_emb(x, freqs, out=out) is out
    close(out, want, dtype)
    assert rotary_emb(x, freqs, out=x) is x
    close(x, want, dtype)


def test_rotary_emb_copies_what_it_cannot_stride():
    x = randn(9, 4, 128)[..., ::2]
    angles = torch.randn(32, 9, device="cuda")
    freqs = torch.stack((angles.cos(), angles.sin()), -1).transpose(0, 1)
    assert not freqs.is_contiguous()
    want = rotate(x.double(), freqs[..., 0].double(), freqs[..., 1].double(), True)
    close(rotary_emb(x, freqs), want, x.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_case_d17_pairings(dtype, interleaved, index_dtype, head_dim):
    q, k = randn(19, 8, head_dim, dtype=dtype), randn(19, 2, head_dim, dtype=dtype, seed=2)
    cache = table(500, head_dim, device="cuda")
    positions = torch.randint(0, 500, (19,), device="cuda", dtype=index_dtype)
    before = q.clone(), k.clone()
    q2, k2 = rotary_embed(q, k, cache, positions, interleaved)
    close(q2, expected_embed(q, cache, positions, interleaved), dtype)
    close(k2, expected_embed(k, cache, positions, interleaved), dtype)
    assert torch.equal(q, before[0]) and torch.equal(k, before[1])  # not in place
    q3, k3 = rotary_embed(q, k, cache, positions, interleaved, inplace=True)
    assert q3 is q and k3 is k
    assert torch.equal(q, q2) and torch.equal(k, k2)


def test_the_two_pairings_differ():
    q, cache = randn(5, 2, 64), table(10, 64, device="cuda")
    positions = torch.arange(5, device="cuda")
    a, none = rotary_embed(q, None, cache, positions, interleaved=False)
    b, _ = rotary_embed(q, None, cache, positions, interleaved=True)
    assert none is None
    assert not torch.equal(a[1:], b[1:])
    assert torch.equal(a[0], q[0]) and torch.equal(b[0], q[0])  # position 0 turns nothing


@pytest.mark.parametrize("rotary_dim", [2, 32, 64, 96, 126, 128])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_case_d15_partial_rotation_leaves_the_tail(rotary_dim, interleaved, inplace):
    q, k = randn(11, 4, 128), randn(11, 1, 128, seed=2)
    cache = table(100, rotary_dim, device="cuda")
    positions = torch.arange(11, device="cuda") * 7
    want_q = expected_embed(q, cache, positions, interleaved)
    tail = q[..., rotary_dim:].clone()
    q2, k2 = rotary_embed(q, k, cache, positions, interleaved, rotary_dim, inplace)
    close(q2, want_q, q.dtype)
    assert torch.equal(q2[..., rotary_dim:], tail)
    assert k2.shape == k.shape


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_case_d04_slices_of_a_fused_qkv(inplace, interleaved):
    q_heads, kv_heads, dim = 8, 2, 64
    fused = randn(13, (q_heads + 2 * kv_heads) * dim)
    sizes = [q_heads * dim, kv_heads * dim, kv_heads * dim]
    q, k, v = (x.unflatten(-1, (-1, dim)) for x in fused.split(sizes, -1))
    cache, positions = table(100, dim, device="cuda"), torch.arange(13, device="cuda")
    want_q = expected_embed(q, cache, positions, interleaved)
    want_k = expected_embed(k, cache, positions, interleaved)
    v_before = v.clone()
    q2, k2 = rotary_embed(q, k, cache, positions, interleaved, inplace=inplace)
    close(q2, want_q, q.dtype)
    close(k2, want_k, k.dtype)
    assert torch.equal(v, v_before)


def test_case_d03_stride_of_a_size_1_dimension():
    x = randn(9, 64).as_strided((9, 1, 64), (64, 7, 1))
    cache, positions = table(20, 64, device="cuda"), torch.arange(9, device="cuda")
    close(
        rotary_embed(x, None, cache, positions)[0],
        expected_embed(x, cache, positions, False),
        x.dtype,
    )


@pytest.mark.parametrize("offset", [1, 2, 3, 8])
@pytest.mark.parametrize("interleaved", [False, True])
def test_any_storage_offset(offset, interleaved):
    flat = randn(9 * 4 * 64 + offset)
    x = flat[offset:].view(9, 4, 64)
    cache = torch.cat((torch.zeros(1, device="cuda"), table(20, 64, device="cuda").flatten()))
    cache = cache[1:].view(20, 64)  # not 16-byte aligned either
    positions = torch.arange(10, device="cuda")[1:]
    want = expected_embed(x, cache, positions, interleaved)
    close(rotary_embed(x, None, cache, positions, interleaved)[0], want, x.dtype)
    rotary_embed(x, None, cache, positions, interleaved, inplace=True)
    close(x, want, x.dtype)


def test_batched_positions():
    q, k = randn(3, 6, 4, 64), randn(3, 6, 2, 64, seed=2)
    cache = table(50, 64, device="cuda")
    row = torch.arange(6, device="cuda")
    for positions in (row.expand(3, 6), torch.randint(0, 50, (3, 6), device="cuda")):
        q2, k2 = rotary_embed(q, k, cache, positions)
        close(q2, expected_embed(q, cache, positions, False), q.dtype)
        close(k2, expected_embed(k, cache, positions, False), k.dtype)
        flat = rotary_embed(q, k, cache, positions.reshape(-1))
        assert torch.equal(flat[0], q2) and torch.equal(flat[1], k2)


@pytest.mark.parametrize("position", [-1, 50, 2**31 - 1])
def test_position_outside_the_table_becomes_nan(position):
    q = randn(3, 4, 128)
    cache = table(50, 64, device="cuda")
    positions = torch.tensor([1, position, 2], device="cuda")
    out, _ = rotary_embed(q, None, cache, positions)
    assert out[1, :, :64].isnan().all()
    assert torch.equal(out[1, :, 64:], q[1, :, 64:])
    assert out[[0, 2]].isfinite().all()


def test_case_d13_one_kv_head():
    q, k = randn(9, 16, 128), randn(9, 1, 128, seed=2)
    cache, positions = table(50, 128, device="cuda"), torch.arange(9, device="cuda")
    _, k2 = rotary_embed(q, k, cache, positions)
    close(k2, expected_embed(k, cache, positions, False), k.dtype)
    assert not torch.equal(k2[1:], k[1:])


def test_case_c02_no_tokens_and_no_heads():
    cache = table(50, 64, device="cuda")
    none = torch.zeros(0, dtype=torch.int64, device="cuda")
    q, k = rotary_embed(randn(0, 4, 64), randn(0, 2, 64), cache, none)
    assert q.shape == (0, 4, 64) and k.shape == (0, 2, 64)
    assert rotary_emb(randn(0, 4, 64), torch.zeros(0, 32, 2, device="cuda")).shape == (0, 4, 64)
    some = torch.arange(5, device="cuda")
    q, k = rotary_embed(randn(5, 0, 64), randn(5, 2, 64), cache, some)
    assert q.shape == (5, 0, 64)
    close(k, expected_embed(randn(5, 2, 64), cache, some, False), k.dtype)


def test_case_d05_offsets_beyond_32_bits():
    tokens = 270_000  # 270000 * 64 * 128 = 2.2e9 elements
    x = torch.zeros(tokens, 64, 128, dtype=torch.bfloat16, device="cuda")
    x[-2:] = randn(2, 64, 128)
    cache = table(50, 128, device="cuda")
    positions = torch.full((tokens,), 3, device="cuda")
    want = expected_embed(x[-2:], cache, positions[-2:], False)
    rotary_embed(x, None, cache, positions, inplace=True)
    close(x[-2:], want, x.dtype)
    assert not x[:-2].any()


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    tokens=st.integers(1, 20),
    heads=st.integers(1, 9),
    half_dim=st.integers(1, 128),
    dtype=st.sampled_from(DTYPES),
    interleaved=st.booleans(),
    inplace=st.booleans(),
)
def test_any_shape_and_strides(data, tokens, heads, half_dim, dtype, interleaved, inplace):
    dim = 2 * half_dim
    rotary_dim = 2 * data.draw(st.integers(1, half_dim))
    pad = data.draw(st.sampled_from([0, 1, 2, 8]))
    base = randn(heads, tokens, dim + pad, dtype=dtype)
    x = base.transpose(0, 1)[..., :dim] if data.draw(st.booleans()) else base[..., pad:]
    cache = table(64, rotary_dim, device="cuda")
    positions = torch.randint(0, 64, (x.shape[0],), device="cuda")
    want = expected_embed(x, cache, positions, interleaved)
    out, _ = rotary_embed(x, None, cache, positions, interleaved, rotary_dim, inplace)
    close(out, want, dtype)
    assert torch.equal(out[..., rotary_dim:].double(), want[..., rotary_dim:])
