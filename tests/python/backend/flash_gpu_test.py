"""FlashAttnBackend with the libraries themselves, each on its own, against the torch reference."""

import math

import pytest
import torch

from astrai.extension import attention, resolve
from astrai.extension.backend import flash_libraries
from astrai.extension.backend.reference import attention_reference
from tests.python.backend.attention_cases import (
    make_cache,
    packed_call,
    packed_expected,
    qkv,
    randn,
    relative_error,
)
from tests.python.backend.packed_cases import Case

BF16 = {"dtype": torch.bfloat16, "device": "cuda"}
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 8e-4}
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
FEATURES = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.2},
    "window": {"window": (33, 17)},
    "left": {"window": (20, -1)},
    "right": {"window": (-1, 20)},
    "sliding": {"window": (40, -1), "is_causal": True},
    "softcap": {"softcap": 2.0, "is_causal": True},
    "sinks": {"sinks": SINKS, "is_causal": True},
    "all": {"sinks": SINKS, "is_causal": True, "window": (40, -1), "softcap": 5.0, "scale": 0.2},
}


@pytest.fixture(params=flash_libraries.LIBRARIES, ids=lambda library: library.title)
def library(request, monkeypatch):
    """One library alone behind the backend."""
    error = request.param.error() or request.param.error_on(torch.cuda.current_device())
    if error:
        pytest.skip(f"{request.param.title}: {error}")
    monkeypatch.setattr(flash_libraries, "LIBRARIES", (request.param,))
    return request.param


def features_of(name, library):
    features = FEATURES[name]
    if "sinks" in features and library.title == "flash-attn 2":
        pytest.skip("flash-attn 2 takes no sinks; flash_test.py checks the refusal")
    return features, {k: x.cuda() if k == "sinks" else x for k, x in features.items()}


def check(got, want, dtype=torch.bfloat16):
    out, lse = (x.cpu() for x in got)
    want_out, want_lse = (x.cpu() for x in want)
    assert out.dtype is dtype and lse.dtype is torch.float32 and out.isfinite().all()
    assert relative_error(out, want_out) < TOLERANCE[dtype]
    blind = want_lse == -math.inf
    assert torch.equal(lse == -math.inf, blind) and (out[blind] == 0).all()
    torch.testing.assert_close(lse[~blind].double(), want_lse[~blind], rtol=1e-4, atol=2e-3)


def dense(q, k, v, **features):
    """The same call by the backend and by the reference."""
    assert resolve("attention", q, k, v, explicit="flash", **features).record.name == "flash"
    got = attention(q, k, v, backend="flash", return_lse=True, **features)
    plain = attention(q, k, v, backend="flash", **features)
    assert relative_error(plain, got[0]) < TOLERANCE[q.dtype]
    wide = (q.double(), k.double(), v.double())
    return got, attention_reference(*wide, return_lse=True, **features)


# flash-attn 4 compiles a kernel for each dtype, head_dim, group and set of features, which takes
# seconds: each is tried with one of the others.
@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 150), (77, 77), (40, 200)])
def test_dense_features(library, name, q_len, kv_len):
    _, features = features_of(name, library)
    check(*dense(*qkv(2, q_len, kv_len, 4, 2, 64, **BF16), **features))


def test_fp16(library):
    q, k, v = qkv(2, 40, 200, 4, 2, 64, dtype=torch.float16, device="cuda")
    check(*dense(q, k, v, is_causal=True), torch.float16)


@pytest.mark.parametrize(
    ("dims", "q_heads", "kv_heads"),
    [
        ((64, 64), 4, 4),
        ((72, 72), 9, 3),
        ((96, 96), 8, 1),
        ((128, 128), 9, 3),
        ((192, 128), 8, 2),
        ((256, 256), 4, 2),
    ],
)
def test_head_dims_and_groups(library, dims, q_heads, kv_heads):
    q, k, _ = qkv(2, 50, 90, q_heads, kv_heads, dims[0], **BF16)
    v = randn(2, 90, kv_heads, dims[1], seed=3, **BF16)
    if dims[0] != dims[1] and library.title == "flash-attn 2":
        pytest.skip("flash-attn 2 takes one head_dim; flash_test.py checks the refusal")
    check(*dense(q, k, v, is_causal=True))


@pytest.mark.parametrize(("q_len", "kv_len"), [(3, 128), (128, 3), (1, 1), (5, 5), (65, 64)])
def test_case_c08_causal_is_bottom_right(library, q_len, kv_len):
    check(*dense(*qkv(1, q_len, kv_len, 4, 2, 64, **BF16), is_causal=True))


def test_strides(library):
    fused = torch.randn(2, 40, 8, 64, **BF16)
    check(*dense(fused[:, :, :4], fused[:, :, 4:6], fused[:, :, 6:], is_causal=True))
    turned = [
        x.transpose(1, 3).contiguous().transpose(1, 3) for x in qkv(1, 9, 20, 4, 2, 64, **BF16)
    ]
    check(*dense(*turned))


@pytest.mark.parametrize("features", [{"is_causal": True}, {"window": (9, -1), "is_causal": True}])
def test_gradients(library, features):
    q, k, v = (x.requires_grad_() for x in qkv(2, 33, 60, 4, 2, 64, **BF16))
    weight = randn(2, 33, 4, 64, seed=7, **BF16)
    out = attention(q, k, v, backend="flash", **features)
    got = torch.autograd.grad((out * weight).float().sum(), (q, k, v))
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    want = torch.autograd.grad((attention_reference(*wide, **features) * weight).sum(), wide)
    for a, b in zip(got, want, strict=True):
        assert relative_error(a, b) < 2e-2


PACKED = [
    ([70, 9, 33, 128], [5, 9, 0, 40]),
    ([300, 4, 256], [1, 1, 1]),
    ([0, 3, 0, 5], [0, 1, 0, 1]),
]


@pytest.mark.parametrize("page_size", [None, 1, 16, 256])
@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize(("lens", "q_lens"), PACKED)
def test_packed_features(library, name, lens, q_lens, page_size):
    plain, features = features_of(name, library)
    case = Case(
        lens,
        q_lens,
        page_size,
        torch.bfloat16,
        torch.bfloat16,
        (64, 64),
        complete=True,
        device="cuda",
    )
    fwd = "decode" if set(q_lens) == {1} else "prefill"
    check(case.run(fwd, backend="flash", **features), case.expected(**plain))
    case.check_cache()


@pytest.mark.parametrize("page_size", [None, 16, 256])
def test_float8_cache_is_dequantised(library, page_size):
    case = Case(
        [70, 9, 128],
        [5, 9, 1],
        page_size,
        torch.float8_e4m3fn,
        torch.bfloat16,
        (64, 64),
        complete=True,
        steps=(0.3, torch.tensor([0.02])),
        device="cuda",
    )
    check(case.run(is_causal=True, backend="flash"), case.expected(is_causal=True))


@pytest.mark.parametrize("max_seq", [256, 200])
@pytest.mark.parametrize("q_lens", [[1, 1, 1], [30, 5, 1]])
def test_contiguous_cache(library, max_seq, q_lens):
    cache, keys, values = make_cache([90, 5, 130], q_lens, max_seq=max_seq, rows=[2, 0, 1], **BF16)
    q, k, v = packed_call(cache, keys, values, q_lens, 4, 1, **BF16)
    fwd = "decode" if set(q_lens) == {1} else "prefill"
    got = attention(q, k, v, cache, 1, None, True, fwd, "flash", return_lse=True)
    check(got, packed_expected(attention_reference, q, keys, values, q_lens, 1, is_causal=True))
