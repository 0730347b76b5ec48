"""Packed calls of the torch backend against a loop over single queries in float64.

What is no key of a request holds NaN, and what the tables hold there would fault if it was used.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from astrai.extension import attention
from astrai.extension.ops import reference
from astrai.extension.ops.reference import Features
from astrai.extension.ops.reference import dense as reference_dense
from astrai.extension.ops.reference import packed as reference_packed
from tests.python.backend.attention_cases import randn

GARBAGE = 2**30


def one_query(q, keys, values, mask_row, diagonal, features, sink):
    """One query [D] on keys [L, D] and values [L, Dv]; mask_row is bool, floating or None."""
    left, right = features.window
    out, total = torch.zeros(values.shape[1], dtype=torch.float64), 0.0
    for j in range(len(keys)):
        seen = not features.is_causal or j <= diagonal
        seen &= left < 0 or j >= diagonal - left
        seen &= right < 0 or j <= diagonal + right
        score = float(q @ keys[j]) * features.scale
        if features.softcap > 0:
            score = features.softcap * math.tanh(score / features.softcap)
        if mask_row is not None and mask_row.dtype is torch.bool:
            seen &= bool(mask_row[j])
        elif mask_row is not None:
            score += float(mask_row[j])
        if seen:
            total += math.exp(score)
            out += math.exp(score) * values[j]
    total += 0.0 if sink is None else math.exp(sink)
    return (out / total, math.log(total)) if total else (out, -math.inf)


class Case:
    """A cache before a call, the call, and what it must give."""

    def __init__(
        self,
        lens,
        q_lens,
        page_size,
        dtype=torch.float32,
        dims=(8, 8),
        holes=(),
        host=True,
        steps=None,
    ):
        """``page_size`` None: a token table. ``holes``: (request, entry of its table)."""
        self.lens, self.q_lens, self.dtype = lens, q_lens, dtype
        self.q_heads, self.kv_heads = 4, 2
        self.steps = steps or (None, None)
        batch, size = len(lens), page_size or 1
        width = max([1, *(-(-n // size) for n in lens)]) + 2
        order = torch.randperm(batch * width + 3, generator=torch.Generator().manual_seed(5))
        pages = order[: batch * width].view(batch, width)
        self.slots = (pages[:, :, None] * size + torch.arange(size)).flatten(1)
        table = pages.int().clone()
        for b, n in enumerate(lens):
            table[b, -(-n // size) :] = GARBAGE
        self.present = [torch.ones(n, dtype=torch.bool) for n in lens]
        for b, entry in holes:
            table[b, entry] = -1
            self.present[b][entry * size : (entry + 1) * size] = False
        tokens = sum(q_lens)
        shape = (2, len(order) * size) if size == 1 else (2, len(order), size)
        buffers, self.content, self.new = [], [], []
        for i, dim in enumerate(dims):
            held = torch.full((*shape, self.kv_heads, dim), math.nan).to(dtype)
            flat = bits(held).view(2, -1, self.kv_heads, dim)
            rows = [randn(n, self.kv_heads, dim, seed=10 * i + b) for b, n in enumerate(lens)]
            rows = [reference.quantised(x, dtype, self.steps[i]) for x in rows]
            self.new.append(randn(tokens, self.kv_heads, dim, seed=50 + i))
            start = 0
            for b, (n, q_len) in enumerate(zip(lens, q_lens, strict=True)):
                flat[1, self.slots[b, : n - q_len]] = bits(rows[b][: n - q_len])
                rows[b][n - q_len :] = reference.quantised(
                    self.new[i][start : start + q_len], dtype, self.steps[i]
                )
                start += q_len
            step = 1.0 if self.steps[i] is None else float(self.steps[i])
            buffers.append(held)
            self.content.append([x.double() * step for x in rows])
        starts = torch.tensor([0, *q_lens]).cumsum(0)
        self.cache = SimpleNamespace(
            k_buffer=buffers[0],
            v_buffer=buffers[1],
            req_to_token=None,
            req_pool_indices=torch.arange(batch).int(),
            seq_lens=torch.tensor(lens, dtype=torch.int64),
            out_cache_loc=torch.tensor(
                [
                    int(self.slots[b, p])
                    for b, (n, m) in enumerate(zip(lens, q_lens, strict=True))
                    for p in range(n - m, n)
                ],
                dtype=torch.int32,
            ),
            qo_indptr=starts.int(),
            k_scale=self.steps[0],
            v_scale=self.steps[1],
        )
        if page_size is None:
            rows = torch.randperm(batch, generator=torch.Generator().manual_seed(6))
            self.cache.req_to_token = torch.empty_like(table)
            self.cache.req_to_token[rows] = table
            self.cache.req_pool_indices = rows.int()
        else:
            self.cache.block_table, self.cache.page_size = table, page_size
        if host:
            self.cache.lens, self.cache.q_lens = list(lens), list(q_lens)
        self.q = randn(tokens, self.q_heads, dims[0], seed=70)

    def run(self, fwd="prefill", mask=None, **features):
        return attention(
            self.q, *self.new, self.cache, 1, mask, fwd=fwd, return_lse=True, **features
        )

    def expected(self, mask=None, **features):
        features = Features(**{"scale": self.q.shape[-1] ** -0.5, **features})
        out = torch.zeros(*self.q.shape[:-1], self.content[1][0].shape[-1], dtype=torch.float64)
        lse = torch.zeros(out.shape[:-1], dtype=torch.float64)
        token = 0
        for b, (n, q_len) in enumerate(zip(self.lens, self.q_lens, strict=True)):
            keys, values = self.content[0][b], self.content[1][b]
            here = self.present[b]
            for i in range(q_len):
                for h in range(self.q_heads):
                    row = here
                    if mask is not None:
                        own = reference.expand_mask(mask)
                        own = own[b % len(own), h % own.shape[1], i if own.shape[2] > 1 else 0, :n]
                        row = (
                            own & here
                            if own.dtype is torch.bool
                            else own.masked_fill(~here, -math.inf)
                        )
                    sink = None if features.sinks is None else float(features.sinks[h])
                    g = h // (self.q_heads // self.kv_heads)
                    out[token, h], lse[token, h] = one_query(
                        self.q[token, h].double(),
                        keys[:, g],
                        values[:, g],
                        row,
                        i + n - q_len,
                        features,
                        sink,
                    )
                token += 1
        return out, lse

    def check(self, fwd="prefill", mask=None, **features):
        out, lse = self.run(fwd, mask, **features)
        want, want_lse = self.expected(mask, **features)
        assert out.dtype is torch.float32 and lse.dtype is torch.float32
        torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)
        blind = want_lse == -math.inf
        assert (out[blind] == 0).all() and (lse[blind] == -math.inf).all()
        # The same call without lse may take another path. It writes the same keys again.
        again = attention(self.q, *self.new, self.cache, 1, mask, fwd=fwd, **features)
        torch.testing.assert_close(again.double(), want, rtol=1e-5, atol=1e-5)


def bits(x):
    return x.view(torch.uint8) if x.dtype is torch.float8_e4m3fn else x


MASKS = {
    "none": None,
    "2d": lambda b, rows, width: randn(b, width, seed=9) > -0.8,
    "3d": lambda b, rows, width: randn(b, rows, width, seed=9) > -0.8,
    "4d": lambda b, rows, width: randn(b, 4, rows, width, seed=9) > -0.8,
    "4d_row": lambda b, rows, width: randn(1, 4, 1, width, seed=9) > -0.8,
    "additive": lambda b, rows, width: randn(b, 1, rows, width, seed=9).masked_fill(
        randn(b, 1, rows, width, seed=8) < -0.8, -math.inf
    ),
}


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
    Case([0, 3, 0, 5], [0, 1, 0, 1], 2).check(is_causal=True)
    Case([6, 3, 7, 5], [0, 1, 0, 1], 2).check(is_causal=True)


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
    monkeypatch.setattr(reference_packed, "FEW_ELEMENTS", 0)

    def runs(sizes, limit):
        monkeypatch.setattr(reference_packed, "MAX_ELEMENTS", limit)
        return list(reference_packed._runs(sizes, q_heads=4, width=32))

    assert runs([], 1000) == []
    assert runs([(1, 10)] * 6, 1 << 20) == [(0, 6)]
    # One key takes 1 * 4 scores and 32 numbers of K and V: 360 elements a request.
    assert runs([(1, 10)] * 6, 800) == [(0, 2), (2, 4), (4, 6)]
    assert runs([(1, 1), (1, 100), (1, 100)], 1 << 20) == [(0, 3)]
    assert runs([(1, 1)] * 9 + [(1, 1000)], 1 << 20) == [(0, 9), (9, 10)]
    assert runs([(512, 512), (1, 512), (1, 512)], 1 << 30) == [(0, 2), (2, 3)]


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
