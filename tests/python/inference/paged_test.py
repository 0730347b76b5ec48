"""Paged pool and tasks: tables, shared prefixes, padding; cached attention against whole texts."""

from __future__ import annotations

import pytest
import torch

from astrai.inference import InferenceWorkspace, PagePool, TaskCacheManager
from tests.python.inference.cache_calls import run
from tests.python.model import tiny

CONFIG = tiny.CONFIG
MAX_SEQ = 40
PAGE_SIZES = (1, 4, 16, 64)


def make(
    page_size: int, n_tokens: int = 192, max_batch: int = 3, **options
) -> tuple[PagePool, InferenceWorkspace]:
    pool = PagePool(
        CONFIG.num_layers,
        CONFIG.num_kv_heads,
        CONFIG.head_dim,
        max_batch,
        MAX_SEQ,
        "cpu",
        torch.float32,
        page_size,
        n_tokens,
        **options,
    )
    poison(pool)
    workspace = InferenceWorkspace(
        8, MAX_SEQ, CONFIG.num_heads, CONFIG.head_dim, "cpu", torch.float32, page_size=page_size
    )
    return pool, workspace


def poison(pool: PagePool) -> None:
    """What was never written must never be read."""
    pool.k_buffer.fill_(float("nan"))
    pool.v_buffer.fill_(float("nan"))


def by_page(pool: PagePool) -> torch.Tensor:
    """Keys and values, ``[pages, ...]``."""
    both = torch.stack((pool.k_buffer, pool.v_buffer))
    both = both.flatten(2, 3) if pool.page_size > 1 else both
    return both.unflatten(2, (-1, pool.page_size)).movedim(2, 0)


def slot(pool: PagePool, row: int, position: int) -> int:
    page = pool.row_pages(row)[position // pool.page_size]
    return page * pool.page_size + position % pool.page_size


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_tables_of_a_call(page_size):
    pool, workspace = make(page_size)
    pool.bind_tasks([0], [9], workspace, start_pos=0)  # so that pages do not begin at 0
    cache = pool.bind_tasks([2, 1], [17, 3], workspace, start_pos=[10, 0])
    assert cache.q_lens == [7, 3] and cache.lens == [17, 3] and not cache.contiguous
    places = [(2, p) for p in range(10, 17)] + [(1, p) for p in range(3)]
    assert cache.out_cache_loc.tolist() == [slot(pool, *place) for place in places]
    assert cache.positions.tolist() == [p for _, p in places]
    assert cache.qo_indptr.tolist() == [0, 7, 10] and cache.kv_indptr.tolist() == [0, 17, 20]
    assert cache.q_tile_to_batch.tolist() == [0, 1] and cache.q_tile_to_index.tolist() == [0, 0]
    assert cache.page_size == page_size
    for index, (row, length) in enumerate([(2, 17), (1, 3)]):
        if page_size == 1:
            assert cache.block_table is None
            table = cache.req_to_token[cache.req_pool_indices[index]]
        else:
            assert cache.req_to_token is None and cache.block_table.dtype == torch.int32
            table = cache.block_table[index]
        pages = pool.row_pages(row)
        assert len(pages) == -(-length // page_size)
        assert table[: len(pages)].tolist() == list(pages)
    owned = [page for row in range(3) for page in pool.row_pages(row)]
    assert len(set(owned)) == len(owned) and pool.padding_page not in owned


def test_work_map_of_long_chunks():
    pool = PagePool(1, 1, 8, 3, 256, "cpu", torch.float32, 16, 1024)
    workspace = InferenceWorkspace(3, 256, 1, 8, "cpu", torch.float32, page_size=16)
    cache = pool.bind_tasks([0, 1, 2], [70, 10, 130], workspace, start_pos=0)
    assert cache.q_tile_to_batch.tolist() == [0, 0, 1, 2, 2, 2]
    assert cache.q_tile_to_index.tolist() == [0, 1, 0, 0, 1, 2]
    assert pool.bind_tasks([0], [71], workspace).q_tile_to_batch is None


@pytest.mark.parametrize("page_size", [1, 4])
def test_tensors_keep_their_addresses(page_size):
    pool, workspace = make(page_size)
    names = ("out_cache_loc", "seq_lens", "req_pool_indices", "kv_indptr", "positions")
    names += ("block_table",) if page_size > 1 else ("req_to_token",)
    calls = [([0, 1], [4, 4], 0), ([1], [5], None), ([2, 0], [30, 5], [0, 4])]
    addresses = set()
    for rows, lens, start in calls:
        cache = pool.bind_tasks(rows, lens, workspace, start_pos=start)
        addresses.add(tuple(getattr(cache, name).data_ptr() for name in names))
    assert len(addresses) == 1


def test_a_float8_cache_names_its_scales_and_the_kernels_their_workspace():
    pool, _ = make(4)
    assert pool.bind_tasks([0], [1], make(4)[1]).k_scale is None
    half = PagePool(1, 1, 8, 1, 8, "cpu", torch.float8_e4m3fn, 4, 8, v_scale=0.5)
    workspace = InferenceWorkspace(
        1, 8, 1, 8, "cpu", torch.bfloat16, page_size=4, attention_bytes=64
    )
    cache = half.bind_tasks([0], [1], workspace)
    assert cache.k_buffer.dtype == cache.v_buffer.dtype == torch.float8_e4m3fn
    assert (cache.k_scale, cache.v_scale) == (1.0, 0.5)
    assert cache.workspace is workspace.attention and cache.workspace.numel() == 64


def test_more_changes_of_the_table_than_one_transfer_holds():
    pool = PagePool(1, 1, 8, 2, MAX_SEQ, "cpu", torch.float32, 1, 80)
    workspace = InferenceWorkspace(2, MAX_SEQ, 1, 8, "cpu", torch.float32, max_tokens=7)
    for row in (0, 1):
        assert pool.reserve(row, MAX_SEQ)
    pool.bind_tasks([1], [3], workspace)
    for row in (0, 1):
        assert pool.table[row].tolist() == list(pool.row_pages(row))
    assert set(pool.table[pool.padding_row].tolist()) == {pool.padding_page}


def test_out_of_pages_is_said_and_changes_nothing():
    pool, workspace = make(16, n_tokens=64)
    pool.bind_tasks([0], [40], workspace, start_pos=0)
    with pytest.raises(RuntimeError, match="row 1 needs 2 pages and has 0, got 1 free ones"):
        pool.bind_tasks([1], [17], workspace, start_pos=0)
    assert pool.pages.available == 1 and pool.row_pages(1) == ()
    assert pool.capacity == 40 and not pool.reserve(1, MAX_SEQ + 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pad_to": 1}, "pad_to must be 2 to 8, in a decode"),
        ({"pad_to": 9}, "pad_to must be 2 to 8, in a decode"),
        ({"pad_to": 4, "start_pos": 0}, "pad_to must be 2 to 8, in a decode"),
        ({"start_pos": [0]}, r"start_pos must be .* got \[0\] for \[3, 5\]"),
        ({"start_pos": [3, 0]}, r"start_pos must be .* got \[3, 0\] for \[3, 5\]"),
        ({"input_ids": [1]}, "input_ids must have 2 tokens, got 1"),
    ],
)
def test_wrong_bindings_are_refused(options, message):
    pool, workspace = make(4)
    with pytest.raises(ValueError, match=message):
        pool.bind_tasks([0, 1], [3, 5], workspace, **options)
    other = InferenceWorkspace(3, MAX_SEQ, 4, 32, "cpu", torch.float32, page_size=8)
    with pytest.raises(ValueError, match="workspace must be of the pool's page_size 4 and"):
        pool.bind_tasks([0], [3], other)


@torch.no_grad()
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_ragged_prefill_and_decode_equal_the_whole_text(page_size):
    """Prefill at once, decode in step, then a chunk that begins anywhere, over poisoned pages."""
    model = tiny.decoder()
    pool, workspace = make(page_size)
    generator = torch.Generator().manual_seed(5)
    full = [torch.randint(0, 97, (n,), generator=generator).tolist() for n in (17, 9, 25)]
    whole = [model(torch.tensor([text]))[0] for text in full]
    rows, cut = [2, 0, 1], 6
    heads = [text[: len(text) - cut] for text in full]
    out = run(model, pool, workspace, rows, heads, 0)
    expected = torch.cat([logits[: len(head)] for logits, head in zip(whole, heads, strict=True)])
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    for step in range(1, 4):
        texts = [text[: len(head) + step] for text, head in zip(full, heads, strict=True)]
        out = run(model, pool, workspace, rows, texts, None)
        expected = torch.stack([logits[len(t) - 1] for logits, t in zip(whole, texts, strict=True)])
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    out = run(model, pool, workspace, [1], [full[2][:25]], 20)
    torch.testing.assert_close(out, whole[2][20:25], rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("page_size", [1, 4])
def test_case_e02_padding_touches_no_page_but_its_own(page_size):
    """A decode of 3 padded to 8 gives the same logits and writes three slots and the padding."""
    model = tiny.decoder()
    texts = [[5, 17, 80, 2, 9], [60, 61, 62, 63, 64, 65, 66, 67, 68], [3]]
    logits, pages = [], []
    for pad_to in (None, 8):
        pool, workspace = make(page_size)
        workspace.input_ids.fill_(-1)  # indices that were not filled would fail
        workspace.req_pool_indices.fill_(-1)
        run(model, pool, workspace, [0, 1, 2], texts, 0)
        before = by_page(pool).clone()
        grown = [[*text, 7] for text in texts]
        lens = [len(text) for text in grown]
        cache = pool.bind_tasks([0, 1, 2], lens, workspace, input_ids=[7] * 3, pad_to=pad_to)
        size = 3 if pad_to is None else 8
        assert cache.seq_lens.tolist() == lens + [1] * (size - 3)
        assert cache.req_pool_indices.tolist() == [0, 1, 2] + [pool.padding_row] * (size - 3)
        if page_size > 1:
            assert (cache.block_table[3:] == pool.padding_page).all()
        assert cache.kv_indptr.shape == cache.qo_indptr.shape == (size + 1,)
        assert cache.max_len == (max(lens) if pad_to is None else MAX_SEQ)
        out = model(workspace.input_ids[:size], cache.positions, cache, "decode")
        assert torch.isfinite(out).all()
        logits.append(out[:3])
        after = by_page(pool)
        changed = ~((before == after) | (before.isnan() & after.isnan())).flatten(1).all(1)
        written = {pool.row_pages(row)[(n - 1) // page_size] for row, n in enumerate(lens)}
        assert set(changed.nonzero()[:, 0].tolist()) - {pool.padding_page} == written
        pages.append(after[: pool.padding_page])
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(pages[0], pages[1], rtol=1e-5, atol=1e-5, equal_nan=True)


def manager(page_size: int = 4, n_tokens: int = 64, **options) -> TaskCacheManager:
    return TaskCacheManager(make(page_size, n_tokens, **options)[0])


def test_tasks_share_full_pages_and_compute_at_least_one_token():
    tasks = manager()
    text = list(range(12))
    assert tasks.task_alloc("a", text) and tasks.task_cached("a") == 0
    tasks.task_record_hashes("a", text, 11)  # two full pages and three tokens
    assert tasks.task_alloc("b", text) and tasks.task_cached("b") == 8
    assert tasks.pool.row_pages(0)[:2] == tasks.pool.row_pages(1)[:2]
    assert tasks.pool.row_pages(0)[2] != tasks.pool.row_pages(1)[2]
    assert tasks.task_alloc("c", text[:8]), "a prompt that is cached whole"
    assert tasks.task_cached("c") == 4
    for name in "abc":
        tasks.task_free(name)
    pages = tasks.pool.pages
    assert pages.available == pages.n_pages and pages.idle == 2
    assert tasks.task_alloc("d", text) and tasks.task_cached("d") == 8, "found after the end too"


def test_pages_computed_twice_are_given_back():
    tasks = manager()
    text = list(range(9))
    assert tasks.task_alloc("a", text) and tasks.task_alloc("b", text)
    available = tasks.pool.pages.available
    for name in "ab":
        tasks.task_record_hashes(name, text)
    assert tasks.pool.row_pages(0)[:2] == tasks.pool.row_pages(1)[:2]
    assert tasks.pool.pages.available == available + 2
    workspace = InferenceWorkspace(3, MAX_SEQ, 4, 32, "cpu", torch.float32, page_size=4)
    cache = tasks.bind(["a", "b"], workspace)
    assert cache.block_table[0, :2].tolist() == cache.block_table[1, :2].tolist()


def test_tasks_that_do_not_fit_change_nothing():
    tasks = manager(n_tokens=24)  # 6 pages
    assert tasks.task_alloc("a", list(range(12)))
    tasks.task_record_hashes("a", list(range(12)))
    pages = tasks.pool.pages
    for prompt, spare in ((list(range(40, 56)), 0), (list(range(40, 52)), 1), ([0] * 41, 0)):
        assert not tasks.task_alloc("b", prompt, spare)
        assert pages.available == 3 and tasks.pool.free_rows == 2
    assert not tasks.task_alloc("b", [*range(12), *range(60, 74)]), "not even with shared pages"
    assert [pages.holders(p) for p in tasks.pool.row_pages(0)] == [1, 1, 1]
    assert tasks.task_alloc("b", list(range(40, 52)))
    assert not tasks.task_extend("a", 12) and tasks.task_extend("a", 11)
    tasks.task_free("b")
    assert tasks.task_extend("a", 12)
    for action in (tasks.task_free, tasks.task_cached):
        with pytest.raises(ValueError, match="task must be a known one, got 'b'"):
            action("b")
    with pytest.raises(ValueError, match="task must be new, got 'a'"):
        tasks.task_alloc("a", [1])


def test_a_bind_is_steady_if_it_goes_on_from_the_one_before():
    tasks = manager()
    workspace = InferenceWorkspace(3, MAX_SEQ, 4, 32, "cpu", torch.float32, page_size=4)
    steady = []
    for name in "ab":
        assert tasks.task_alloc(name, [1, 2, 3])

    def decode(names):
        for name in names:
            assert tasks.task_extend(name, tasks._task(name).length)
        tasks.bind(names, workspace)
        steady.append(tasks.bind_was_steady)

    tasks.bind(["a", "b"], workspace, start_pos=0)
    steady.append(tasks.bind_was_steady)
    for names in ("ab", "ab", "ab", "a", "a", "ba"):
        decode(list(names))
    assert steady == [False, False, True, True, False, True, False]


def test_tasks_on_a_contiguous_pool():
    pool = PagePool(1, 1, 8, 2, 8, "cpu", torch.float32)
    tasks = TaskCacheManager(pool)
    assert tasks.task_alloc("a", [1, 2, 3]) and tasks.task_alloc("b", [1, 2, 3])
    tasks.task_record_hashes("a", [1, 2, 3])
    assert tasks.task_cached("b") == 0
    assert not tasks.task_alloc("c", [1]), "no row"
    assert tasks.task_extend("a", 7) and not tasks.task_extend("a", 8)
    workspace = InferenceWorkspace(2, 8, 1, 8, "cpu", torch.float32)
    assert tasks.bind(["a", "b"], workspace).lens == [8, 3]
    tasks.task_free("a")
    assert pool.free_rows == 1
