"""Packed calls over paged caches, and a loop over their queries in float64.

What is no key of a request holds NaN, and what the tables hold there would fault if it was used.
"""

import math
from types import SimpleNamespace

import torch

from astrai.extension import attention
from astrai.extension.ops import reference
from astrai.extension.ops.reference import Features
from tests.python.backend.attention_cases import randn

GARBAGE = 2**30


def one_query(q, keys, values, mask_row, diagonal, features, sink):
    """One query [D] on keys [L, D] and values [L, Dv]; mask_row is bool or floating."""
    left, right = features.window
    distance = torch.arange(len(keys)) - diagonal
    seen = torch.ones(len(keys), dtype=torch.bool)
    if features.is_causal:
        seen &= distance <= 0
    if left >= 0:
        seen &= distance >= -left
    if right >= 0:
        seen &= distance <= right
    scores = keys @ q * features.scale
    if features.softcap > 0:
        scores = features.softcap * torch.tanh(scores / features.softcap)
    if mask_row.dtype is torch.bool:
        seen &= mask_row
    else:
        scores = scores + mask_row
    weights = torch.exp(scores[seen])
    total = float(weights.sum()) + (0.0 if sink is None else math.exp(sink))
    out = weights @ values[seen]
    return (out / total, math.log(total)) if total else (out, -math.inf)


class Case:
    """A cache before a call, the call, and what it must give."""

    def __init__(
        self,
        lens,
        q_lens,
        page_size,
        dtype=torch.float32,
        call_dtype=torch.float32,
        dims=(8, 8),
        holes=(),
        complete=False,
        host=True,
        steps=None,
        heads=(4, 2),
        device="cpu",
    ):
        """``page_size`` None: a token table. ``holes``: (request, entry of its table).

        ``dtype`` is the cache's, ``call_dtype`` that of q and the new tokens.
        """
        self.lens, self.q_lens = lens, q_lens
        self.q_heads, self.kv_heads = heads
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
            self.new.append(randn(tokens, self.kv_heads, dim, seed=50 + i, dtype=call_dtype))
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
        self.cache.complete = complete
        self.q = randn(tokens, self.q_heads, dims[0], seed=70, dtype=call_dtype)
        if device != "cpu":
            self.q, self.new = self.q.to(device), [x.to(device) for x in self.new]
            for name, value in list(vars(self.cache).items()):
                if isinstance(value, torch.Tensor):
                    setattr(self.cache, name, value.to(device))

    def check_cache(self):
        """The new tokens lie in the cache bit by bit, and nothing else was touched."""
        slots = self.cache.out_cache_loc.long()
        for held, new in zip((self.cache.k_buffer, self.cache.v_buffer), self.new, strict=True):
            flat = held.view(2, -1, *held.shape[-2:])
            assert torch.equal(flat[1, slots], new) and flat[0].isnan().all()

    def run(self, fwd="prefill", mask=None, **features):
        return attention(
            self.q, *self.new, self.cache, 1, mask, fwd=fwd, return_lse=True, **features
        )

    def expected(self, mask=None, **features):
        q = self.q.cpu().double()
        features = Features(**{"scale": q.shape[-1] ** -0.5, **features})
        mask = None if mask is None else mask.cpu()
        out = torch.zeros(*q.shape[:-1], self.content[1][0].shape[-1], dtype=torch.float64)
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
                        q[token, h],
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
