"""FlashAttnBackend over stand-ins of both libraries: what it passes on, refuses and returns."""

import math
import sys

import pytest
import torch

from astrai.extension import (
    AttentionBackendFactory,
    ExplicitSelectionError,
    FlashAttnBackend,
    attention,
    explain,
    resolve,
)
from astrai.extension.backend import attention_base, attention_flash, flash_libraries
from astrai.extension.backend.reference import attention_reference
from astrai.extension.dispatch import get_family
from tests.python.backend import fake_flash
from tests.python.backend.attention_cases import make_cache as contiguous_cache
from tests.python.backend.attention_cases import packed_call as new_tokens
from tests.python.backend.attention_cases import packed_expected, qkv, randn, relative_error
from tests.python.backend.packed_cases import Case

BF16 = {"dtype": torch.bfloat16}
REAL_ERROR_ON = flash_libraries.FlashLibrary.error_on
MODULES = {"flash_attn": fake_flash.flash_attn_2, "flash_attn.cute": fake_flash.flash_attn_4}


class Machine:
    """What is installed, and what every tensor's device is said to be."""

    def __init__(self, monkeypatch):
        self._monkeypatch = monkeypatch
        self.capability = 90
        monkeypatch.setattr(flash_libraries.FlashLibrary, "error_on", lambda self, index: "")
        real = attention_base.attention_axes

        def on_gpu(*args, **kwargs):
            axes = real(*args, **kwargs)
            return {**axes, "device_cuda": True, "capability": self.capability}

        monkeypatch.setattr(get_family("attention"), "axes", on_gpu)
        monkeypatch.setattr(attention_flash, "attention_axes", on_gpu)
        self.install("flash_attn", "flash_attn.cute")

    def install(self, *names, **modules):
        """Exactly these; a module by name, or the stand-in."""
        for name in MODULES:
            module = MODULES[name]() if name in names else modules.get(name.replace(".", "_"))
            self._monkeypatch.setitem(sys.modules, name, module)
        libraries = flash_libraries.FlashAttn4(), flash_libraries.FlashAttn2()
        self._monkeypatch.setattr(flash_libraries, "LIBRARIES", libraries)
        fake_flash.calls.clear()


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


def called():
    return [name for name, _ in fake_flash.calls]


def close(got, want, tolerance=6e-3):
    out, lse = got
    assert out.dtype is torch.bfloat16 and lse.dtype is torch.float32 and lse.is_contiguous()
    assert out.isfinite().all() and relative_error(out, want[0]) < tolerance
    torch.testing.assert_close(lse.double(), want[1].double(), rtol=1e-4, atol=1e-4)


FEATURES = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.2},
    "window": {"window": (3, 1)},
    "left": {"window": (2, -1)},
    "right": {"window": (-1, 2)},
    "causal_by_window": {"window": (-1, 0)},
    "sliding": {"window": (4, -1), "is_causal": True},
    "causal_wins": {"window": (4, 3), "is_causal": True},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
}


@pytest.mark.parametrize("library", MODULES)
@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize(("q_len", "kv_len"), [(5, 9), (6, 6), (1, 7)])
def test_dense_call(machine, library, name, q_len, kv_len):
    machine.install(library)
    features = FEATURES[name]
    q, k, v = qkv(2, q_len, kv_len, 4, 2, 64, **BF16)
    if name == "sinks" and library == "flash_attn":
        with pytest.raises(ExplicitSelectionError, match="flash-attn 2: takes no sinks"):
            attention(q, k, v, backend="flash", **features)
        return
    want = attention_reference(q.double(), k.double(), v.double(), return_lse=True, **features)
    close(attention(q, k, v, backend="flash", return_lse=True, **features), want)
    out = attention(q, k, v, backend="flash", **features)
    assert relative_error(out, want[0]) < 6e-3
    assert set(called()) == {"func4" if library == "flash_attn.cute" else "func2"}


@pytest.mark.parametrize("library", MODULES)
def test_case_c08_rows_before_the_first_key(machine, library):
    machine.install(library)
    q, k, v = qkv(2, 7, 3, 4, 2, 64, **BF16)
    out, lse = attention(q, k, v, is_causal=True, return_lse=True, backend="flash")
    want = attention_reference(q.double(), k.double(), v.double(), None, True, None, True)
    close((out, lse), want)
    assert (out[:, :4] == 0).all() and (lse[:, :4] == -math.inf).all()
    plain = attention(q, k, v, is_causal=True, backend="flash")
    assert torch.equal(plain, out)
    if library == "flash_attn.cute":
        sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
        got = attention(q, k, v, is_causal=True, return_lse=True, sinks=sinks, backend="flash")
        wide = q.double(), k.double(), v.double(), None, True, None, True
        close(got, attention_reference(*wide, sinks=sinks))
        assert torch.equal(got[1][:, 0], sinks.expand(2, -1))


def test_head_dims_of_mla(machine):
    q, k, _ = qkv(1, 3, 5, 4, 2, 192, **BF16)
    v = randn(1, 5, 2, 128, **BF16)
    out = attention(q, k, v, backend="flash")
    assert relative_error(out, attention_reference(q.double(), k.double(), v.double())) < 6e-3
    assert called() == ["func4"]


@pytest.mark.parametrize("library", MODULES)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("page_size", [1, 16, None])
def test_packed_call_gathers_the_keys(machine, library, is_causal, page_size):
    machine.install(library)
    case = bf16_case([17, 4, 30, 1], [5, 4, 1, 1], page_size)
    close(case.run("prefill", is_causal=is_causal, backend="flash"), expected(case, is_causal))
    case.check_cache()
    assert called() == ["varlen4" if library == "flash_attn.cute" else "varlen2"]


def bf16_case(lens, q_lens, page_size, dtype=torch.bfloat16, **more):
    """A packed case whose cache has no holes."""
    return Case(lens, q_lens, page_size, dtype, torch.bfloat16, complete=True, **more)


def expected(case, is_causal, **features):
    return case.expected(is_causal=is_causal, **features)


@pytest.mark.parametrize("library", MODULES)
def test_packed_features(machine, library):
    machine.install(library)
    case = bf16_case([17, 4, 30], [5, 4, 1], 16)
    features = {"window": (6, -1), "softcap": 3.0, "scale": 0.3}
    close(
        case.run("prefill", is_causal=True, backend="flash", **features),
        expected(case, True, **features),
    )
    if library == "flash_attn.cute":
        sinks = randn(4, seed=8)
        got = case.run("prefill", is_causal=True, backend="flash", sinks=sinks)
        close(got, expected(case, True, sinks=sinks))


@pytest.mark.parametrize("library", MODULES)
@pytest.mark.parametrize(
    ("lens", "q_lens"), [([0, 3, 0, 5], [0, 1, 0, 1]), ([4, 3, 2, 5], [0, 1, 0, 1])]
)
def test_case_c03_requests_without_queries(machine, library, lens, q_lens):
    machine.install(library)
    case = bf16_case(lens, q_lens, 16, dims=(64, 64), heads=(9, 3))
    close(case.run("prefill", is_causal=True, backend="flash"), expected(case, True))
    if library == "flash_attn":
        assert fake_flash.calls[0][1]["max_seqlen_q"] == 2


@pytest.mark.parametrize("library", MODULES)
@pytest.mark.parametrize("steps", [(None, None), (0.5, torch.tensor([0.25]))])
def test_float8_cache_is_dequantised(machine, library, steps):
    machine.install(library)
    case = bf16_case([17, 4], [2, 1], 256, torch.float8_e4m3fn, steps=steps)
    close(case.run("prefill", is_causal=True, backend="flash"), expected(case, True))
    assert called() == ["varlen4" if library == "flash_attn.cute" else "varlen2"]
    assert not fake_flash.calls[0][1].get("paged", False)


@pytest.mark.parametrize("fwd", ["prefill", "decode"])
def test_flash_2_reads_large_pages_where_they_are(machine, fwd):
    machine.install("flash_attn")
    q_lens = [1, 1, 1] if fwd == "decode" else [5, 4, 1]
    case = bf16_case([300, 4, 256], q_lens, 256)
    close(case.run(fwd, is_causal=True, backend="flash"), expected(case, True))
    assert called() == ["kvcache2" if fwd == "decode" else "varlen2"]
    assert fwd == "decode" or fake_flash.calls[0][1]["paged"]


@pytest.mark.parametrize("library", MODULES)
@pytest.mark.parametrize(("max_seq", "paged"), [(256, True), (48, False)])
@pytest.mark.parametrize("fwd", ["prefill", "decode"])
def test_contiguous_cache(machine, library, max_seq, paged, fwd):
    machine.install(library)
    lens, q_lens = [20, 5, 33], [1, 1, 1] if fwd == "decode" else [3, 5, 1]
    cache, keys, values = contiguous_cache(lens, q_lens, max_seq=max_seq, rows=[2, 0, 1], **BF16)
    q, k, v = new_tokens(cache, keys, values, q_lens, 4, 1, **BF16)
    got = attention(q, k, v, cache, 1, None, True, fwd, "flash", return_lse=True)
    close(got, packed_expected(attention_reference, q, keys, values, q_lens, 1, is_causal=True))
    if library == "flash_attn" and paged:
        assert called() == ["kvcache2" if fwd == "decode" else "varlen2"]
    else:
        assert called() == ["varlen4" if library == "flash_attn.cute" else "varlen2"]


def test_packed_call_waits_for_no_device(machine, monkeypatch):
    case = bf16_case([17, 4, 30], [5, 4, 1], 16)
    seen = []

    def stand_in(q, k, v, **arguments):
        seen.append(arguments)
        return q, None

    sys.modules["flash_attn.cute"].flash_attn_varlen_func = stand_in

    def refuse(*args, **kwargs):
        raise AssertionError("a device tensor was read on the host")

    for name in ("item", "tolist", "cpu", "nonzero", "__bool__", "__int__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    attention(case.q, *case.new, case.cache, 1, None, True, "prefill", "flash")
    assert seen[0]["max_seqlen_q"] == 5 and seen[0]["max_seqlen_k"] == 30


def test_flash_4_comes_first_and_flash_2_takes_what_is_left(machine):
    q, k, v = qkv(1, 4, 6, 4, 2, 64, **BF16)
    attention(q, k, v, backend="flash")
    machine.capability = 80
    attention(q, k, v, backend="flash")
    machine.capability = 90
    odd = qkv(1, 4, 6, 4, 2, 136, **BF16)
    odd[0].requires_grad_()
    attention(*odd, backend="flash")  # flash-attn 4 is not used for gradients of such heads
    assert called() == ["func4", "func2", "func2"]


REFUSED = {
    "mask": ({"attn_mask": torch.ones(1, 6, dtype=torch.bool)}, "needs mask is None, got 'bool'"),
    "negative scale": ({"scale": -1.0}, "needs a scale above 0"),
    "window past the keys": (
        {"q_len": 8, "window": (2, 2)},
        "no more queries than keys with a window",
    ),
    "head_dim": ({"head_dim": 36}, "flash-attn 2: needs one head_dim of q, k and v"),
    "large head_dim": ({"head_dim": 264}, "flash-attn 4: needs one head_dim of q, k and v"),
    "old gpu": ({"capability": 75}, "flash-attn 2: needs compute capability 8.0 or newer, got 7.5"),
    "no keys": ({"kv_len": 0}, "needs at least one query and one key"),
    "fp32": ({"dtype": torch.float32}, "needs dtype in {bfloat16, float16}, got float32"),
    "gradient of sinks": (
        {"sinks": torch.zeros(4), "grad": True},
        "flash-attn 4: is not used for gradients of softcap or sinks; flash-attn 2: takes no sinks",
    ),
    "gradient of lse": (
        {"head_dim": 192, "grad": True, "return_lse": True},
        "flash-attn 2: has no gradient of lse",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_libraries_cannot_do_falls_to_the_next_backend(machine, name):
    given, reason = REFUSED[name]
    given = dict(given)
    machine.capability = given.pop("capability", 90)
    sizes = [given.pop("q_len", 4), given.pop("kv_len", 6), 4, 2, given.pop("head_dim", 64)]
    q, k, v = qkv(1, *sizes, dtype=given.pop("dtype", torch.bfloat16))
    q.requires_grad_(given.pop("grad", False))
    text = explain("attention", q, k, v, **given)
    assert f"flash: reject ({reason}" in text or reason in text.split("flash: reject (")[1], text
    assert text.endswith("=> torch_native (origin=fallback)")
    attention(q, k, v, **given)
    assert called() == []
    with pytest.raises(ExplicitSelectionError):
        attention(q, k, v, backend="flash", **given)


def test_cache_that_may_have_holes_is_refused(machine):
    case = bf16_case([17, 4], [2, 1], 16)
    call = (case.q, *case.new, case.cache, 1, None, True, "prefill")
    assert resolve("attention", *call).record.name == "flash"
    del case.cache.complete
    assert resolve("attention", *call).record.name == "torch_native"
    assert "needs a KV cache that is known to have no holes" in explain("attention", *call)


def test_cache_that_does_not_count_the_new_tokens_is_an_error(machine):
    case = bf16_case([3, 4], [2, 1], 16)
    case.cache.lens[0] = 1
    with pytest.raises(ValueError, match=r"must count the call's own tokens, got 1 .* of 2 tokens"):
        case.run("prefill", is_causal=True, backend="flash")


def test_called_directly_it_says_why_not(machine):
    flash = AttentionBackendFactory.create("flash")
    q, k, v = qkv(1, 4, 6, 4, 2, 64, **BF16)
    for shape in ((1, 6), (1, 4, 6), (1, 1, 4, 6)):
        with pytest.raises(ValueError, match="custom attention mask"):
            flash.forward(q, k, v, None, 0, torch.ones(shape, dtype=torch.bool), True, None)
    machine.install("flash_attn")
    message = r"flash cannot take this call: flash-attn 4: Module.*; flash-attn 2: takes no sinks"
    with pytest.raises(ValueError, match=message):
        flash.forward(q, k, v, None, 0, None, True, None, sinks=torch.zeros(4))


def test_nothing_installed(machine):
    machine.install()
    assert not FlashAttnBackend.available()
    text = FlashAttnBackend.why_unavailable()
    assert text.startswith("flash-attn 4: ModuleNotFoundError: ") and "; flash-attn 2: Mod" in text
    q, k, v = qkv(1, 4, 6, 4, 2, 64, **BF16)
    assert resolve("attention", q, k, v).record.name == "torch_native"
    assert "flash: SKIP (not available on this machine: " in explain("attention", q, k, v)


def test_one_reason_of_both_libraries_is_given_once(machine):
    machine.install()
    for library in flash_libraries.LIBRARIES:
        library._error = "ModuleNotFoundError: No module named 'flash_attn'"
    assert FlashAttnBackend.why_unavailable() == "ModuleNotFoundError: No module named 'flash_attn'"


@pytest.mark.parametrize("version", ["2.6.3", "1.0", "3.0.0", "vendored"])
def test_other_versions_are_refused(machine, version):
    machine.install(flash_attn=fake_flash.flash_attn_2(version))
    assert not FlashAttnBackend.available()
    assert f"flash-attn 2: needs version 2.7 or a later 2.x, got {version}" in (
        FlashAttnBackend.why_unavailable()
    )


@pytest.mark.parametrize("version", ["2.7.0", "2.8.3.post1+cu12"])
def test_versions_that_are_taken(machine, version):
    machine.install(flash_attn=fake_flash.flash_attn_2(version))
    assert FlashAttnBackend.available() and FlashAttnBackend.why_unavailable() == ""


def test_library_that_does_not_run_on_the_device_is_passed_over(machine, monkeypatch):
    machine.install("flash_attn", "flash_attn.cute")
    tried = []

    def no_kernel(*args, **kwargs):
        tried.append(args)
        raise RuntimeError("no kernel image is available\nand more")

    sys.modules["flash_attn.cute"].flash_attn_func = no_kernel
    monkeypatch.setattr(flash_libraries.FlashLibrary, "error_on", REAL_ERROR_ON)
    zeros = torch.zeros
    on_cpu = lambda *shape, **kwargs: zeros(*shape, **{**kwargs, "device": "cpu"})  # noqa: E731
    monkeypatch.setattr(torch, "zeros", on_cpu)
    q, k, v = qkv(1, 4, 6, 4, 2, 64, **BF16)
    for _ in range(2):
        attention(q, k, v, backend="flash")
    assert set(called()) == {"func2"} and len(tried) == 1
    with pytest.raises(ExplicitSelectionError) as error:
        attention(q, k, v, sinks=zeros(4), backend="flash")
    wanted = "flash-attn 4: does not run here: RuntimeError: no kernel image is available; flash"
    assert wanted in str(error.value)


def test_installed_libraries_are_not_imported_for_cpu_tensors(monkeypatch):
    def refuse(self):
        raise AssertionError("imported")

    monkeypatch.setattr(flash_libraries.FlashLibrary, "error", refuse)
    q, k, v = qkv(1, 4, 6, 4, 2, 64, **BF16)
    assert resolve("attention", q, k, v).record.name == "torch_native"
    attention(q, k, v)
