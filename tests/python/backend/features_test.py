"""Window, softcap and sinks: the reference by hand, and the torch backend against the reference."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from astrai.extension import ShapeError, attention
from astrai.extension.backend.reference import attention_reference
from tests.python.backend.attention_cases import (
    bool_mask,
    make_cache,
    packed_call,
    packed_expected,
    qkv,
    randn,
)


def by_hand(q, k, v, mask, is_causal, scale, window, softcap, sinks):
    """One query and head at a time, with Python's numbers as scores."""
    q_len, heads, kv_len, group = q.shape[1], q.shape[2], k.shape[1], q.shape[2] // k.shape[2]
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=torch.float64)
    lse = torch.full(q.shape[:-1], -math.inf, dtype=torch.float64)
    left, right = window
    for b in range(q.shape[0]):
        for i in range(q_len):
            diagonal = i + kv_len - q_len
            for h in range(heads):
                weights = {}
                for j in range(kv_len):
                    seen = mask is None or bool(mask[b, i, j])
                    seen &= not is_causal or j <= diagonal
                    seen &= left < 0 or j >= diagonal - left
                    seen &= right < 0 or j <= diagonal + right
                    if seen:
                        score = scale * float(q[b, i, h] @ k[b, j, h // group])
                        if softcap > 0:
                            score = softcap * math.tanh(score / softcap)
                        weights[j] = math.exp(score)
                total = sum(weights.values())
                total += 0.0 if sinks is None else math.exp(float(sinks[h]))
                if total > 0:
                    lse[b, i, h] = math.log(total)
                for j, weight in weights.items():
                    out[b, i, h] += weight / total * v[b, j, h // group]
    return out, lse


FEATURES = {
    "is_causal": st.booleans(),
    "scale": st.sampled_from([0.4, 0.0, -0.3]),
    "window": st.tuples(st.integers(-1, 8), st.integers(-1, 8)),
    "softcap": st.sampled_from([0.0, 0.5, 30.0]),
    "with_sinks": st.booleans(),
}


@settings(max_examples=60, deadline=None)
@given(
    q_len=st.integers(1, 6),
    kv_len=st.integers(0, 7),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    masked=st.booleans(),
    **FEATURES,
)
def test_reference_is_the_definition(
    q_len, kv_len, kv_heads, group, masked, is_causal, scale, window, softcap, with_sinks
):
    heads = kv_heads * group
    q, k, _ = qkv(2, q_len, kv_len, heads, kv_heads, 8, dtype=torch.float64)
    v = randn(2, kv_len, kv_heads, 5, dtype=torch.float64)
    mask = bool_mask("3d", 2, heads, q_len, kv_len) if masked else None
    sinks = randn(heads, dtype=torch.float64, seed=9) if with_sinks else None
    features = {"window": window, "softcap": softcap, "sinks": sinks}
    got = attention_reference(q, k, v, mask, is_causal, scale, return_lse=True, **features)
    want = by_hand(q, k, v, mask, is_causal, scale, **features)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    out = attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, **features)
    torch.testing.assert_close(out, want[0], rtol=1e-11, atol=1e-11)


@settings(max_examples=30, deadline=None)
@given(contiguous=st.booleans(), prefill=st.booleans(), **FEATURES)
def test_packed_call(contiguous, prefill, is_causal, scale, window, softcap, with_sinks):
    lens, q_lens = ([9, 5, 17], [4, 5, 1]) if prefill else ([9, 1, 17], [1, 1, 1])
    cache, keys, values = make_cache(lens, q_lens, contiguous=contiguous)
    q, k, v = packed_call(cache, keys, values, q_lens, 4, layer=1)
    features = {
        "is_causal": is_causal,
        "scale": scale,
        "window": window,
        "softcap": softcap,
        "sinks": randn(4, seed=9) if with_sinks else None,
    }
    fwd = "prefill" if prefill else "decode"
    got = attention(q, k, v, cache, 1, fwd=fwd, return_lse=True, **features)
    want = packed_expected(attention_reference, q, keys, values, q_lens, 1, **features)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


def test_gradients_of_softcap_window_and_sinks():
    q, k, v = (x.requires_grad_() for x in qkv(1, 3, 4, 2, 1, 4, dtype=torch.float64))
    sinks = randn(2, dtype=torch.float64, seed=9).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda *x: attention(*x[:3], is_causal=True, window=(1, -1), softcap=2.0, sinks=x[3]),
        (q, k, v, sinks),
    )


@pytest.mark.parametrize(
    ("features", "error", "message"),
    [
        ({"window": (1,)}, ShapeError, "window must be"),
        ({"window": (-2, 0)}, ShapeError, "window must be"),
        ({"softcap": -1.0}, ShapeError, "softcap must be finite and 0 or more"),
        ({"softcap": math.nan}, ShapeError, "softcap must be finite and 0 or more"),
        ({"sinks": torch.zeros(3)}, ShapeError, r"sinks must be \[2\]"),
        ({"sinks": torch.zeros(2).half()}, TypeError, "sinks must be float32"),
        ({"sinks": [0.0, 0.0]}, TypeError, "sinks must be a torch.Tensor"),
    ],
)
def test_bad_features(features, error, message):
    with pytest.raises(error, match=message):
        attention(*qkv(1, 3, 4, 2, 1, 8), **features)
