"""KV cache: tables of a call; cached attention equals attention over the whole text."""

from __future__ import annotations

import pytest
import torch

from astrai.inference import InferenceWorkspace, PagePool
from tests.python.inference.cache_calls import run
from tests.python.model import tiny

CONFIG = tiny.CONFIG
MAX_SEQ = 40


def make(max_batch: int = 3) -> tuple[PagePool, InferenceWorkspace]:
    pool = PagePool(
        CONFIG.num_layers,
        CONFIG.num_kv_heads,
        CONFIG.head_dim,
        max_batch,
        MAX_SEQ,
        "cpu",
        torch.float32,
    )
    pool.k_buffer.fill_(float("nan"))  # what was never written must never be read
    pool.v_buffer.fill_(float("nan"))
    workspace = InferenceWorkspace(
        max_batch, MAX_SEQ, CONFIG.num_heads, CONFIG.head_dim, "cpu", torch.float32
    )
    return pool, workspace


def test_tables_of_a_prefill():
    pool, workspace = make()
    cache = pool.bind_tasks([2, 0], [5, 3], workspace, start_pos=1)
    assert cache.k_buffer.shape == (CONFIG.num_layers, 3 * MAX_SEQ, 2, 32)
    assert cache.req_pool_indices.tolist() == cache.rows == [2, 0]
    assert cache.seq_lens.tolist() == cache.lens == [5, 3]
    assert cache.seq_lens.dtype == torch.int64
    assert cache.q_lens == [4, 2] and cache.max_len == 5 and cache.contiguous
    assert cache.kv_indptr.tolist() == [0, 5, 8]
    assert cache.qo_indptr.tolist() == [0, 4, 6]
    assert cache.out_cache_loc.tolist() == [81, 82, 83, 84, 1, 2]
    for row, position, slot in zip(
        [2, 2, 2, 2, 0, 0], [1, 2, 3, 4, 1, 2], cache.out_cache_loc, strict=True
    ):
        assert cache.req_to_token[row, position] == slot
    for name in ("req_to_token", "req_pool_indices", "out_cache_loc", "kv_indptr", "qo_indptr"):
        assert getattr(cache, name).dtype == torch.int32, name


def test_tables_of_a_decode():
    pool, workspace = make()
    cache = pool.bind_tasks([1, 2], [7, 1], workspace)
    assert cache.out_cache_loc.tolist() == [40 + 6, 80]
    assert cache.q_lens == [1, 1] and cache.qo_indptr.tolist() == [0, 1, 2]
    assert cache.kv_indptr.tolist() == [0, 7, 8]


def test_index_tensors_keep_their_addresses():
    pool, workspace = make()
    first = pool.bind_tasks([0, 1], [4, 4], workspace, start_pos=0)
    addresses = [first.out_cache_loc.data_ptr(), first.seq_lens.data_ptr()]
    second = pool.bind_tasks([1], [5], workspace)
    assert [second.out_cache_loc.data_ptr(), second.seq_lens.data_ptr()] == addresses


def test_rows_are_given_once_and_come_back():
    pool, _ = make()
    rows = [pool.alloc_row() for _ in range(3)]
    assert sorted(rows) == [0, 1, 2] and pool.free_rows == 0
    with pytest.raises(RuntimeError, match="all 3 rows are in use"):
        pool.alloc_row()
    pool.free_row(1)
    assert pool.alloc_row() == 1
    pool.free_row(2)
    for row in (2, -1, 3):
        with pytest.raises(ValueError, match="must be a row in use"):
            pool.free_row(row)


@pytest.mark.parametrize(
    ("rows", "lens", "start", "message"),
    [
        ([], [], None, "one length of 1 to 3, got 0 and 0"),
        ([0], [1, 2], None, "one length of 1 to 3, got 1 and 2"),
        ([0, 0], [1, 2], None, "distinct rows below 3"),
        ([3], [1], None, "distinct rows below 3"),
        ([0], [0], None, "seq_lens must be 1 to 40"),
        ([0], [41], None, "seq_lens must be 1 to 40"),
        ([0, 1], [5, 3], 3, "start_pos must be 0 or more and below every length"),
        ([0], [5], -1, "start_pos must be 0 or more"),
    ],
)
def test_wrong_bindings_are_refused(rows, lens, start, message):
    pool, workspace = make()
    with pytest.raises(ValueError, match=message):
        pool.bind_tasks(rows, lens, workspace, start_pos=start)


def test_wrong_pools_are_refused():
    with pytest.raises(ValueError, match="max_seq_len must be at least 1, got 0"):
        PagePool(1, 1, 8, 1, 0, "cpu", torch.float32)
    with pytest.raises(ValueError, match=r"page_size must be 1 in a contiguous pool .* got 16"):
        PagePool(1, 1, 8, 1, 8, "cpu", torch.float32, page_size=16)
    for page_size in (0, 3, 512):
        with pytest.raises(ValueError, match=f"power of two up to 256, got {page_size}"):
            PagePool(1, 1, 8, 1, 8, "cpu", torch.float32, page_size, n_tokens=1024)
    with pytest.raises(ValueError, match="n_tokens must be at least 1, got 0"):
        PagePool(1, 1, 8, 1, 8, "cpu", torch.float32, n_tokens=0)
    with pytest.raises(ValueError, match="k_scale and v_scale must be None unless"):
        PagePool(1, 1, 8, 1, 8, "cpu", torch.bfloat16, k_scale=0.5)
    with pytest.raises(ValueError, match="slots are int32"):
        PagePool(1, 1, 8, 2**20, 2**12, "meta", torch.float32)
    with pytest.raises(ValueError, match="slots are int32"):
        PagePool(1, 1, 8, 1, 8, "meta", torch.float32, 16, n_tokens=2**31 - 16)
    pool, workspace = make()
    with pytest.raises(ValueError, match="device must be the pool's cpu"):
        pool.bind_tasks([0], [1], workspace, device="meta")
    with pytest.raises(ValueError, match="at most 120 elements, got 121"):
        workspace.fill_input_ids(range(121))


@torch.no_grad()
def test_ragged_prefill_and_decode_equal_the_whole_text():
    """Three requests in mixed rows: prefill at once, decode in step, then chunked prefill."""
    model = tiny.decoder()
    pool, workspace = make()
    generator = torch.Generator().manual_seed(5)
    full = [torch.randint(0, 97, (n,), generator=generator).tolist() for n in (17, 9, 25)]
    whole = [model(torch.tensor([text]))[0] for text in full]
    rows, cut = [2, 0, 1], 6
    heads = [text[: len(text) - cut] for text in full]

    out = run(model, pool, workspace, rows, heads, 0)
    expected = torch.cat([logits[: len(head)] for logits, head in zip(whole, heads, strict=True)])
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    for step in range(1, cut // 2 + 1):
        texts = [text[: len(head) + step] for text, head in zip(full, heads, strict=True)]
        out = run(model, pool, workspace, rows, texts, None)
        expected = torch.stack([logits[len(t) - 1] for logits, t in zip(whole, texts, strict=True)])
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)

    chunk = full[2][:10]
    run(model, pool, workspace, [1], [chunk[:4]], 0)
    out = run(model, pool, workspace, [1], [chunk], 4)
    torch.testing.assert_close(out, whole[2][4:10], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_row_used_again_sees_nothing_of_the_request_before():
    model = tiny.decoder()
    pool, workspace = make(1)
    run(model, pool, workspace, [0], [list(range(30))], 0)
    out = run(model, pool, workspace, [0], [[50, 3, 9]], 0)
    torch.testing.assert_close(out, model(torch.tensor([[50, 3, 9]]))[0], rtol=1e-4, atol=1e-4)


def test_decoder_with_a_cache_checks_its_arguments():
    pool, workspace = make()
    cache = pool.bind_tasks([0], [2], workspace, start_pos=0)
    with pytest.raises(ValueError, match=r"must both be \[tokens\] with a cache"):
        tiny.decoder()(torch.tensor([[1, 2]]), kv_cache=cache, fwd="prefill")
