"""The definition of the operators in torch against loops over single numbers."""

import math

import pytest
import torch

from astrai.extension.ops import reference
from astrai.extension.ops.reference import Features, PagedCache

INF = float("inf")


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def one_row(q, keys, values, features, sees, sink):
    """One query [D] on keys [L, D] and values [L, Dv], as the formulas in ops/attention.py say."""
    scale = 1 / math.sqrt(len(q)) if features.scale is None else features.scale
    total = 0.0 if sink is None else math.exp(sink)
    out = torch.zeros(values.shape[1], dtype=torch.float64)
    for j in range(len(keys)):
        if not sees(j):
            continue
        score = scale * (features.k_scale or 1.0) * float(q @ keys[j])
        if features.softcap > 0:
            score = features.softcap * math.tanh(score / features.softcap)
        total += math.exp(score)
        out += math.exp(score) * (features.v_scale or 1.0) * values[j]
    return (out / total if total else out), (math.log(total) if total else -INF)


def expected(q, k, v, keep, features):
    """The whole of [B, L, H, D] tensors, row by row."""
    batch, q_len, q_heads, _ = q.shape
    kv_len, kv_heads = k.shape[1:3]
    out = torch.zeros(batch, q_len, q_heads, v.shape[3], dtype=torch.float64)
    lse = torch.zeros(batch, q_len, q_heads, dtype=torch.float64)
    left, right = features.window
    for b in range(batch):
        for i in range(q_len):
            diagonal = i + kv_len - q_len
            for h in range(q_heads):

                def sees(j, b=b, i=i, h=h, d=diagonal):
                    return (
                        (not features.is_causal or j <= d)
                        and (left < 0 or j >= d - left)
                        and (right < 0 or j <= d + right)
                        and (keep is None or bool(keep[b, h, i, j]))
                    )

                g = h // (q_heads // kv_heads)
                sink = None if features.sinks is None else float(features.sinks[h])
                out[b, i, h], lse[b, i, h] = one_row(
                    q[b, i, h], k[b, :, g], v[b, :, g], features, sees, sink
                )
    return out, lse


FEATURES = {
    "plain": Features(),
    "causal": Features(is_causal=True),
    "scale": Features(scale=-0.3),
    "window": Features(window=(2, 1)),
    "left": Features(window=(1, -1)),
    "right": Features(window=(-1, 0)),
    "causal_window": Features(is_causal=True, window=(2, 5)),
    "softcap": Features(softcap=1.5),
    "sinks": Features(sinks=torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)),
    "steps": Features(k_scale=0.5, v_scale=3.0),
    "all": Features(
        is_causal=True,
        scale=0.4,
        window=(3, -1),
        softcap=2.0,
        sinks=torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64),
        k_scale=2.0,
        v_scale=0.1,
    ),
}


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("lens", [(3, 5), (5, 3), (1, 1), (2, 0)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_attention(name, lens, masked):
    q_len, kv_len = lens
    q, k, v = randn(2, q_len, 4, 8), randn(2, kv_len, 2, 8, seed=1), randn(2, kv_len, 2, 6, seed=2)
    keep = randn(2, 4, q_len, kv_len, seed=3) > -0.3 if masked else None
    got = reference.attention(q, k, v, keep, FEATURES[name])
    torch.testing.assert_close(got, expected(q, k, v, keep, FEATURES[name]))


def test_rows_without_a_key():
    q, k = randn(1, 3, 2, 8), randn(1, 4, 1, 8, seed=1)
    keep = torch.zeros(1, 2, 3, 4, dtype=torch.bool)
    out, lse = reference.attention(q, k, k, keep, Features())
    assert not out.any() and (lse == -INF).all()
    sinks = torch.tensor([1.0, -2.0])
    out, lse = reference.attention(q, k, k, keep, Features(sinks=sinks))
    assert not out.any() and torch.equal(lse, sinks.double().expand(1, 3, 2))


def test_case_c06_keys_that_nobody_sees_may_hold_anything():
    q, k, v = randn(1, 3, 2, 8), randn(1, 6, 1, 8, seed=1), randn(1, 6, 1, 8, seed=2)
    keep = torch.tensor([True, True, False, True, False, False])
    want = reference.attention(q, k, v, keep, Features())
    k[:, ~keep], v[:, ~keep] = float("nan"), INF
    torch.testing.assert_close(reference.attention(q, k, v, keep, Features()), want)


def test_varlen_is_attention_of_each_sequence():
    q_starts, k_starts = torch.tensor([0, 0, 3, 4]), torch.tensor([0, 5, 5, 9])
    q, k, v = randn(4, 2, 8), randn(9, 2, 8, seed=1), randn(9, 2, 8, seed=2)
    features = Features(is_causal=True)
    out, lse = reference.varlen_attention(q, k, v, q_starts, k_starts, features)
    assert not out[:3].any() and (lse[:3] == -INF).all()  # a sequence without keys
    last = reference.attention(q[None, 3:], k[None, 5:], v[None, 5:], None, features)
    torch.testing.assert_close((out[None, 3:], lse[None, 3:]), last)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("token_table", [False, True])
def test_paged_is_attention_over_gathered_keys(page_size, token_table):
    """With holes, new tokens, a mask that is too small, and garbage wherever no token is."""
    lengths, q_lens = [7, 0, 5], [2, 1, 3]
    width = 8
    pages = torch.randperm(3 * width // page_size, generator=torch.Generator().manual_seed(1))
    block_table = pages.int().view(3, -1).clone()
    slots = block_table.repeat_interleave(page_size, 1) * page_size
    slots = slots + torch.arange(width) % page_size
    keys, values = randn(3, width, 2, 8, seed=2), randn(3, width, 2, 6, seed=3)
    shape = (3 * width // page_size, page_size) if page_size > 1 else (3 * width,)
    k_cache = torch.full((*shape, 2, 8), float("nan"), dtype=torch.float64)
    v_cache = torch.full((*shape, 2, 6), float("nan"), dtype=torch.float64)
    new_k, new_v = randn(6, 2, 8, seed=4), randn(6, 2, 6, seed=5)
    q = randn(6, 4, 8, seed=6)
    q_starts, k_starts = torch.tensor([0, 2, 3, 6]), torch.tensor([0, 7, 7, 12])
    for b, (length, q_len) in enumerate(zip(lengths, q_lens, strict=True)):
        old = max(length - q_len, 0)
        for x, source in ((k_cache, keys), (v_cache, values)):
            x.view(-1, *x.shape[-2:])[slots[b, :old].long()] = source[b, :old]
        fresh = min(q_len, length)
        end = int(q_starts[b + 1])
        keys[b, length - fresh : length] = new_k[end - fresh : end]
        values[b, length - fresh : length] = new_v[end - fresh : end]
    hole = 0 if token_table else 1
    if token_table:
        slots[0, :1] = -1
        rows = torch.tensor([2, 0, 1])
        table = torch.empty_like(slots)
        table[rows] = slots
        cache = PagedCache(k_cache, v_cache, table, rows)
        skipped = torch.arange(width) == 0
    else:
        block_table[0, hole] = -1
        cache = PagedCache(k_cache, v_cache, block_table, None)
        skipped = torch.arange(width) // page_size == hole
    mask = randn(3, 4, 2, 6, seed=7) > -0.5
    features = Features(is_causal=True)
    got = reference.paged_attention(q, cache, k_starts, q_starts, new_k, new_v, mask, features)
    for b, (length, q_len) in enumerate(zip(lengths, q_lens, strict=True)):
        keep = torch.zeros(1, 4, q_len, length, dtype=torch.bool)
        part = mask[b, :, :q_len, :length]
        keep[0, :, : part.shape[1], : part.shape[2]] = part
        if b == 0:
            keep &= ~skipped[:length]
        start, end = int(q_starts[b]), int(q_starts[b + 1])
        want = expected(
            q[None, start:end], keys[b : b + 1, :length], values[b : b + 1, :length], keep, features
        )
        torch.testing.assert_close(tuple(x[None, start:end] for x in got), want)


def test_merge_states_is_attention_over_both_halves():
    q, k, v = randn(1, 3, 2, 8), randn(1, 6, 1, 8, seed=1), randn(1, 6, 1, 8, seed=2)
    halves = [
        reference.attention(q, k[:, part], v[:, part], None, Features())
        for part in (slice(0, 4), slice(4, 6))
    ]
    whole = reference.attention(q, k, v, None, Features())
    torch.testing.assert_close(reference.merge_states(*halves[0], *halves[1]), whole)


def test_case_c13_merge_with_a_part_without_keys():
    o, lse = randn(2, 8).float(), torch.tensor([1.5, -INF])
    none = torch.full((2, 8), float("nan")), torch.full((2,), -INF)
    o[1] = float("nan")
    for merged in (
        reference.merge_states(o, lse, *none),
        reference.merge_states(*none, o, lse),
    ):
        assert torch.equal(merged[0][0], o[0]) and not merged[0][1].any()
        assert torch.equal(merged[1], lse)


def test_quantised_cache_saturates_and_keeps_nan():
    x = torch.tensor([1.0, 448.0, 465.0, -1e4, INF, -INF, float("nan"), 0.7])
    got = reference.quantised(x, torch.float8_e4m3fn, 0.5).float()
    want = torch.tensor([2.0, 448.0, 448.0, -448.0, 448.0, -448.0, float("nan"), 1.375])
    torch.testing.assert_close(got, want, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_append(interleaved):
    q, k, v = randn(5, 4, 8).float(), randn(5, 2, 8, seed=1).float(), randn(5, 2, 6, seed=2).float()
    angles = randn(9, 2, seed=3).float()
    table = torch.cat((angles.cos(), angles.sin()), -1)
    positions, slots = torch.tensor([0, 3, 8, 9, -1]), torch.tensor([5, -1, 0, 7, 99])
    k_cache, v_cache = torch.full((4, 2, 2, 8), 9.0), torch.full((4, 2, 2, 6), 9.0)
    got = reference.rope_append(
        q, k, v, table, positions, k_cache, v_cache, slots, interleaved, None, None
    )

    def turned(x, position):
        x = x.clone()
        for pair in range(2):
            a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + 2)
            c, s = float(table[position, pair]), float(table[position, 2 + pair])
            x1, x2 = x[:, a].clone(), x[:, b].clone()
            x[:, a], x[:, b] = x1 * c - x2 * s, x1 * s + x2 * c
        return x

    for t, position in enumerate([0, 3, 8]):
        torch.testing.assert_close(got[t], turned(q[t], position))
    assert got[3:, :, :4].isnan().all() and torch.equal(got[3:, :, 4:], q[3:, :, 4:])
    torch.testing.assert_close(k_cache[2, 1], turned(k[0], 0))
    torch.testing.assert_close(k_cache[0, 0], turned(k[2], 8))
    assert torch.equal(v_cache.flatten(0, 1)[[5, 0, 7]], v[[0, 2, 3]])
    assert (v_cache.flatten(0, 1)[[1, 2, 3, 4, 6]] == 9).all()


@pytest.mark.parametrize("lens", [[70, 10, 130], [], [0, 0], [64, 0, 65, 1]], ids=str)
def test_q_work_map(lens):
    starts = torch.tensor([0, *lens]).cumsum(0).int()
    total = sum(lens)
    size = total // 64 + min(len(lens), total)
    batch, index = reference.q_work_map(starts, size, 64)
    tiles = [(b, t) for b, n in enumerate(lens) for t in range((n + 63) // 64)]
    assert list(zip(batch.tolist(), index.tolist(), strict=True))[: len(tiles)] == tiles
    assert (batch[len(tiles) :] == -1).all() and len(batch) == size
