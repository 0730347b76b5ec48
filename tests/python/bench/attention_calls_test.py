"""What bench_attention times is the same function for ours and every peer.

On small shapes and on a CPU: there our operators run their references, and SDPA what torch has.
"""

import math

import pytest
from absl import flags

from tools.bench import attention_paged, attention_rows, bench_attention, harness, peers

torch = pytest.importorskip("torch")

SMALL = {"batch": 3, "q_heads": 4, "kv_heads": 2, "head_dim": 32}


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    from astrai.extension import ops
    from astrai.extension.ops._kernel import Kernel

    flags.FLAGS(["test"])
    torch.manual_seed(torch.seed() % 2**31)
    monkeypatch.setattr(harness, "DEVICE", "cpu")
    monkeypatch.setattr(Kernel, "direct", lambda self, *tensors: False)
    monkeypatch.setattr(ops, "attn_paged_decode_workspace_size", lambda *a, **k: 64)
    monkeypatch.setattr(peers, "sdpa", sdpa)
    monkeypatch.setattr(peers, "flashinfer", absent)
    monkeypatch.setattr(peers, "flash_attention_4", absent)
    yield
    flags.FLAGS.unparse_flags()


def sdpa(backend, *tensors, **kwargs):
    return lambda: torch.nn.functional.scaled_dot_product_attention(*tensors, **kwargs)


def absent():
    raise ImportError("not here")


def shape_of(op, **changes):
    shape = {**attention_rows.DEFAULTS[op], **SMALL, "kv_len": 64, **changes}
    if op.endswith("prefill"):
        shape["q_len"] = shape["q_len"] or shape["kv_len"]
    return shape


def assert_all_agree(candidates, expected):
    """All candidates are there, and those that can be compared give what ours gives."""
    assert list(candidates) == expected
    ours = candidates["astrai"]
    for call, index in zip(ours.calls, range(99), strict=False):
        mine = ours.result(call())
        assert torch.isfinite(mine).all()
        for name, other in candidates.items():
            assert len(other.calls) == len(ours.calls), name
            result = other.calls[index]()
            if other.result is not None:
                torch.testing.assert_close(
                    other.result(result).float(), mine.float(), atol=0.03, rtol=0.02, msg=name
                )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("q_len", [0, 16])
def test_dense_prefill(causal, q_len):
    shape = shape_of("prefill", causal=causal, q_len=q_len)
    found = bench_attention._prefill_candidates(shape)
    assert_all_agree(found, ["astrai", "cudnn", "flash_attention_2"])


def test_dense_decode():
    found = bench_attention._decode_candidates(shape_of("decode"), 2)
    assert_all_agree(found, ["astrai", "cudnn", "flash_attention_2"])


@pytest.mark.parametrize(
    ("changes", "others"),
    [
        ({}, ["cudnn_dense"]),
        ({"page_size": 1}, ["cudnn_dense", "astrai_page_16"]),
        ({"page_size": 1, "kv_len": 63}, ["cudnn_dense"]),
        ({"kv_len": 61}, ["cudnn_dense"]),
        ({"q_len": 4}, ["astrai_q_len_1"]),
        ({"cache": "e4m3"}, ["astrai_bf16_cache"]),
        ({"window_left": 15}, ["cudnn_dense"]),
        ({"deterministic": True}, ["astrai_not_deterministic"]),
        ({"ragged": True}, []),
    ],
    ids=str,
)
def test_paged_decode(changes, others):
    found = attention_paged.paged_decode_candidates(shape_of("paged_decode", **changes), 2)
    assert_all_agree(found, ["astrai", *others])


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("causal", [True, False])
def test_paged_prefill(page_size, causal):
    shape = shape_of("paged_prefill", page_size=page_size, causal=causal)
    found = attention_paged.paged_prefill_candidates(shape)
    dense = ["astrai_dense"] if page_size == 16 else []
    assert_all_agree(found, ["astrai", "cudnn_dense", *dense])


class FlashInferLike:
    """Attends as FlashInfer does, from the page lists that its plan is given."""

    def __init__(self, table, lengths, page_size, q, kv_heads, qo_indptr=None, causal=True, _=None):
        self.indptr, self.indices, self.last = peers.flashinfer_pages(table, lengths, page_size)
        self.qo_indptr = torch.arange(len(lengths) + 1) if qo_indptr is None else qo_indptr
        self.causal, self.scale = causal, 1 / math.sqrt(q.shape[-1])

    def __call__(self, q, caches):
        parts = []
        for b in range(len(self.last)):
            pages = self.indices[self.indptr[b] : self.indptr[b + 1]].long()
            count = (len(pages) - 1) * caches[0].shape[1] + int(self.last[b])
            k, v = (cache[pages].flatten(0, 1)[:count].float() for cache in caches)
            rows = q[self.qo_indptr[b] : self.qo_indptr[b + 1]].float()
            group = q.shape[1] // k.shape[1]
            scores = torch.einsum("qhd,khd->hqk", rows, k.repeat_interleave(group, 1)) * self.scale
            if self.causal:
                seen = torch.ones(len(rows), count, dtype=torch.bool).tril(count - len(rows))
                scores = scores.masked_fill(~seen, -math.inf)
            weights = scores.softmax(-1)
            parts.append(torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1)))
        return torch.cat(parts).to(q.dtype)


@pytest.mark.parametrize(
    "changes",
    [{}, {"page_size": 1}, {"kv_len": 61}, {"q_len": 4}, {"ragged": True}],
    ids=str,
)
def test_flashinfer_is_given_the_same_cache_and_lengths(monkeypatch, changes):
    monkeypatch.setattr(peers, "flashinfer", lambda: "there")
    monkeypatch.setattr(peers, "flashinfer_decode", FlashInferLike)
    monkeypatch.setattr(peers, "flashinfer_prefill", FlashInferLike)
    found = attention_paged.paged_decode_candidates(shape_of("paged_decode", **changes), 2)
    assert list(found)[:2] == ["astrai", "flashinfer"]
    assert_all_agree(found, list(found))


def test_flashinfer_prefill_is_given_the_same_cache_and_lengths(monkeypatch):
    monkeypatch.setattr(peers, "flashinfer", lambda: "there")
    monkeypatch.setattr(peers, "flashinfer_prefill", FlashInferLike)
    found = attention_paged.paged_prefill_candidates(shape_of("paged_prefill", q_len=16))
    assert_all_agree(found, ["astrai", "flashinfer", "astrai_dense"])


def test_cudnn_takes_the_place_of_a_flashinfer_that_fails(monkeypatch, capsys):
    def broken(*args):
        raise OSError("no compiler\nsecond line")

    monkeypatch.setattr(peers, "flashinfer", lambda: "there")
    monkeypatch.setattr(peers, "flashinfer_decode", broken)
    found = attention_paged.paged_decode_candidates(shape_of("paged_decode"), 1)
    assert list(found) == ["astrai", "cudnn_dense"]
    assert "flashinfer does not run here: no compiler" in capsys.readouterr().err


def test_flashinfers_form_of_a_block_table():
    table = torch.tensor([[4, 2, -1], [0, 1, 3]], dtype=torch.int32)
    indptr, indices, last = peers.flashinfer_pages(table, [17, 48], 16)
    assert indptr.tolist() == [0, 2, 5]
    assert indices.tolist() == [4, 2, 0, 1, 3]
    assert last.tolist() == [1, 16]
    assert {x.dtype for x in (indptr, indices, last)} == {torch.int32}


def test_a_page_belongs_to_one_request():
    pages = attention_paged.Pages([40, 1, 16], 16)
    used = pages.table[pages.table >= 0].tolist()
    assert sorted(used) == list(range(5))
    assert (pages.table >= 0).sum(1).tolist() == [3, 1, 1]
    assert pages.kv_indptr.tolist() == [0, 40, 41, 57]
