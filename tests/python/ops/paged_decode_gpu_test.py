"""Decode over paged caches, against float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from astrai.extension.ops import attn_paged_decode, attn_paged_decode_workspace_size
from astrai.extension.ops.reference import Features
from tests.python.ops.attention_inputs import check, randn
from tests.python.ops.paged_inputs import clone, prefix_sums, problem, raw

E4M3 = torch.float8_e4m3fn
LENS = [1, 77, 16, 300, 15, 17]


def run(p, mask=None, call=None, **features):
    """Compares out, lse and both caches with what they must be; `call` has further arguments."""
    rule = Features(**{**features, "is_causal": p.qo_indptr is not None})
    want, want_caches = p.expected(rule, mask)
    out, lse = attn_paged_decode(
        **p.arguments(**features),
        mask=mask,
        return_lse=True,
        **(call or {}),
    )
    check(out, lse, want, p.q.dtype)
    for got, expected in zip((p.k_cache, p.v_cache), want_caches, strict=True):
        assert torch.equal(raw(got), raw(expected))
    return out, lse


@pytest.mark.parametrize("page_size", [1, 2, 4, 8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("block_table", [False, True])
@pytest.mark.parametrize("cache", ["own", "interleaved", "e4m3"])
def test_case_d10_page_sizes(page_size, block_table, cache):
    interleaved = cache == "interleaved"
    if interleaved and not block_table and page_size > 1:
        pytest.skip("a table of slots needs pages that follow each other")
    more = {"interleaved": interleaved, "cache_dtype": E4M3 if cache == "e4m3" else None}
    for dtype in (torch.bfloat16, torch.float16):
        p = problem(LENS, page_size=page_size, block_table=block_table, dtype=dtype, **more)
        run(p)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("block_table", [False, True])
def test_case_c07_lengths_around_a_page_and_nan_beyond(page_size, block_table):
    lens = [n for n in (page_size - 1, page_size, page_size + 1, 5 * page_size + 1) if n > 0]
    for append in (False, True):
        run(problem(lens, page_size=page_size, block_table=block_table, append=append))


@pytest.mark.parametrize("head_dim", [8, 64, 72, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (32, 4), (16, 1), (64, 1)], ids=str)
def test_head_dims_and_groups(head_dim, heads):
    run(problem(LENS, heads=heads, head_dim=head_dim))
    run(problem(LENS, heads=heads, head_dim=head_dim, page_size=1, block_table=False, append=True))


@pytest.mark.parametrize("page_size", [1, 16])
def test_values_of_128_for_keys_of_192(page_size):
    for cache_dtype in (None, E4M3):
        more = {"head_dim": 192, "v_head_dim": 128, "page_size": page_size}
        run(problem(LENS, append=True, cache_dtype=cache_dtype, **more))


def test_case_c02_no_requests():
    p = problem([], [])
    out, lse = attn_paged_decode(**p.arguments(), return_lse=True)
    assert out.shape == (0, 8, 128) and lse.shape == (0, 8)


def test_case_c05_requests_without_keys():
    out, lse = run(problem([5, 0, 7]))
    assert not out[1].any() and (lse[1] == float("-inf")).all()
    run(problem([0, 0]))
    run(problem([5, 0, 7], [1, 2, 0]))


def test_case_c03_requests_without_queries():
    run(problem([0, 3, 0, 5], [0, 1, 0, 1], heads=(9, 3), head_dim=64))


@pytest.mark.parametrize("q_len", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("batch", [1, 2, 33])
def test_case_c15_queries_of_a_request_share_its_keys(q_len, batch):
    lens = [3100 - 61 * (b % 40) for b in range(batch)]
    for append in (False, True):
        p = problem(lens, [q_len] * batch, heads=(16, 2), head_dim=64, append=append)
        run(p)


def test_case_c15_long_and_ragged():
    run(problem([31000, 17, 9000], [4, 8, 1], append=True))
    run(problem([31000], [16], heads=(32, 8)))


def test_more_queries_than_keys():
    out, lse = run(problem([3, 1, 16], [5, 4, 16]))
    assert not out[:2].any() and (lse[:2] == float("-inf")).all()
    run(problem([3, 1, 16], [5, 4, 16], append=True))


@pytest.mark.parametrize("cache_dtype", [None, E4M3], ids=str)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("packed", [False, True])
def test_new_tokens_are_written_and_attended_to(cache_dtype, page_size, packed):
    q_lens = [1, 3, 2, 4, 1, 5] if packed else None
    steps = {} if cache_dtype is None else {"k_scale": 0.04, "v_scale": 0.013}
    for block_table in (False, True):
        p = problem(
            LENS,
            q_lens,
            page_size=page_size,
            block_table=block_table,
            cache_dtype=cache_dtype,
            append=True,
        )
        run(p, **steps)
    if cache_dtype is not None:
        p = problem(LENS, q_lens, cache_dtype=cache_dtype, append=True)
        run(p, **{name: torch.tensor([x], device="cuda") for name, x in steps.items()})


def test_case_f01_new_values_saturate_and_nan_stays():
    p = problem([20, 30], cache_dtype=E4M3, append=True)
    special = torch.tensor([448.0, 465.0, -1e4, torch.inf, -torch.inf, torch.nan, 2**-10])
    p.new_k[0, 0, :7] = special.cuda()
    p.new_v[0, 0, :7] = special.cuda()
    _, (k, v) = p.expected()
    attn_paged_decode(**p.arguments())
    assert torch.equal(raw(p.k_cache), raw(k)) and torch.equal(raw(p.v_cache), raw(v))


@pytest.mark.parametrize("block_table", [False, True])
def test_case_d12_holes_are_skipped_and_never_page_0(block_table):
    p = problem([77, 130, 40], block_table=block_table, page_size=16)
    rows = torch.arange(3) if p.rows is None else p.rows.cpu().long()
    p.table[rows[0], 0] = -1
    p.table[rows[1], 2:4] = -7
    p.table[rows[2]] = -1
    out, lse = run(p)
    assert not out[2].any() and (lse[2] == float("-inf")).all()


@pytest.mark.parametrize("block_table", [False, True])
def test_a_new_token_without_a_slot_is_not_written(block_table):
    p = problem([33, 20], block_table=block_table, page_size=16, append=True)
    rows = torch.arange(2) if p.rows is None else p.rows.cpu().long()
    p.table[rows[0], 2 if block_table else 32] = -1
    run(p)


def test_case_d11_table_of_exact_width_at_the_end_of_an_allocation():
    p = problem([257, 100], page_size=64)
    assert p.table.shape[1] == 5
    memory = torch.full((2**20,), 2**30, dtype=torch.int32, device="cuda")
    memory[-p.table.numel() :] = p.table.flatten()
    p.table = memory[-p.table.numel() :].view(p.table.shape)
    run(p)
    wide = torch.full((2, 40), 2**30, dtype=torch.int32, device="cuda")
    wide[:, 3:8] = p.table
    p.table = wide[:, 3:8]
    run(p)


@pytest.mark.parametrize("shape", ["2d", "2d_one", "4d", "4d_head", "4d_rows", "narrow"])
@pytest.mark.parametrize("packed", [False, True])
def test_masks(shape, packed):
    q_lens = [1, 3, 2, 4, 1, 5] if packed else None
    rows = 5 if packed else 1
    sizes = {
        "2d": (6, 300),
        "2d_one": (1, 333),
        "4d": (6, 8, rows, 300),
        "4d_head": (6, 8, 1, 310),
        "4d_rows": (1, 1, rows, 300),
        "narrow": (6, 100),
    }[shape]
    mask = torch.rand(sizes, device="cuda") < 0.6
    mask[0] = False
    for page_size in (1, 16):
        run(problem(LENS, q_lens, page_size=page_size), mask)


@pytest.mark.parametrize("packed", [False, True])
def test_features(packed):
    q_lens = [1, 3, 2, 4, 1, 5] if packed else None
    sinks = torch.randn(8, device="cuda")
    for features in (
        {"window": (20, 0)},
        {"window": (0, -1)},
        {"softcap": 4.0},
        {"sinks": sinks},
        {"scale": 0.3},
        {"window": (50, 3), "softcap": 10.0, "sinks": sinks, "scale": -0.1},
    ):
        run(problem(LENS, q_lens, append=True), **features)


def test_case_d02_new_rows_and_queries_from_a_fused_tensor():
    p = problem(LENS, append=True)
    fused = randn(6, 12, 128, seed=7)
    p.q, p.new_k, p.new_v = fused[:, :8], fused[:, 8:10], fused[:, 10:]
    run(p)


@pytest.mark.parametrize("offset", [1, 4, 8])
def test_rows_that_are_not_16_byte_aligned(offset):
    for append in (False, True):
        p = problem(LENS, page_size=1, append=append, head_dim=64)
        for name in ("k_cache", "v_cache"):
            x = getattr(p, name)
            base = torch.full((x.numel() + offset,), torch.nan, dtype=x.dtype, device="cuda")
            setattr(p, name, base[offset:].view(x.shape).copy_(x))
        run(p)


def test_case_d03_stride_of_a_size_1_dimension():
    p = problem(LENS, heads=(8, 1), page_size=16)
    pages = p.k_cache.shape[0]
    for name in ("k_cache", "v_cache"):
        x = getattr(p, name)
        setattr(p, name, x.as_strided((pages, 16, 1, 128), (16 * 128, 128, 7, 1)))
    run(p)


def test_case_d07_pages_beyond_32_bits():
    pages, page_size = 140_000, 16
    need = 2 * pages * page_size * 8 * 128 * 2
    if torch.cuda.mem_get_info()[0] < need + 2**31:
        pytest.skip(f"needs {need >> 30} GB of free device memory")
    k_cache = torch.empty(pages, page_size, 8, 128, dtype=torch.bfloat16, device="cuda")
    v_cache = torch.empty_like(k_cache)
    for cache, seed in ((k_cache, 1), (v_cache, 2)):
        cache[-4:] = randn(4, page_size, 8, 128, seed=seed)
    p = problem([60], heads=(32, 8))
    p.k_cache, p.v_cache = k_cache[-4:], v_cache[-4:]
    p.table = torch.arange(4, dtype=torch.int32, device="cuda").view(1, 4)
    want, _ = p.expected()
    p.k_cache, p.v_cache, p.table = k_cache, v_cache, p.table + pages - 4
    check(*attn_paged_decode(**p.arguments(), return_lse=True), want, p.q.dtype)


def test_out_buf_takes_the_first_rows_and_no_more():
    p = problem(LENS)
    out_buf = torch.full((9, 8, 128), 7.0, dtype=p.q.dtype, device="cuda")
    out, _ = run(p, call={"out_buf": out_buf})
    assert out.data_ptr() == out_buf.data_ptr() and out.shape[0] == 6
    assert (out_buf[6:] == 7).all()


def test_part_buffers_of_any_size_are_taken():
    p = problem([5000, 300])
    want, _ = p.expected()
    for numel in (1, 2 * 8 * 32 * 128):
        o_part = torch.full((numel,), torch.nan, device="cuda")
        ml_part = torch.full((2 * 8 * 32 * 2,), torch.nan, device="cuda")
        for buffers in ((o_part, ml_part), (o_part, None), (None, ml_part)):
            named = dict(zip(("o_part_buf", "ml_part_buf"), buffers, strict=True))
            got = attn_paged_decode(**p.arguments(), **named, return_lse=True)
            check(*got, want, p.q.dtype)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("q_len", [1, 4])
def test_case_e06_workspace_size_is_enough(deterministic, q_len):
    for batch, heads, kv_len in ((1, (8, 1), 9000), (7, (32, 8), 700), (33, (8, 8), 130)):
        sizes = {"max_q_len": q_len, "deterministic": deterministic}
        size = attn_paged_decode_workspace_size(batch, *heads, 128, **sizes)
        memory = torch.full((size + 512,), 0xFF, dtype=torch.uint8, device="cuda")
        memory[:256], memory[-256:] = 0xA5, 0xA5
        workspace = memory[256 : 256 + size]
        p = problem([kv_len] * batch, [q_len] * batch, heads=heads)
        for _ in range(2):
            run(p, call={"workspace": workspace, **sizes})
        assert (memory[:256] == 0xA5).all() and (memory[-256:] == 0xA5).all()


@pytest.mark.parametrize("q_len", [1, 4])
def test_case_e13_deterministic_rows_do_not_depend_on_the_batch(q_len):
    lens = [1 + 331 * b for b in range(64)]
    p = problem(lens, [q_len] * 64, heads=(16, 2), page_size=16)
    whole = attn_paged_decode(**p.arguments(), deterministic=True, return_lse=True)
    for b in (0, 5, 63):
        rows = slice(b * q_len, (b + 1) * q_len)
        alone = problem([1], [q_len], heads=(16, 2))
        alone.k_cache, alone.v_cache = p.k_cache, p.v_cache
        alone.q, alone.table = p.q[rows], p.table[b : b + 1]
        alone.kv_indptr = prefix_sums([lens[b]])
        one = attn_paged_decode(**alone.arguments(), deterministic=True, return_lse=True)
        assert torch.equal(one[0], whole[0][rows]) and torch.equal(one[1], whole[1][rows])


def grow(p, table, kv_len):
    """The same request at another length, in the captured tensors."""
    p.kv_indptr.copy_(prefix_sums([kv_len]))
    p.table.fill_(2**30)
    p.table[0, : (kv_len + 15) // 16] = table[: (kv_len + 15) // 16]


@pytest.mark.parametrize("q_len", [1, 4])
def test_case_e01_a_graph_captured_at_128_keys_replays_at_any_length(q_len):
    longest = 144 * 1024
    pages = longest // 16
    p = problem([128], [q_len], heads=(32, 8), append=True)
    p.k_cache, p.v_cache = randn(pages, 16, 8, 128), randn(pages, 16, 8, 128, seed=1)
    table = torch.randperm(pages, device="cuda").int()
    p.table = torch.empty(1, pages, dtype=torch.int32, device="cuda")
    grow(p, table, 128)
    out = torch.empty(q_len, 32, 128, dtype=p.q.dtype, device="cuda")
    size = attn_paged_decode_workspace_size(1, 32, 8, 128, max_q_len=q_len)
    workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        attn_paged_decode(**p.arguments(), out_buf=out, workspace=workspace)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attn_paged_decode(**p.arguments(), out_buf=out, workspace=workspace)
    for kv_len in (128, 4096, 32 * 1024, longest, 1, 5000):
        grow(p, table, kv_len)
        want, want_caches = p.expected(Features(is_causal=True))
        out.fill_(torch.nan)
        graph.replay()
        check(out, None, want, p.q.dtype)
        assert torch.equal(raw(p.k_cache), raw(want_caches[0]))


def test_case_e02_a_graph_padded_with_empty_requests():
    lens = [300, 17, 40, 1, 900, 64, 5]
    p = problem([*lens, 0])
    workspace = torch.full((2**24,), 0xFF, dtype=torch.uint8, device="cuda")
    out, lse = run(p, call={"workspace": workspace})
    assert not out[-1].any() and (lse[-1] == float("-inf")).all()


def test_case_e04_a_workspace_may_be_used_again_and_again():
    p = problem([9000, 300], heads=(32, 8))
    workspace = torch.full((2**25,), 0xFF, dtype=torch.uint8, device="cuda")
    want, _ = p.expected()
    first = attn_paged_decode(**p.arguments(), workspace=workspace)
    check(first, None, want, p.q.dtype)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attn_paged_decode(**p.arguments(), workspace=workspace)
    for _ in range(100):
        graph.replay()
    torch.cuda.synchronize()
    check(out, None, want, p.q.dtype)


def test_version_counters():
    p = problem(LENS, append=True)
    tensors = (p.q, p.k_cache, p.v_cache, p.new_k)
    versions = [x._version for x in tensors]
    attn_paged_decode(**p.arguments())
    assert [x._version - old for x, old in zip(tensors, versions, strict=True)] == [0, 1, 1, 0]
    p.new_k = p.new_v = None
    attn_paged_decode(**p.arguments())
    assert p.k_cache._version == versions[1] + 1


@settings(max_examples=80, deadline=None)
@given(
    data=st.data(),
    batch=st.integers(1, 6),
    heads=st.sampled_from([(1, 1), (4, 2), (9, 3), (16, 1), (24, 8), (34, 2)]),
    head_dim=st.integers(1, 32).map(lambda x: 8 * x),
    page_size=st.sampled_from([1, 2, 8, 16, 64, 256]),
    block_table=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    e4m3=st.booleans(),
    packed=st.booleans(),
    append=st.booleans(),
    window=st.tuples(st.integers(-1, 150), st.integers(-1, 150)),
    softcap=st.sampled_from([0.0, 3.0]),
)
def test_any_combination(
    data,
    batch,
    heads,
    head_dim,
    page_size,
    block_table,
    dtype,
    e4m3,
    packed,
    append,
    window,
    softcap,
):
    lens = data.draw(st.lists(st.integers(0, 400), min_size=batch, max_size=batch))
    q_lens = data.draw(st.lists(st.integers(0, 16), min_size=batch, max_size=batch))
    p = problem(
        lens,
        q_lens if packed else None,
        heads=heads,
        head_dim=head_dim,
        page_size=page_size,
        block_table=block_table,
        dtype=dtype,
        cache_dtype=E4M3 if e4m3 else None,
        append=append,
        seed=data.draw(st.integers(0, 2**20)),
    )
    features = {"window": window, "softcap": softcap}
    if data.draw(st.booleans()):
        features["sinks"] = torch.randn(heads[0], device="cuda")
    if e4m3:
        features |= {"k_scale": 0.05, "v_scale": 0.05}
    mask = None
    if data.draw(st.booleans()):
        mask = torch.rand(batch, heads[0], 16, 400, device="cuda") < 0.7
    run(p, mask, {"deterministic": data.draw(st.booleans())}, **features)


def test_the_problem_itself_is_not_changed_by_its_reference():
    p = problem(LENS, append=True)
    before = clone(p.k_cache)
    p.expected()
    assert torch.equal(raw(p.k_cache), raw(before))
