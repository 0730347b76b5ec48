"""TorchNativeBackend against attention_reference in float64: dense and packed calls."""

import math

import pytest
import torch

from astrai.extension import ShapeError, attention
from astrai.extension.backend.reference import attention_reference
from tests.python.backend.attention_cases import (
    MASKS,
    bool_mask,
    make_cache,
    packed_call,
    packed_expected,
    qkv,
    relative_error,
)

TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 2e-6,
    torch.float16: 2e-3,
    torch.bfloat16: 1.2e-2,
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 9), (5, 5), (3, 12), (12, 3), (1, 1), (2, 1)])
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(4, 4), (6, 2), (5, 1)])
def test_dense_call(q_heads, kv_heads, q_len, kv_len, kind, is_causal):
    q, k, v = qkv(2, q_len, kv_len, q_heads, kv_heads, 16, dtype=torch.float32)
    mask = bool_mask(kind, 2, q_heads, q_len, kv_len)
    want = attention_reference(q.double(), k.double(), v.double(), mask, is_causal)
    got = attention(q, k, v, attn_mask=mask, is_causal=is_causal, backend="torch_native")
    assert got.shape == q.shape and got.dtype is q.dtype
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    blind = (want == 0).all(-1)
    assert (got[blind] == 0).all()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_dim", [40, 64, 80, 256])
def test_dtypes_and_head_dims(dtype, head_dim):
    q, k, v = qkv(2, 17, 33, 4, 2, head_dim, dtype=dtype)
    want = attention_reference(q.double(), k.double(), v.double(), is_causal=True)
    got = attention(q, k, v, is_causal=True)
    assert got.dtype is dtype
    assert relative_error(got, want) < TOLERANCE[dtype]


@pytest.mark.parametrize(("q_len", "kv_len"), [(3, 128), (128, 3), (1, 1), (5, 5), (65, 64)])
def test_case_c08_causal_is_bottom_right(q_len, kv_len):
    q, k, v = qkv(1, q_len, kv_len, 2, 1, 64)
    got, lse = attention(q, k, v, is_causal=True, return_lse=True)
    plain = attention(q, k, v, is_causal=True)
    want, want_lse = attention_reference(
        q.double(), k.double(), v.double(), is_causal=True, return_lse=True
    )
    torch.testing.assert_close(plain.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)
    blind = max(q_len - kv_len, 0)
    assert (plain[:, :blind] == 0).all() and (lse[:, :blind] == -math.inf).all()


def test_additive_mask_and_scale():
    q, k, v = qkv(2, 6, 7, 4, 2, 16)
    bias = torch.randn(2, 4, 6, 7).masked_fill(~bool_mask("4d", 2, 4, 6, 7), -math.inf)
    for is_causal in (False, True):
        want = attention_reference(q.double(), k.double(), v.double(), bias, is_causal, 0.4)
        got = attention(q, k, v, attn_mask=bias, is_causal=is_causal, scale=0.4)
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
        assert (got[:, 0] == 0).all()


@pytest.mark.parametrize("kind", ["none", "3d"])
@pytest.mark.parametrize(("q_len", "kv_len"), [(4, 4), (5, 3), (2, 4)])
def test_gradients(q_len, kv_len, kind):
    q, k, v = (x.requires_grad_() for x in qkv(1, q_len, kv_len, 2, 1, 8, dtype=torch.float64))
    mask = bool_mask(kind, 1, 2, q_len, kv_len)
    assert torch.autograd.gradcheck(
        lambda q, k, v: attention(q, k, v, attn_mask=mask, is_causal=True), (q, k, v)
    )


@pytest.mark.parametrize("return_lse", [False, True])
def test_strides_do_not_matter(return_lse):
    fused = torch.randn(2, 9, 8, 16)
    q, k, v = fused[:, :, :4], fused[:, :, 4:6], fused[:, :, 6:]
    dense = [x.contiguous() for x in (q, k, v)]
    want = attention(*dense, is_causal=True, return_lse=return_lse)
    got = attention(q, k, v, is_causal=True, return_lse=return_lse)
    for a, b in zip(got if return_lse else [got], want if return_lse else [want], strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("batch", "q_len", "kv_len"), [(2, 0, 5), (2, 3, 0), (0, 3, 5)])
def test_case_c02_empty_inputs(batch, q_len, kv_len):
    q, k, v = torch.ones(batch, q_len, 4, 64), *([torch.ones(batch, kv_len, 2, 64)] * 2)
    out, lse = attention(q, k, v, is_causal=True, return_lse=True)
    assert out.shape == q.shape and (out == 0).all()
    assert lse.shape == q.shape[:-1] and (lse == -math.inf).all()
    assert attention(q, k, v).shape == q.shape


PACKED = [
    # lens, q_lens, rows
    ([5, 1, 17], [1, 1, 1], None),
    ([9, 9, 9], [1, 1, 1], [1, 2, 3]),
    ([9, 9, 30], [1, 1, 1], [3, 2, 0]),
    ([7, 12, 40], [7, 12, 40], None),
    ([20, 13], [4, 1], [2, 0]),
    ([33, 33], [3, 3], [0, 1]),
]


@pytest.mark.parametrize(("lens", "q_lens", "rows"), PACKED)
@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("host", [True, False])
@pytest.mark.parametrize("kind", ["none", "2d", "3d", "4d", "4d_row"])
def test_packed_call(lens, q_lens, rows, contiguous, host, kind):
    fwd = "decode" if max(q_lens) == 1 else "prefill"
    cache, keys, values = make_cache(lens, q_lens, rows=rows, contiguous=contiguous, host=host)
    q, k, v = packed_call(cache, keys, values, q_lens, 4, layer=1)
    mask = bool_mask(kind, len(lens), 4, max(q_lens), 48)
    out, lse = attention(q, k, v, cache, 1, mask, True, fwd, return_lse=True)
    want, want_lse = packed_expected(
        attention_reference, q, keys, values, q_lens, 1, mask, is_causal=True
    )
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)
    # Written bit for bit where the tokens belong, and nothing else touched.
    slots = cache.out_cache_loc.long()
    assert torch.equal(cache.k_buffer[1, slots], k) and torch.equal(cache.v_buffer[1, slots], v)
    assert torch.isnan(cache.k_buffer[0, slots]).all()
    again = attention(q, k, v, cache, 1, mask, True, fwd)
    torch.testing.assert_close(again.double(), want, rtol=1e-5, atol=1e-5)


def test_packed_call_without_causal_flag_sees_later_tokens():
    lens, q_lens = [6, 4], [6, 4]
    cache, keys, values = make_cache(lens, q_lens)
    q, k, v = packed_call(cache, keys, values, q_lens, 4, layer=0)
    want, _ = packed_expected(attention_reference, q, keys, values, q_lens, 0, is_causal=False)
    out = attention(q, k, v, cache, 0, None, False, "prefill", scale=None)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)


def test_case_d12_negative_slot_is_skipped():
    cache, keys, values = make_cache([9, 12], [1, 1], contiguous=False)
    cache.req_to_token[0, 3] = -1
    q, k, v = packed_call(cache, keys, values, [1, 1], 4, layer=0)
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[0, 3] = False
    want, _ = packed_expected(attention_reference, q, keys, values, [1, 1], 0, mask)
    got = attention(q, k, v, cache, 0, None, False, "decode")
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_packed_call_waits_for_no_device(monkeypatch):
    cache, keys, values = make_cache([9, 12, 5], [2, 3, 1])
    q, k, v = packed_call(cache, keys, values, [2, 3, 1], 4, layer=0)

    def refuse(*args):
        raise AssertionError("a device tensor was read on the host")

    for name in ("item", "tolist", "cpu", "__bool__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    attention(q, k, v, cache, 0, None, True, "prefill")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": 1}, "must have the 5 tokens"),
        ({"k": 1}, r"k must be \(5, 2, 64\)"),
        ({"mask": (2, 11)}, "last dim must be at least kv_len 12"),
        ({"mask": (3, 48)}, "mask batch must be 2 or 1"),
        ({"mask": (2, 2, 48)}, "mask rows must be 1 or at least q_len 3"),
        ({"mask": (48,)}, "mask must be 2D, 3D or 4D"),
        ({"mask": (2, 3, 3, 48)}, "mask heads must be 4 or 1"),
    ],
)
def test_packed_call_that_does_not_fit_its_cache(change, message):
    cache, keys, values = make_cache([9, 12], [2, 3])
    q, k, v = packed_call(cache, keys, values, [2, 3], 4, layer=0)
    q, k, v = q[change.get("q", 0) :], k[change.get("k", 0) :], v[change.get("k", 0) :]
    mask = torch.ones(change["mask"], dtype=torch.bool) if "mask" in change else None
    with pytest.raises(ShapeError, match=message):
        attention(q, k, v, cache, 0, mask, True, "prefill")


def test_packed_call_of_another_dtype_than_its_cache():
    cache, keys, values = make_cache([9], [1])
    q, k, v = (x.bfloat16() for x in packed_call(cache, keys, values, [1], 4, layer=0))
    with pytest.raises(TypeError, match=r"k must have kv_cache's dtype torch.float32"):
        attention(q, k, v, cache, 0, None, False, "decode")


def test_decode_needs_one_token_per_request():
    cache, keys, values = make_cache([9, 12], [2, 3])
    q, k, v = packed_call(cache, keys, values, [2, 3], 4, layer=0)
    with pytest.raises(ShapeError, match="decode must have one query token per request"):
        attention(q, k, v, cache, 0, None, True, "decode")
