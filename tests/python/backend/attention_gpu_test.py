"""Attention on a GPU: the cuda backend against the reference, and how a backend is chosen there."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from astrai.extension import (
    CudaBackend,
    ExplicitSelectionError,
    attention,
    attn_backend,
    explain,
    get_backend,
    resolve,
)
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

BF16 = {"dtype": torch.bfloat16, "device": "cuda"}
# ||out - ref|| / ||ref||: the result's own rounding and that of the probabilities before P V.
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 8e-4}


def reference(q, k, v, mask=None, is_causal=False, scale=None, **features):
    return attention_reference(
        q.double(), k.double(), v.double(), mask, is_causal, scale, return_lse=True, **features
    )


def check(got, want, dtype):
    """(out, lse) against the reference; rows without keys exactly 0 and -inf."""
    out, lse = got
    want_out, want_lse = want
    assert out.dtype is dtype and lse.dtype is torch.float32
    assert torch.isfinite(out).all()
    assert relative_error(out, want_out) < TOLERANCE[dtype]
    error = (out.double() - want_out).abs().max()
    assert float(error) < 4 * TOLERANCE[dtype] * float(want_out.abs().max().clamp_min(1))
    blind = want_lse == -math.inf
    assert torch.equal(lse == -math.inf, blind)
    assert (out[blind] == 0).all()
    torch.testing.assert_close(lse[~blind].double(), want_lse[~blind], rtol=1e-4, atol=2e-3)


def test_kernels_are_there():
    assert CudaBackend.available(), CudaBackend.why_unavailable()
    assert isinstance(get_backend(), CudaBackend)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(8, 8), (9, 3), (8, 1), (10, 2)])
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 300), (77, 77), (40, 333), (200, 3)])
def test_dense_call(q_len, kv_len, q_heads, kv_heads, head_dim, dtype):
    q, k, v = qkv(2, q_len, kv_len, q_heads, kv_heads, head_dim, dtype=dtype, device="cuda")
    assert resolve("attention", q, k, v, is_causal=True).record.name == "cuda"
    for is_causal in (False, True):
        got = attention(q, k, v, is_causal=is_causal, return_lse=True)
        check(got, reference(q, k, v, None, is_causal), dtype)
        assert torch.equal(attention(q, k, v, is_causal=is_causal), got[0])
    check(attention(q, k, v, scale=0.21, return_lse=True), reference(q, k, v, scale=0.21), dtype)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (30, -1), (-1, 7), (25, 3)])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("backend", ["cuda", "torch_native"])
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 130), (70, 90), (90, 5)])
def test_features(backend, with_sinks, softcap, window, is_causal, q_len, kv_len):
    q, k, v = qkv(2, q_len, kv_len, 8, 2, 128, **BF16)
    sinks = torch.linspace(-1, 2, 8, device="cuda") if with_sinks else None
    features = {"window": window, "softcap": softcap, "sinks": sinks}
    call = {"is_causal": is_causal, "return_lse": True, "backend": backend, **features}
    got = attention(q, k, v, **call)
    check(got, reference(q, k, v, None, is_causal, **features), torch.bfloat16)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 130), (70, 70), (5, 90), (90, 5)])
def test_masks_are_never_dropped(kind, is_causal, q_len, kv_len):
    q, k, v = qkv(2, q_len, kv_len, 8, 2, 128, **BF16)
    mask = bool_mask(kind, 2, 8, q_len, kv_len, device="cuda")
    found = resolve("attention", q, k, v, attn_mask=mask, is_causal=is_causal)
    assert found.record.name == "cuda"
    got = attention(q, k, v, attn_mask=mask, is_causal=is_causal, return_lse=True)
    check(got, reference(q, k, v, mask, is_causal), torch.bfloat16)


@pytest.mark.parametrize(("q_len", "kv_len"), [(3, 128), (128, 3), (1, 1), (5, 5), (65, 64)])
@pytest.mark.parametrize("backend", ["cuda", "torch_native"])
def test_case_c08_causal_is_bottom_right(q_len, kv_len, backend):
    q, k, v = qkv(1, q_len, kv_len, 4, 2, 64, **BF16)
    got = attention(q, k, v, is_causal=True, return_lse=True, backend=backend)
    check(got, reference(q, k, v, None, True), torch.bfloat16)
    plain = attention(q, k, v, is_causal=True, backend=backend)
    assert relative_error(plain, got[0]) < 6e-3
    assert (plain[:, : max(q_len - kv_len, 0)] == 0).all()


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 3),
    q_len=st.integers(1, 140),
    kv_len=st.integers(1, 260),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 9),
    head_dim=st.sampled_from([64, 128, 256]),
    kind=st.sampled_from(MASKS),
    is_causal=st.booleans(),
)
def test_any_call(batch, q_len, kv_len, kv_heads, group, head_dim, kind, is_causal):
    heads = kv_heads * group
    q, k, v = qkv(batch, q_len, kv_len, heads, kv_heads, head_dim, **BF16)
    mask = bool_mask(kind, batch, heads, q_len, kv_len, device="cuda")
    got = attention(q, k, v, attn_mask=mask, is_causal=is_causal, return_lse=True, backend="cuda")
    check(got, reference(q, k, v, mask, is_causal), torch.bfloat16)


def test_case_d02_strided_views():
    fused = torch.randn(2, 40, 12, 128, **BF16)
    q, k, v = fused[:, :, :8], fused[:, :, 8:10], fused[:, :, 10:]
    got = attention(q, k, v, is_causal=True, return_lse=True, backend="cuda")
    check(got, reference(q, k, v, None, True), torch.bfloat16)
    turned = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in (q, k, v)]
    assert all(x.stride(-1) != 1 for x in turned)
    assert torch.equal(attention(*turned, is_causal=True, backend="cuda"), got[0])


@pytest.mark.parametrize(("batch", "q_len", "kv_len"), [(2, 0, 5), (2, 3, 0), (0, 3, 5), (2, 1, 0)])
def test_case_c02_empty_inputs(batch, q_len, kv_len):
    q = torch.ones(batch, q_len, 4, 64, **BF16)
    k = torch.ones(batch, kv_len, 2, 64, **BF16)
    out, lse = attention(q, k, k, is_causal=True, return_lse=True, backend="cuda")
    assert out.shape == q.shape and (out == 0).all()
    assert lse.shape == q.shape[:-1] and (lse == -math.inf).all()


def test_what_cuda_cannot_take_falls_back_unless_explicit(monkeypatch):
    odd = qkv(1, 4, 6, 4, 2, 36, **BF16)
    single = qkv(1, 4, 6, 4, 2, 64, device="cuda")
    monkeypatch.setenv("ASTR_BACKEND", "cuda")
    for call in (odd, single):
        assert resolve("attention", *call).record.name != "cuda"
        tolerance = 6e-3 if call[0].dtype is torch.bfloat16 else 1e-5
        assert relative_error(attention(*call), reference(*call)[0]) < tolerance
        message = "^Explicitly-set backend CudaBackend cannot handle this attention call"
        with pytest.raises(ExplicitSelectionError, match=message):
            attention(*call, backend="cuda")
        with attn_backend("cuda"), pytest.raises(RuntimeError, match=message):
            attention(*call)


def test_environment_and_context_choose(monkeypatch):
    q, k, v = qkv(1, 4, 6, 4, 2, 64, **BF16)
    assert resolve("attention", q, k, v).origin == "chain"
    monkeypatch.setenv("ASTR_BACKEND", "torch_native")
    assert resolve("attention", q, k, v).record.name == "torch_native"
    with attn_backend("cuda"):
        assert resolve("attention", q, k, v).record.name == "cuda"
    monkeypatch.delenv("ASTR_BACKEND")
    monkeypatch.setenv("ASTR_OPS", "profile=reference")
    assert resolve("attention", q, k, v).origin == "profile"


def test_cpu_tensor_takes_no_kernel_beside_a_gpu():
    q, k, v = qkv(1, 4, 6, 4, 2, 64, dtype=torch.bfloat16)
    assert resolve("attention", q, k, v).record.name == "torch_native"
    assert "needs device_cuda is true, got False" in explain("attention", q, k, v)
    with pytest.raises(ValueError, match="must be on one device"):
        attention(q.cuda(), k, v)


def test_training_takes_a_backend_with_gradients():
    q, k, v = (x.requires_grad_() for x in qkv(1, 16, 16, 4, 2, 64, **BF16))
    assert resolve("attention", q, k, v, is_causal=True).record.name != "cuda"
    grads = torch.autograd.grad(attention(q, k, v, is_causal=True).float().sum(), (q, k, v))
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    want = torch.autograd.grad(attention_reference(*wide, is_causal=True).sum(), wide)
    for got, expected in zip(grads, want, strict=True):
        assert relative_error(got, expected) < 2e-2
    with torch.no_grad():
        assert resolve("attention", q, k, v, is_causal=True).record.name == "cuda"


PACKED = [
    ([300, 1, 77], [1, 1, 1], None),
    ([129, 129, 129], [1, 1, 1], [1, 2, 3]),
    ([90, 90, 300], [1, 1, 1], [3, 2, 0]),
    ([70, 10, 130], [70, 10, 130], None),
    ([200, 130], [40, 1], [2, 0]),
    ([150, 150], [33, 33], [0, 1]),
]


@pytest.mark.parametrize("backend", ["cuda", "torch_native"])
@pytest.mark.parametrize("kind", ["none", "2d", "4d"])
@pytest.mark.parametrize(("lens", "q_lens", "rows"), PACKED)
def test_packed_call(backend, lens, q_lens, rows, kind):
    """The rest of the cache is NaN: a backend that reads past a request's length shows it."""
    fwd = "decode" if max(q_lens) == 1 else "prefill"
    cache, keys, values = make_cache(
        lens, q_lens, rows=rows, kv_heads=2, head_dim=128, max_seq=320, **BF16
    )
    q, k, v = packed_call(cache, keys, values, q_lens, 8, 1, **BF16)
    mask = bool_mask(kind, len(lens), 8, max(q_lens), 320, device="cuda")
    got = attention(q, k, v, cache, 1, mask, True, fwd, backend, return_lse=True)
    want = packed_expected(attention_reference, q, keys, values, q_lens, 1, mask, is_causal=True)
    check(got, want, torch.bfloat16)
    slots = cache.out_cache_loc.long()
    assert torch.equal(cache.k_buffer[1, slots], k) and torch.equal(cache.v_buffer[1, slots], v)


def test_packed_call_does_not_wait_for_the_device():
    lens, q_lens = [70, 10, 130], [1, 1, 1]
    cache, keys, values = make_cache(lens, q_lens, head_dim=64, max_seq=160, **BF16)
    q, k, v = packed_call(cache, keys, values, q_lens, 4, 0, **BF16)
    attention(q, k, v, cache, 0, None, True, "decode")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for backend in ("cuda", "torch_native"):
            attention(q, k, v, cache, 0, None, True, "decode", backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_packed_decode_replays_in_a_graph():
    cache, keys, values = make_cache([64, 64], [1, 1], head_dim=64, max_seq=80, **BF16)
    q, k, v = packed_call(cache, keys, values, [1, 1], 4, 0, **BF16)
    want = attention(q, k, v, cache, 0, None, True, "decode", "cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, cache, 0, None, True, "decode", "cuda")
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, want)


@pytest.mark.parametrize("dynamic", [False, True])
def test_case_e09_compiles_to_one_graph_with_the_kernel(dynamic):
    torch._dynamo.reset()
    seen = []

    def spy(graph, inputs):
        seen.append(graph.print_readable(print_output=False))
        return graph.forward

    def call(q, k, v):
        return attention(q, k, v, is_causal=True, return_lse=True)

    traced = torch.compile(call, fullgraph=True, dynamic=dynamic, backend=spy)
    for q_len, kv_len in ((20, 20), (7, 50), (1, 60)):
        q, k, v = qkv(2, q_len, kv_len, 8, 2, 128, **BF16)
        check(traced(q, k, v), reference(q, k, v, None, True), torch.bfloat16)
    assert all("astrai.attn_" in text for text in seen)
    q, k, v = qkv(2, 20, 20, 8, 2, 128, **BF16)
    with attn_backend("torch_native"):
        traced(q, k, v)
    assert "astrai.attn_" not in seen[-1]
    torch._dynamo.reset()


def test_compiles_with_inductor():
    torch._dynamo.reset()
    q, k, v = qkv(2, 33, 33, 8, 2, 64, **BF16)
    traced = torch.compile(lambda q, k, v: attention(q * 2, k, v, is_causal=True) + 1)
    want, _ = reference(q * 2, k, v, None, True)
    assert relative_error(traced(q, k, v), want + 1) < 6e-3
    torch._dynamo.reset()
