"""Inputs, references and comparisons for the tests of attention on a GPU."""

import torch

from astrai.extension.backend.reference import attention_reference

# ||out - ref|| / ||ref|| against float64: the result is rounded once and the probabilities once.
BOUNDS = {torch.bfloat16: 6e-3, torch.float16: 1e-3}


def randn(*shape, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


def qkv(batch, q_len, kv_len, q_heads, kv_heads, head_dim, dtype=torch.bfloat16):
    return (
        randn(batch, q_len, q_heads, head_dim, dtype=dtype, seed=1),
        randn(batch, kv_len, kv_heads, head_dim, dtype=dtype, seed=2),
        randn(batch, kv_len, kv_heads, head_dim, dtype=dtype, seed=3),
    )


def reference(q, k, v, mask=None, is_causal=False, scale=None):
    """(out, lse) in float64."""
    return attention_reference(
        q.double(), k.double(), v.double(), mask, is_causal, scale, return_lse=True
    )


def check(out, lse, expected, dtype):
    """Compares out and lse with the reference; rows without a key must be exactly 0 and -inf."""
    want, want_lse = expected
    assert out.dtype == dtype and out.shape == want.shape
    assert out.isfinite().all()
    empty = want_lse == float("-inf")
    assert (out[empty] == 0).all()
    error = (out.double() - want).norm() / want.norm().clamp_min(1e-30)
    assert error < BOUNDS[dtype], float(error)
    torch.testing.assert_close(out.double(), want, atol=0.05, rtol=0.05)
    if lse is not None:
        assert lse.dtype == torch.float32 and lse.shape == want_lse.shape
        assert (lse[empty] == float("-inf")).all()
        torch.testing.assert_close(lse.double(), want_lse, atol=2e-3, rtol=1e-4)


def poisoned(q):
    """An output whose unwritten elements would show."""
    return torch.full_like(q, float("nan"), memory_format=torch.contiguous_format)
