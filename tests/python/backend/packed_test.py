"""Packed calls of the torch backend against a loop over single queries in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from astrai.extension import attention
from astrai.extension.ops import reference
from astrai.extension.ops.reference import Features
from astrai.extension.ops.reference import dense as reference_dense
from astrai.extension.ops.reference import packed as reference_packed
from tests.python.backend.attention_cases import randn, relative_error
from tests.python.backend.packed_cases import MASKS, Case, bits


@settings(max_examples=80, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), min_size=1, max_size=5),
    page_size=st.sampled_from([None, 1, 2, 4]),
    dims=st.sampled_from([(8, 8), (8, 5)]),
    with_holes=st.booleans(),
    host=st.booleans(),
    kind=st.sampled_from(sorted(MASKS)),
    is_causal=st.booleans(),
    window=st.tuples(st.integers(-1, 4), st.integers(-1, 4)),
    softcap=st.sampled_from([0.0, 1.5]),
    with_sinks=st.booleans(),
)
def test_packed_call_is_a_loop_over_its_queries(
    sizes, page_size, dims, with_holes, host, kind, is_causal, window, softcap, with_sinks
):
    lens, q_lens = [past + new for new, past in sizes], [new for new, _ in sizes]
    holes = []
    if with_holes:
        # Only where no new token goes: those are written to slots that exist.
        holes = [(b, 0) for b, (_, past) in enumerate(sizes) if past >= (page_size or 1)]
    case = Case(lens, q_lens, page_size, dims=dims, holes=holes, host=host)
    mask = MASKS[kind] and MASKS[kind](len(lens), max(1, *q_lens), max(1, *lens))
    sinks = randn(4, seed=3) if with_sinks else None
    case.check("prefill", mask, is_causal=is_causal, window=window, softcap=softcap, sinks=sinks)


@pytest.mark.parametrize("page_size", [None, 4])
@pytest.mark.parametrize("steps", [(None, None), (0.5, 0.25), (torch.tensor([0.3]), 0.02)])
def test_float8_cache_is_dequantised(page_size, steps):
    case = Case([7, 3, 5], [2, 3, 1], page_size, torch.float8_e4m3fn, holes=[(0, 0)], steps=steps)
    case.check(is_causal=True)
    case.check(is_causal=True, softcap=2.0)


@pytest.mark.parametrize("lens", [[9, 9, 9], [1, 12, 5], [4]])
@pytest.mark.parametrize("page_size", [None, 1, 4])
def test_decode(lens, page_size):
    Case(lens, [1] * len(lens), page_size).check("decode", is_causal=True)


def test_case_c03_requests_without_queries_keep_their_place():
    lens, q_lens = [0, 3, 0, 5], [0, 1, 0, 1]
    case = Case(lens, q_lens, 2, torch.bfloat16, torch.bfloat16, (64, 64), heads=(9, 3))
    got, want = case.run(is_causal=True), case.expected(is_causal=True)
    assert got[0].dtype is torch.bfloat16 and relative_error(got[0], want[0]) < 3e-3
    torch.testing.assert_close(got[1].double(), want[1], rtol=1e-5, atol=1e-5)
    Case([6, 3, 7, 5], q_lens, 2).check(is_causal=True)


@pytest.mark.parametrize("requests", [0, 2])
@pytest.mark.parametrize("host", [True, False])
def test_case_c02_packed_call_without_tokens(requests, host):
    case = Case([3] * requests, [0] * requests, 4, dims=(8, 5), host=host)
    out, lse = case.run(is_causal=True)
    assert out.shape == (0, 4, 5) and lse.shape == (0, 4) and lse.dtype is torch.float32
    plain = attention(case.q, *case.new, case.cache, 1, None, True, "prefill")
    assert plain.shape == (0, 4, 5) and plain.dtype is case.q.dtype


@pytest.mark.parametrize("page_size", [None, 4])
@pytest.mark.parametrize("return_lse", [True, False])
def test_nothing_waits_for_the_device(page_size, return_lse, monkeypatch):
    case = Case([7, 3, 5], [2, 3, 1], page_size, holes=[(0, 0)])
    mask = MASKS["4d"](3, 3, 7)

    def refuse(*args, **kwargs):
        raise AssertionError("a device tensor was read on the host")

    for name in ("item", "tolist", "cpu", "nonzero", "__bool__", "__int__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    attention(case.q, *case.new, case.cache, 1, mask, True, "prefill", return_lse=return_lse)


@pytest.mark.parametrize("limit", [1, 100, 400, 2000])
@pytest.mark.parametrize("few", [0, 1 << 20])
def test_results_do_not_depend_on_how_much_is_computed_at_a_time(limit, few, monkeypatch):
    lens, q_lens = [9, 2, 2, 30, 7, 7, 7], [4, 1, 1, 9, 7, 0, 2]
    case = Case(lens, q_lens, 4, holes=[(3, 1)])
    mask = MASKS["4d"](7, 9, 30)
    monkeypatch.setattr(reference_dense, "MAX_ELEMENTS", limit)
    monkeypatch.setattr(reference_packed, "MAX_ELEMENTS", limit)
    monkeypatch.setattr(reference_packed, "FEW_ELEMENTS", few)
    case.check(is_causal=True)
    case.check("prefill", mask, is_causal=True, window=(11, -1))


def test_runs_are_bounded_and_mostly_full(monkeypatch):
    def runs(sizes, limit, few=0):
        monkeypatch.setattr(reference_packed, "MAX_ELEMENTS", limit)
        return list(reference_packed._runs(sizes, q_heads=4, width=32, few=few))

    assert runs([], 1000) == []
    assert runs([(1, 10)] * 6, 1 << 20) == [(0, 6)]
    # One key takes 1 * 4 scores and 32 numbers of K and V: 360 elements a request.
    assert runs([(1, 10)] * 6, 800) == [(0, 2), (2, 4), (4, 6)]
    assert runs([(1, 90), (1, 100), (1, 100)], 1 << 20) == [(0, 3)]
    assert runs([(1, 1), (1, 100), (1, 100)], 1 << 20) == [(0, 1), (1, 3)]
    assert runs([(1, 1)] * 9 + [(1, 1000)], 1 << 20) == [(0, 9), (9, 10)]
    assert runs([(1, 1)] * 9 + [(1, 1000)], 1 << 20, few=1 << 20) == [(0, 10)]
    assert runs([(512, 512), (1, 512), (1, 512)], 1 << 30) == [(0, 1), (1, 3)]


def test_gradients_do_not_depend_on_how_much_is_computed_at_a_time(monkeypatch):
    q, k, v = (
        randn(1, n, h, 4, dtype=torch.float64, seed=i).requires_grad_()
        for i, (n, h) in enumerate([(5, 2), (4, 1), (4, 1)])
    )
    mask = randn(1, 1, 5, 4, seed=4) > 0
    want = reference.attention(q, k, v, mask, Features(is_causal=True))
    monkeypatch.setattr(reference_dense, "MAX_ELEMENTS", 17)
    got = reference.attention(q, k, v, mask, Features(is_causal=True))
    torch.testing.assert_close(got, want)
    assert torch.autograd.gradcheck(
        lambda *x: reference.attention(*x, mask, Features(is_causal=True))[0], (q, k, v)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(8,), (2, 4)])
@pytest.mark.parametrize("slots", [[3, 0, 7], [-1, 5, 8], [-1, 9, -5], [2, -1, 3], []], ids=str)
def test_store_passes_over_slots_that_are_none(dtype, shape, slots):
    cache = randn(*shape, 2, 3).to(dtype)
    before = bits(cache).clone()
    rows = randn(len(slots), 2, 3, seed=1)
    reference.store(cache, torch.tensor(slots, dtype=torch.int64), rows, None)
    want = before.view(-1, 2, 3)
    for slot, row in zip(slots, rows, strict=True):
        if 0 <= slot < 8:
            want[slot] = bits(row.to(dtype))
    assert torch.equal(bits(cache).view(-1, 2, 3), want)


def test_new_tokens_without_a_slot_are_not_written():
    case = Case([5, 4], [2, 1], None)
    case.cache.out_cache_loc[1] = -1
    case.cache.req_to_token[case.cache.req_pool_indices[0], 4] = -1
    case.present[0][4] = False
    last = case.cache.k_buffer[1, -1].clone()
    case.check(is_causal=True)
    torch.testing.assert_close(case.cache.k_buffer[1, -1], last, equal_nan=True, rtol=0, atol=0)


def test_table_that_is_too_narrow_for_a_length():
    case = Case([5, 4], [2, 1], 4)
    case.cache.block_table = case.cache.block_table[:, :1]
    with pytest.raises(ValueError, match=r"table has room for 4 tokens of a request, got .* 5"):
        case.run()
