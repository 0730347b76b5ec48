"""Prefill over paged caches and over packed sequences, against float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from astrai.extension.errors import ShapeError
from astrai.extension.ops import (
    attn_paged_prefill,
    attn_paged_prefill_workspace_size,
    attn_prefill,
    attn_varlen,
    build_q_work_map,
    reference,
)
from astrai.extension.ops.reference import Features
from tests.python.ops.attention_inputs import check, randn
from tests.python.ops.paged_inputs import prefix_sums, problem

E4M3 = torch.float8_e4m3fn
LENS, Q_LENS = [70, 10, 130, 300], [70, 3, 130, 129]


def run(p, mask=None, with_map=True, workspace=None, **features):
    want, _ = p.expected(Features(**features), mask)
    tiles = {}
    if with_map:
        names = ("q_tile_to_batch", "q_tile_to_index")
        tiles = dict(zip(names, build_q_work_map(p.qo_indptr, p.q.shape[0]), strict=True))
    out, lse = attn_paged_prefill(
        **p.arguments(**features), **tiles, mask=mask, workspace=workspace, return_lse=True
    )
    check(out, lse, want, p.q.dtype)
    return out, lse


@pytest.mark.parametrize("page_size", [1, 2, 8, 16, 64, 256])
@pytest.mark.parametrize("block_table", [False, True])
@pytest.mark.parametrize("cache", ["own", "interleaved", "e4m3"])
def test_case_d10_page_sizes(page_size, block_table, cache):
    interleaved = cache == "interleaved"
    if interleaved and not block_table and page_size > 1:
        pytest.skip("a table of slots needs pages that follow each other")
    more = {"interleaved": interleaved, "cache_dtype": E4M3 if cache == "e4m3" else None}
    for dtype in (torch.bfloat16, torch.float16):
        p = problem(LENS, Q_LENS, page_size=page_size, block_table=block_table, dtype=dtype, **more)
        for is_causal in (False, True):
            run(p, is_causal=is_causal, with_map=is_causal)


@pytest.mark.parametrize("head_dim", [8, 64, 72, 96, 128, 192, 256])
@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (32, 4), (64, 1)], ids=str)
def test_head_dims_and_groups(head_dim, heads):
    run(problem(LENS, Q_LENS, heads=heads, head_dim=head_dim), is_causal=True)


def test_values_of_128_for_keys_of_192():
    for page_size in (1, 16):
        p = problem(LENS, Q_LENS, head_dim=192, v_head_dim=128, page_size=page_size)
        run(p, is_causal=True)


def test_case_c03_c05_requests_without_queries_or_keys():
    p = problem([0, 3, 0, 5], [0, 1, 0, 1], heads=(9, 3), head_dim=64)
    run(p, is_causal=True)
    out, lse = run(problem([5, 0, 7], [2, 3, 4]), is_causal=True)
    assert not out[2:5].any() and (lse[2:5] == float("-inf")).all()


def test_case_c02_no_queries():
    for q_lens in ([0, 0], []):
        p = problem([7, 9][: len(q_lens)], q_lens)
        out, lse = attn_paged_prefill(**p.arguments(), return_lse=True)
        assert out.shape == (0, 8, 128) and lse.shape == (0, 8)


def test_case_c08_more_queries_than_keys():
    out, lse = run(problem([3, 128], [128, 3]), is_causal=True)
    assert not out[:125].any() and (lse[:125] == float("-inf")).all()


def test_a_new_part_of_a_long_request():
    run(problem([5000, 300], [64, 300], heads=(8, 2)), is_causal=True)
    run(problem([20000], [5], heads=(8, 1)), is_causal=True)  # few tiles: the keys are split


@pytest.mark.parametrize("block_table", [False, True])
def test_case_d12_holes_are_skipped(block_table):
    p = problem([77, 130], [20, 130], block_table=block_table)
    rows = torch.arange(2) if p.rows is None else p.rows.cpu().long()
    p.table[rows[0], 0] = -1
    p.table[rows[1], 2:4] = -7
    run(p, is_causal=True)


@pytest.mark.parametrize(
    "shape", [(4, 300), (1, 310), (4, 8, 130, 300), (1, 1, 130, 90), (4, 1, 1, 300)]
)
def test_masks(shape):
    mask = torch.rand(shape, device="cuda") < 0.6
    mask[0] = False
    for is_causal in (False, True):
        run(problem(LENS, Q_LENS), mask, is_causal=is_causal)


def test_features():
    sinks = torch.randn(8, device="cuda")
    for features in (
        {"window": (20, 0)},
        {"window": (20, 30)},
        {"softcap": 4.0},
        {"sinks": sinks},
        {"window": (50, -1), "softcap": 10.0, "sinks": sinks, "scale": -0.1},
    ):
        for is_causal in (False, True):
            run(problem(LENS, Q_LENS), is_causal=is_causal, **features)
    p = problem(LENS, Q_LENS, cache_dtype=E4M3)
    step = torch.tensor([0.04], device="cuda")
    run(p, is_causal=True, k_scale=step, v_scale=0.5)


def test_tiles_in_any_order_and_entries_without_work():
    p = problem(LENS, Q_LENS)
    want, _ = p.expected(Features(is_causal=True))
    batch, index = build_q_work_map(p.qo_indptr)
    order = torch.randperm(len(batch), device="cuda")
    padded = [
        torch.cat((x[order], torch.full((5,), -1, device="cuda").int())) for x in (batch, index)
    ]
    tiles = dict(zip(("q_tile_to_batch", "q_tile_to_index"), padded, strict=True))
    out = attn_paged_prefill(**p.arguments(), **tiles, is_causal=True)
    check(out, None, want, p.q.dtype)


def test_case_e06_workspace_size_is_enough():
    for q_lens in ([1], [16, 3], [200, 1]):
        lens = [4000] * len(q_lens)
        size = attn_paged_prefill_workspace_size(len(q_lens), max(q_lens), 8, 2, 128)
        memory = torch.full((size + 512,), 0xFF, dtype=torch.uint8, device="cuda")
        memory[:256], memory[-256:] = 0xA5, 0xA5
        for _ in range(2):
            run(problem(lens, q_lens), workspace=memory[256 : 256 + size], is_causal=True)
        assert (memory[:256] == 0xA5).all() and (memory[-256:] == 0xA5).all()


@pytest.mark.parametrize("lens", [[70, 10, 130], [0], [0, 64, 65, 0, 1], [1] * 300, [5000, 3]])
def test_work_map(lens):
    starts = prefix_sums(lens)
    for batch, index in (build_q_work_map(starts), build_q_work_map(starts, sum(lens))):
        got = [pair for pair in zip(batch.tolist(), index.tolist(), strict=True) if pair[0] >= 0]
        want = [(b, t) for b, n in enumerate(lens) for t in range((n + 63) // 64)]
        assert sorted(got) == want
        assert len(batch) == sum(lens) // 64 + min(len(lens), sum(lens))


def test_a_map_that_is_too_small_is_refused():
    p = problem([200], [200])
    batch, index = build_q_work_map(p.qo_indptr)
    with pytest.raises(ShapeError, match="q_tile_to_batch must be of at least 4 tiles of 64"):
        attn_paged_prefill(**p.arguments(), q_tile_to_batch=batch[:3], q_tile_to_index=index[:3])
    with pytest.raises(ShapeError, match=r"q_tile_to_index must be of shape \(4,\)"):
        attn_paged_prefill(**p.arguments(), q_tile_to_batch=batch, q_tile_to_index=index[:3])


# ---- Packed sequences ---------------------------------------------------------------------------


def varlen(q_lens, k_lens, heads=(8, 2), dims=(128, 128), dtype=torch.bfloat16, **features):
    """Runs attn_varlen on random sequences with canaries around the output."""
    q = randn(sum(q_lens), heads[0], dims[0], dtype=dtype, seed=1)
    k = randn(sum(k_lens), heads[1], dims[0], dtype=dtype, seed=2)
    v = randn(sum(k_lens), heads[1], dims[1], dtype=dtype, seed=3)
    starts = prefix_sums(q_lens), prefix_sums(k_lens)
    want = reference.varlen_attention(q.double(), k, v, *starts, Features(**features))
    base = torch.full((sum(q_lens) + 2, heads[0], dims[1]), 7.0, dtype=dtype, device="cuda")
    out, lse = attn_varlen(q, k, v, *starts, **features, return_lse=True, out=base[1:-1])
    check(out, lse, want, dtype)
    assert (base[0] == 7).all() and (base[-1] == 7).all()
    longest = max([0, *q_lens]), max([0, *k_lens])
    again = attn_varlen(q, k, v, *starts, *longest, **features)
    check(again, None, want, dtype)
    return out, lse


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_varlen(dtype, is_causal):
    varlen([70, 10, 130], [100, 10, 130], dtype=dtype, is_causal=is_causal)
    varlen([1, 1, 1], [1, 500, 64], dtype=dtype, is_causal=is_causal)
    varlen([5, 200], [200, 5], (9, 3), (72, 72), dtype=dtype, is_causal=is_causal)
    varlen([33], [90], (4, 1), (192, 128), dtype=dtype, is_causal=is_causal)


def test_case_c02_varlen_without_queries():
    q, k = randn(0, 32, 128), randn(20, 8, 128)
    starts = prefix_sums([0]), prefix_sums([20])
    out, lse = attn_varlen(q, k, k, *starts, return_lse=True)
    assert out.shape == (0, 32, 128) and lse.shape == (0, 32)


def test_case_c03_varlen_with_empty_sequences():
    varlen([0, 1, 0, 1], [0, 3, 0, 5], (9, 3), (64, 64), is_causal=True)


def test_case_c04_keys_without_queries_and_unequal_starts():
    q_lens, k_lens = [0, 1208, 840, 0], [2538, 1742, 840, 3072]
    varlen(q_lens, k_lens, (2, 1), (256, 256), is_causal=True)


def test_case_c05_varlen_without_keys():
    out, lse = varlen([4, 5, 6], [5, 0, 7], is_causal=True)
    assert not out[4:9].any() and (lse[4:9] == float("-inf")).all()


def test_case_c06_ragged_lengths():
    varlen([1274, 1294, 3], [1274, 1294, 700], (4, 2), is_causal=True, window=(200, 0))


def test_varlen_features():
    sinks = torch.randn(8, device="cuda")
    lens = [70, 10, 130], [100, 10, 130]
    varlen(*lens, window=(30, 10), softcap=5.0, sinks=sinks, scale=0.2)
    varlen(*lens, is_causal=True, k_scale=0.5, v_scale=torch.tensor([2.0], device="cuda"))


def test_case_d02_varlen_on_packed_qkv():
    q, k, v = randn(200, 3, 4, 128).unbind(1)
    starts = prefix_sums([70, 130])
    want = reference.varlen_attention(q.double(), k, v, starts, starts, Features(is_causal=True))
    got = attn_varlen(q, k, v, starts, starts, is_causal=True, return_lse=True)
    check(*got, want, q.dtype)


def test_one_sequence_is_dense_attention():
    q, k, v = randn(100, 8, 128), randn(150, 2, 128, seed=1), randn(150, 2, 128, seed=2)
    starts = prefix_sums([100]), prefix_sums([150])
    got = attn_varlen(q, k, v, *starts, is_causal=True)
    torch.testing.assert_close(got, attn_prefill(q[None], k[None], v[None], is_causal=True)[0])


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    batch=st.integers(1, 5),
    heads=st.sampled_from([(1, 1), (4, 2), (9, 3), (16, 1), (24, 8)]),
    head_dim=st.integers(1, 32).map(lambda x: 8 * x),
    page_size=st.sampled_from([1, 2, 16, 64]),
    block_table=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    e4m3=st.booleans(),
    is_causal=st.booleans(),
    window=st.tuples(st.integers(-1, 150), st.integers(-1, 150)),
    softcap=st.sampled_from([0.0, 3.0]),
)
def test_any_combination(
    data, batch, heads, head_dim, page_size, block_table, dtype, e4m3, is_causal, window, softcap
):
    lengths = st.lists(st.integers(0, 200), min_size=batch, max_size=batch)
    lens, q_lens = data.draw(lengths), data.draw(lengths)
    p = problem(
        lens,
        q_lens,
        heads=heads,
        head_dim=head_dim,
        page_size=page_size,
        block_table=block_table,
        dtype=dtype,
        cache_dtype=E4M3 if e4m3 else None,
        seed=data.draw(st.integers(0, 2**20)),
    )
    features = {"is_causal": is_causal, "window": window, "softcap": softcap}
    if data.draw(st.booleans()):
        features["sinks"] = torch.randn(heads[0], device="cuda")
    mask = None
    if data.draw(st.booleans()):
        mask = torch.rand(batch, heads[0], 200, 200, device="cuda") < 0.7
    run(p, mask, with_map=data.draw(st.booleans()), **features)
