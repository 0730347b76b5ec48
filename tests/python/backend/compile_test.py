"""torch.compile of the policy entry points: one graph, and it follows the context as eager does."""

import pytest
import torch

from astrai.extension import (
    AttentionBackend,
    AttentionBackendFactory,
    CudaBackend,
    apply_rotary_emb,
    attention,
    attn_backend,
    get_rotary_emb,
    op_backend,
    rotary_embed,
)
from astrai.extension.backend import attention_cuda
from astrai.extension.dispatch import get_family
from tests.python.backend.attention_cases import bool_mask, qkv, randn


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function, backend="eager", **kwargs):
    return torch.compile(function, fullgraph=True, backend=backend, **kwargs)


@pytest.mark.parametrize(
    ("dynamic", "kind", "return_lse"),
    [(False, "none", False), (True, "none", True), (True, "3d", False)],
)
def test_case_e09_attention_is_one_graph(dynamic, kind, return_lse):
    def call(q, k, v, mask):
        return attention(q, k, v, attn_mask=mask, is_causal=True, return_lse=return_lse)

    traced = compiled(call, dynamic=dynamic)
    for q_len, kv_len in ((5, 5), (3, 9), (9, 4)):
        q, k, v = qkv(2, q_len, kv_len, 4, 2, 64)
        mask = bool_mask(kind, 2, 4, q_len, kv_len)
        torch.testing.assert_close(traced(q, k, v, mask), call(q, k, v, mask))


def test_case_e09_attention_trains_when_compiled():
    q, k, v = (x.requires_grad_() for x in qkv(1, 4, 6, 2, 1, 8))
    want = torch.autograd.grad(attention(q, k, v, is_causal=True).sum(), (q, k, v))
    traced = compiled(lambda q, k, v: attention(q, k, v, is_causal=True), "aot_eager")
    got = torch.autograd.grad(traced(q, k, v).sum(), (q, k, v))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dynamic", [False, True])
def test_case_e09_rotary_is_one_graph(dynamic):
    apply = compiled(apply_rotary_emb, dynamic=dynamic)
    embed = compiled(
        lambda q, k, cache, positions: rotary_embed(q, k, cache, positions, rotary_dim=32),
        dynamic=dynamic,
    )
    for tokens in (3, 5, 8):
        x, freqs = randn(tokens, 4, 64), get_rotary_emb(64, tokens)
        torch.testing.assert_close(apply(x, freqs), apply_rotary_emb(x, freqs))
        cache, positions = randn(16, 32), torch.arange(tokens)
        got = embed(x, x[:, :1], cache, positions)
        want = rotary_embed(x, x[:, :1], cache, positions, rotary_dim=32)
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dynamic", [False, True])
def test_cuda_selection_traces_without_a_gpu(dynamic, monkeypatch):
    """All terms of the cuda backend's spec, with a stand-in for the kernel on CPU tensors."""
    family = get_family("attention")
    real = family.axes

    def on_gpu(*args, **kwargs):
        return {
            **real(*args, **kwargs),
            "device_cuda": True,
            "capability": 90,
            "kernel_loaded": True,
        }

    def stand_in(q, k, v, mask, is_causal, *, scale, return_lse, window, softcap, sinks):
        return q * 5

    monkeypatch.setattr(family, "axes", on_gpu)
    monkeypatch.setattr(CudaBackend, "available", classmethod(lambda cls: True))
    monkeypatch.setattr(attention_cuda, "attn_prefill", stand_in)
    monkeypatch.setattr(attention_cuda, "attn_decode", stand_in)
    traced = compiled(lambda q, k, v, m: attention(q, k, v, attn_mask=m), dynamic=dynamic)
    for q_len in (3, 7, 1):
        q, k, v = qkv(2, q_len, 9, 4, 2, 64, dtype=torch.bfloat16)
        for mask in (None, torch.ones(2, 9, dtype=torch.bool)):
            assert torch.equal(traced(q, k, v, mask), q * 5)
    q, k, v = qkv(2, 3, 9, 4, 2, 36, dtype=torch.bfloat16)
    assert not torch.equal(traced(q, k, v, None), q * 5)


class Tripling(AttentionBackend):
    def forward(self, q, k, v, kv_cache, layer_id, attn_mask, is_causal, fwd):
        return q * 3


def test_compiled_code_follows_the_context():
    q, k, v = qkv(1, 4, 4, 2, 1, 8)
    AttentionBackendFactory.register("tripling")(Tripling)
    try:
        traced = compiled(lambda q, k, v: attention(q, k, v))
        with attn_backend("torch_native"):
            plain = traced(q, k, v)
            torch.testing.assert_close(plain, attention(q, k, v))
        with op_backend(attention="tripling"):
            torch.testing.assert_close(traced(q, k, v), q * 3)
        with attn_backend("torch_native"):
            torch.testing.assert_close(traced(q, k, v), plain)
        by_argument = compiled(lambda q, k, v: attention(q, k, v, backend="tripling"))
        torch.testing.assert_close(by_argument(q, k, v), q * 3)
    finally:
        AttentionBackendFactory.unregister("tripling")
        Tripling.name = ""


def test_strict_choice_is_strict_when_compiled():
    q, k, v = qkv(1, 4, 4, 2, 1, 8)
    traced = torch.compile(lambda q, k, v: attention(q, k, v), backend="eager")
    with attn_backend("cuda"), pytest.raises(RuntimeError, match="Explicitly-set backend"):
        traced(q, k, v)
