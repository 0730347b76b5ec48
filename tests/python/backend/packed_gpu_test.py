"""Packed calls on a GPU, by the cuda and the torch backend, against a loop over single queries."""

import math

import pytest
import torch

from astrai.extension import attention, resolve
from tests.python.backend.attention_cases import randn, relative_error
from tests.python.backend.packed_cases import MASKS, Case

LENS, Q_LENS = [70, 9, 33, 128, 12], [5, 9, 0, 40, 1]
BACKENDS = ("cuda", "torch_native")
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
FEATURES = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"window": (20, 3)},
    "sliding": {"window": (16, -1), "is_causal": True, "scale": 0.2},
    "softcap": {"softcap": 2.0, "is_causal": True},
    "sinks": {"sinks": SINKS, "is_causal": True},
}


def bf16(lens, q_lens, page_size, dims=(64, 64), dtype=torch.bfloat16, **more):
    return Case(lens, q_lens, page_size, dtype, torch.bfloat16, dims, device="cuda", **more)


def check(case, fwd, backend, mask=None, **features):
    on_gpu = {k: x.cuda() if isinstance(x, torch.Tensor) else x for k, x in features.items()}
    if mask is not None:
        mask = mask.cuda()
    call = (case.q, *case.new, case.cache, 1, mask)
    assert resolve("attention", *call, fwd=fwd, explicit=backend, **on_gpu).record.name == backend
    got, got_lse = case.run(fwd, mask, backend=backend, **on_gpu)
    out, lse = case.expected(mask, **features)
    got, got_lse = got.cpu(), got_lse.cpu()
    assert got.dtype is torch.bfloat16 and got.isfinite().all()
    assert relative_error(got, out) < 6e-3
    blind = lse == -math.inf
    assert torch.equal(got_lse == -math.inf, blind) and (got[blind] == 0).all()
    torch.testing.assert_close(got_lse[~blind].double(), lse[~blind], rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("page_size", [None, 1, 16])
def test_features(backend, name, page_size):
    check(bf16(LENS, Q_LENS, page_size), "prefill", backend, **FEATURES[name])
    check(bf16([70, 9, 33], [1, 1, 1], page_size), "decode", backend, **FEATURES[name])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["2d", "3d", "4d", "4d_row"])
def test_masks(backend, kind):
    mask = MASKS[kind](len(LENS), max(Q_LENS), max(LENS))
    check(bf16(LENS, Q_LENS, 16), "prefill", backend, mask, is_causal=True)
    mask = MASKS[kind](3, 1, 70)
    check(bf16([70, 9, 33], [1, 1, 1], 16), "decode", backend, mask, is_causal=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (80, 80)])
@pytest.mark.parametrize("page_size", [None, 32])
def test_case_d12_negative_entries_are_skipped(backend, dims, page_size):
    holes = [(0, 0), (3, 1)]
    check(bf16(LENS, Q_LENS, page_size, dims, holes=holes), "prefill", backend, is_causal=True)
    case = bf16([70, 9, 33, 64], [1, 1, 1, 1], page_size, dims, holes=holes)
    check(case, "decode", backend, is_causal=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("page_size", [None, 16])
def test_float8_cache(backend, on_device, page_size):
    steps = (torch.tensor([0.3]), torch.tensor([0.02])) if on_device else (0.3, 0.02)
    case = bf16(LENS, Q_LENS, page_size, dtype=torch.float8_e4m3fn, steps=steps)
    check(case, "prefill", backend, is_causal=True)
    case = bf16([70, 9, 33], [1, 1, 1], page_size, dtype=torch.float8_e4m3fn, steps=steps)
    check(case, "decode", backend, is_causal=True, softcap=5.0)


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("return_lse", [True, False])
def test_torch_waits_for_no_device(page_size, return_lse):
    case = bf16(LENS, Q_LENS, page_size, holes=[(0, 0)])
    mask = (randn(len(LENS), max(Q_LENS), max(LENS)) > -0.8).cuda()
    call = (case.q, *case.new, case.cache, 1, mask, True, "prefill", "torch_native")
    attention(*call, return_lse=return_lse)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        attention(*call, return_lse=return_lse)
    finally:
        torch.cuda.set_sync_debug_mode("default")
