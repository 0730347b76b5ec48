"""How attention chooses its backend: names, contexts, environment, strictness."""

import threading

import pytest
import torch

from astrai.extension import (
    ATTN_BACKEND,
    AttentionBackend,
    AttentionBackendFactory,
    CudaBackend,
    ExplicitSelectionError,
    FlashAttnBackend,
    ShapeError,
    TorchNativeBackend,
    attention,
    attn_backend,
    explain,
    get_backend,
    op_backend,
    resolve,
)
from astrai.extension.backend import attention_base
from astrai.extension.dispatch import get_family
from tests.python.backend.attention_cases import make_cache, packed_call, qkv


@pytest.fixture
def call():
    return qkv(1, 3, 5, 4, 2, 64, dtype=torch.bfloat16)


@pytest.fixture
def kernels(monkeypatch):
    """Pretend that the kernels are there and that every tensor is on an sm_90 device."""
    monkeypatch.setattr(attention_base, "kernel_loaded", lambda name: True)
    monkeypatch.setattr(CudaBackend, "available", classmethod(lambda cls: True))
    real = attention_base.attention_axes

    def on_gpu(*args, **kwargs):
        return {
            **real(*args, **kwargs),
            "device_cuda": True,
            "capability": 90,
            "kernel_loaded": True,
        }

    monkeypatch.setattr(get_family("attention"), "axes", on_gpu)


def test_factory():
    assert AttentionBackendFactory.list_registered() == ["cuda", "flash", "torch_native"]
    assert AttentionBackendFactory.get_component_class("cuda") is CudaBackend
    assert AttentionBackendFactory.create("flash") is AttentionBackendFactory.create("flash")
    assert isinstance(AttentionBackendFactory.create("torch_native"), TorchNativeBackend)
    message = r"Unknown component: 'x'. Supported types: \['cuda', 'flash', 'torch_native'\]"
    with pytest.raises(ValueError, match=message):
        AttentionBackendFactory.create("x")
    with pytest.raises(TypeError, match="must be a subclass of AttentionBackend"):
        AttentionBackendFactory.register("x")(int)
    assert [member.value for member in ATTN_BACKEND] == ["torch_native", "cuda", "flash"]


@pytest.mark.parametrize(
    "choice",
    [
        "torch_native",
        ATTN_BACKEND.TORCH_NATIVE,
        TorchNativeBackend,
        AttentionBackendFactory.create("torch_native"),
    ],
)
def test_every_way_to_name_a_backend(choice, call):
    torch_native = AttentionBackendFactory.create("torch_native")
    with attn_backend(choice) as yielded:
        assert yielded is torch_native is get_backend()
        assert resolve("attention", *call).origin == "context"
    with op_backend(attention=choice):
        assert get_backend(use_default=False) is torch_native
    assert get_backend(use_default=False) is None
    assert resolve("attention", *call, explicit=choice).record.obj is torch_native
    assert attention(*call, backend=choice).shape == call[0].shape


def test_bad_choices(call):
    with pytest.raises(ValueError, match="Unknown component: 'x'"):
        attn_backend("x")
    with pytest.raises(ValueError, match="Unknown component: 'x'"):
        attention(*call, backend="x")
    for bad in (3, int, None):
        with pytest.raises(TypeError, match="attn_backend: backend must be a name"):
            attn_backend(bad)


def test_backend_instance_is_a_context():
    torch_native = AttentionBackendFactory.create("torch_native")
    flash = AttentionBackendFactory.create("flash")
    with torch_native, flash, torch_native:
        assert get_backend() is torch_native
    assert get_backend(use_default=False) is None
    seen = []
    with flash:
        thread = threading.Thread(target=lambda: seen.append(get_backend(use_default=False)))
        thread.start()
        thread.join()
        assert get_backend() is flash
    assert seen == [None]


def test_default_is_the_first_available(monkeypatch):
    monkeypatch.setattr(CudaBackend, "available", classmethod(lambda cls: False))
    monkeypatch.setattr(FlashAttnBackend, "available", classmethod(lambda cls: False))
    assert isinstance(get_backend(), TorchNativeBackend)
    monkeypatch.setattr(FlashAttnBackend, "available", classmethod(lambda cls: True))
    assert isinstance(get_backend(), FlashAttnBackend)
    monkeypatch.setattr(CudaBackend, "available", classmethod(lambda cls: True))
    assert isinstance(get_backend(), CudaBackend)
    monkeypatch.setenv("ASTR_OPS", "profile=reference")
    assert isinstance(get_backend(), TorchNativeBackend)


def test_argument_over_context_over_environment(call, kernels, monkeypatch):
    monkeypatch.setenv("ASTR_BACKEND", "torch_native")
    found = resolve("attention", *call)
    assert (found.record.name, found.origin) == ("torch_native", "env")
    monkeypatch.setenv("ASTR_OPS", "attention=cuda")
    assert resolve("attention", *call).record.name == "cuda"
    with attn_backend("torch_native"):
        found = resolve("attention", *call)
        assert (found.record.name, found.origin) == ("torch_native", "context")
        found = resolve("attention", *call, explicit="cuda")
        assert (found.record.name, found.origin) == ("cuda", "explicit")
    monkeypatch.delenv("ASTR_OPS")
    monkeypatch.setenv("ASTR_BACKEND", "torch")
    assert resolve("attention", *call).record.name == "torch_native"
    monkeypatch.delenv("ASTR_BACKEND")
    found = resolve("attention", *call)
    assert (found.record.name, found.origin) == ("cuda", "chain")


def test_invalid_environment_name_is_ignored(call, monkeypatch):
    monkeypatch.setenv("ASTR_BACKEND", "rocket")
    with pytest.warns(RuntimeWarning, match="ASTR_BACKEND: .*got 'rocket': ignored"):
        assert resolve("attention", *call).origin in ("chain", "fallback")


@pytest.mark.parametrize("choice", ["cuda", "flash"])
def test_cpu_tensor_never_resolves_to_cuda(call, choice, monkeypatch):
    monkeypatch.setattr(CudaBackend, "available", classmethod(lambda cls: True))
    assert resolve("attention", *call).record.name == "torch_native"
    monkeypatch.setenv("ASTR_BACKEND", choice)
    assert resolve("attention", *call).record.name == "torch_native"
    assert attention(*call).device.type == "cpu"
    name = type(AttentionBackendFactory.create(choice)).__name__
    text = f"^Explicitly-set backend {name} cannot handle this attention call"
    with pytest.raises(ExplicitSelectionError, match=text):
        attention(*call, backend=choice)
    with attn_backend(choice), pytest.raises(RuntimeError, match=text):
        attention(*call)


def test_what_cuda_takes(kernels):
    def name(q, k, v, **kwargs):
        return resolve("attention", q, k, v, **kwargs).record.name

    bf16 = {"dtype": torch.bfloat16}
    for head_dim in (8, 64, 80, 128, 256):
        assert name(*qkv(1, 3, 5, 4, 2, head_dim, **bf16)) == "cuda"
    for head_dim in (4, 36, 264):
        assert name(*qkv(1, 3, 5, 4, 2, head_dim, **bf16)) == "torch_native"
    assert name(*qkv(1, 1, 5, 4, 2, 64, dtype=torch.float16)) == "cuda"
    assert name(*qkv(1, 1, 5, 4, 2, 64, dtype=torch.float32)) == "torch_native"
    q, k, v = qkv(2, 3, 5, 4, 2, 64, **bf16)
    assert name(q, k.half(), v) == "torch_native"
    keep, bias = torch.ones(2, 5, dtype=torch.bool), torch.zeros(2, 5)
    assert name(q, k, v, attn_mask=keep) == "cuda"
    assert name(q, k, v, attn_mask=bias) == "torch_native"
    assert name(q, k[:, :, :1].expand(2, 5, 3, 64), v) == "torch_native"
    q.requires_grad_()
    assert name(q, k, v) == "torch_native"
    with torch.no_grad():
        assert name(q, k, v) == "cuda"


@pytest.mark.parametrize("fwd", ["prefill", "decode"])
def test_cuda_takes_caches_of_its_dtype_or_float8(kernels, fwd):
    lens = [4, 4]
    q_lens = [1, 1] if fwd == "decode" else [2, 2]
    for contiguous, dtype, expected in [
        (True, torch.bfloat16, "cuda"),
        (False, torch.bfloat16, "cuda"),
        (True, torch.float8_e4m3fn, "cuda"),
        (True, torch.float32, "torch_native"),
    ]:
        cache, keys, values = make_cache(lens, q_lens, contiguous=contiguous)
        cache.k_buffer, cache.v_buffer = cache.k_buffer.to(dtype), cache.v_buffer.to(dtype)
        q, k, v = (x.bfloat16() for x in packed_call(cache, keys, values, q_lens, 4, 0))
        found = resolve("attention", q, k, v, cache, 0, None, True, fwd)
        assert found.record.name == expected, (contiguous, dtype)


def test_supports_call():
    q, k, v = qkv(1, 3, 5, 4, 2, 64)
    assert AttentionBackendFactory.create("torch_native").supports_call(q)
    assert not AttentionBackendFactory.create("cuda").supports_call(q, k=k, v=v)
    assert not AttentionBackendFactory.create("flash").supports_call(q, None, None, True, None)
    assert not TorchNativeBackend.supports_graph()


class Doubling(AttentionBackend):
    """A backend with the signatures of the documentation and no more."""

    calls = 0

    def supports_call(self, q, kv_cache=None, attn_mask=None, is_causal=False, fwd=None):
        return kv_cache is None and attn_mask is None

    def forward(self, q, k, v, kv_cache, layer_id, attn_mask, is_causal, fwd):
        self._check_fwd(fwd)
        Doubling.calls += 1
        return q * 2


def test_backend_of_ones_own(call, monkeypatch):
    q, k, v = call
    backend = Doubling()
    with attn_backend(backend) as yielded:
        assert yielded is backend
        assert torch.equal(attention(q, k, v), q * 2)
        with pytest.raises(
            ExplicitSelectionError, match=r"Explicitly-set backend Doubling .*needs"
        ):
            attention(q, k, v, attn_mask=torch.ones(1, 5, dtype=torch.bool))
    assert torch.equal(attention(q, k, v, backend=Doubling), q * 2)
    with backend:
        assert get_backend() is backend
    AttentionBackendFactory.register("doubling")(Doubling)
    try:
        assert "doubling" in AttentionBackendFactory.list_registered()
        monkeypatch.setenv("ASTR_BACKEND", "doubling")
        assert torch.equal(attention(q, k, v), q * 2)
        assert "doubling: MATCH" in explain("attention", q, k, v)
        monkeypatch.delenv("ASTR_BACKEND")
        assert resolve("attention", q, k, v).record.name == "doubling"  # before the fallback
    finally:
        AttentionBackendFactory.unregister("doubling")
        Doubling.name = ""
    assert resolve("attention", q, k, v).record.name == "torch_native"


class Windowed(AttentionBackend):
    """Takes one of the keyword-only arguments."""

    def forward(self, q, k, v, kv_cache, layer_id, attn_mask, is_causal, fwd, *, window=(-1, -1)):
        return q * window[0]


class Anything(AttentionBackend):
    def forward(self, q, k, v, kv_cache, layer_id, attn_mask, is_causal, fwd, **features):
        return q * len(features)


FEATURES = {
    "scale": 0.5,
    "return_lse": True,
    "window": (3, 0),
    "softcap": 2.0,
    "sinks": torch.zeros(4),
}


def test_backend_gets_no_feature_that_its_forward_does_not_take(call):
    q = call[0]
    for name, value in FEATURES.items():
        with pytest.raises(ExplicitSelectionError, match=f"Doubling.forward takes no {name}$"):
            attention(*call, backend=Doubling, **{name: value})
    both = {"softcap": 2.0, "window": (3, 0)}
    with pytest.raises(ExplicitSelectionError, match=r"takes no window and no softcap$"):
        attention(*call, backend=Doubling, **both)
    with pytest.raises(ExplicitSelectionError, match=r"takes no softcap$"):
        attention(*call, backend=Windowed, **both)
    assert torch.equal(attention(*call, backend=Windowed, window=(3, 0)), q * 3)
    assert torch.equal(attention(*call, backend=Anything, **FEATURES), q * 5)
    # What is not used does not reach it.
    plain = {"scale": None, "return_lse": False, "window": [-1, -1], "softcap": 0.0, "sinks": None}
    assert torch.equal(attention(*call, backend=Doubling, **plain), q * 2)
    assert torch.equal(attention(*call, backend=Anything, **plain), q * 0)


def test_soft_choice_passes_over_a_backend_that_lacks_the_feature(call, monkeypatch):
    AttentionBackendFactory.register("doubling")(Doubling)
    monkeypatch.setenv("ASTR_BACKEND", "doubling")
    try:
        assert resolve("attention", *call).record.name == "doubling"
        for name, value in FEATURES.items():
            assert resolve("attention", *call, **{name: value}).record.name == "torch_native"
            text = explain("attention", *call, **{name: value})
            assert f"doubling: reject (Doubling.forward takes no {name})" in text
    finally:
        AttentionBackendFactory.unregister("doubling")
        Doubling.name = ""


def test_backend_must_implement_forward():
    class Nothing(AttentionBackend):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Nothing()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"fwd": "train"}, ValueError, "unsupported attention forward mode: 'train'"),
        ({"q": [1.0]}, TypeError, "q must be a torch.Tensor, got list"),
        ({"k": None}, TypeError, "k must be a torch.Tensor, got NoneType"),
        ({"q": torch.ones(3, 64)}, ShapeError, r"q must be 3D \(packed\) or 4D \(dense\)"),
        ({"k": torch.ones(5, 2, 64)}, ShapeError, "k and v must have q's rank 4"),
        ({"q": torch.ones(1, 3, 4, 64)}, TypeError, "one floating dtype"),
        ({"attn_mask": torch.ones(2, 5, dtype=torch.bool)}, ShapeError, "mask batch must be 1"),
        ({"attn_mask": torch.ones(1, 6, dtype=torch.bool)}, ShapeError, "last dim must be kv_len"),
        ({"attn_mask": torch.ones(1, 5, dtype=torch.int8)}, TypeError, "mask must be bool"),
        ({"attn_mask": [[True]]}, TypeError, "attn_mask must be a torch.Tensor or None, got list"),
        ({"scale": float("nan")}, ShapeError, "scale must be finite, got nan"),
    ],
)
def test_bad_calls(call, change, error, message):
    arguments = {**dict(zip("qkv", call, strict=True)), **change}
    with pytest.raises(error, match=message):
        attention(**arguments)


def test_packed_call_needs_its_cache_and_mode():
    cache, keys, values = make_cache([5], [1])
    q, k, v = packed_call(cache, keys, values, [1], 4, 0)
    with pytest.raises(ValueError, match="packed attention requires KV cache metadata"):
        attention(q, k, v, fwd="decode")
    with pytest.raises(ValueError, match="fwd must be 'prefill' or 'decode' with kv_cache"):
        attention(q, k, v, cache)
    with pytest.raises(ShapeError, match=r"q must be 3D .* with kv_cache"):
        attention(q[None], k[None], v[None], cache, fwd="decode")


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 11), r"attn_mask last dim must be at least kv_len 12, got shape \(2, 11\)"),
        ((3, 48), r"attn_mask batch must be 2 or 1, got shape \(3, 48\)"),
        ((2, 2, 48), r"attn_mask rows must be 1 or at least q_len 3, got shape \(2, 2, 48\)"),
        ((48,), r"attn_mask must be 2D, 3D or 4D in packed calls, got shape \(48,\)"),
        ((2, 3, 3, 48), r"attn_mask heads must be 4 or 1, got shape \(2, 3, 3, 48\)"),
    ],
)
@pytest.mark.parametrize("backend", ["cuda", "torch_native"])
def test_mask_that_does_not_fit_a_packed_call(kernels, backend, shape, message):
    cache, keys, values = make_cache([9, 12], [2, 3])
    cache.k_buffer, cache.v_buffer = cache.k_buffer.bfloat16(), cache.v_buffer.bfloat16()
    q, k, v = (x.bfloat16() for x in packed_call(cache, keys, values, [2, 3], 4, layer=0))
    mask = torch.ones(shape, dtype=torch.bool)
    with pytest.raises(ShapeError, match=f"attention: {message}"):
        attention(q, k, v, cache, 0, mask, True, "prefill", backend)


def test_explain_names_the_reasons(call, kernels):
    q, k, v = qkv(1, 3, 5, 4, 2, 36, dtype=torch.float32)
    text = explain("attention", q, k, v)
    assert "cuda: reject (needs dtype in {bfloat16, float16}, got float32" in text
    assert "needs head_dim a multiple of 8 up to 256" in text
    assert text.endswith("=> torch_native (origin=fallback)")
    assert explain("attention", *call).endswith("=> cuda (origin=chain)")
