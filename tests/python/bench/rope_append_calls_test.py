"""What bench_rope_append times is the same in ours and the peers, on small shapes and a CPU."""

import pytest
from absl import flags

from tools.bench import bench_rope_append, harness, peers

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    from astrai.extension.ops._kernel import Kernel

    flags.FLAGS(["test"])
    monkeypatch.setattr(harness, "DEVICE", "cpu")
    monkeypatch.setattr(Kernel, "direct", lambda self, *tensors: False)
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setattr(peers, "flashinfer", absent)
    yield
    flags.FLAGS.unparse_flags()


def absent():
    raise ImportError("not here")


def shape_of(**changes):
    small = {"tokens": 40, "q_heads": 4, "kv_heads": 2, "head_dim": 32}
    return {**bench_rope_append.DEFAULTS, **small, **changes}


def caches_of(call):
    """The caches that a call writes: what its defaults hold."""
    found = []

    def look(value):
        if isinstance(value, tuple):
            for item in value:
                look(item)
        elif isinstance(value, torch.Tensor) and value.dim() == 4:
            found.append(value)

    look(call.__defaults__)
    return found


@pytest.mark.parametrize(
    "changes",
    [{}, {"page_size": 1}, {"interleaved": True}, {"cache": "e4m3"}, {"tokens": 33}],
    ids=str,
)
def test_ours_and_torch_write_the_same(changes):
    found = bench_rope_append.candidates(shape_of(**changes), 2)
    assert list(found) == ["astrai", "torch.compile"]
    for mine, theirs in zip(found["astrai"].calls, found["torch.compile"].calls, strict=True):
        caches = caches_of(mine)
        assert [c.data_ptr() for c in caches] == [c.data_ptr() for c in caches_of(theirs)]
        results = []
        for call in (mine, theirs):
            for cache in caches:
                cache.view(torch.uint8).zero_()
            results.append([call(), *(cache.float() for cache in caches)])
        # A neighbour of e4m3 is an eighth away; torch rounds to bf16 before.
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a.float(), b.float(), atol=0.02, rtol=0.126)
        assert all(cache.float().abs().sum() > 0 for cache in caches)


class FlashInferLike:
    """The two calls of FlashInfer, as its documentation describes them."""

    def __init__(self):
        self.rope = self.page = self

    def apply_rope_with_cos_sin_cache_inplace(self, positions, q, k, dim, cos_sin, is_neox):
        cos, sin = cos_sin[positions.long()][:, None].chunk(2, dim=-1)
        for x in (q, k):
            heads = x.view(x.shape[0], -1, dim)
            heads.copy_(bench_rope_append.rotate(heads, cos, sin, not is_neox))

    def append_paged_kv_cache(self, k, v, batch, positions, caches, indices, indptr, last):
        size = caches[0].shape[1]
        assert int(indptr[-1]) == len(indices)
        for token, (b, position) in enumerate(zip(batch.tolist(), positions.tolist(), strict=True)):
            page = int(indices[indptr[b] + position // size])
            caches[0][page, position % size] = k[token]
            caches[1][page, position % size] = v[token]


@pytest.mark.parametrize("changes", [{}, {"page_size": 1}, {"interleaved": True}], ids=str)
def test_flashinfer_is_given_the_same_angles_and_slots(monkeypatch, changes):
    monkeypatch.setattr(peers, "flashinfer", FlashInferLike)
    found = bench_rope_append.candidates(shape_of(**changes), 1)
    assert list(found) == ["astrai", "flashinfer"]
    mine, theirs = found["astrai"].calls[0], found["flashinfer"].calls[0]
    caches = caches_of(mine)
    results = []
    for call in (mine, theirs):
        for cache in caches:
            cache.zero_()
        results.append([call(), *(cache.clone() for cache in caches)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a.float(), b.float(), atol=0.02, rtol=0.02)


def test_an_e4m3_cache_stands_against_torch_even_beside_flashinfer(monkeypatch):
    monkeypatch.setattr(peers, "flashinfer", FlashInferLike)
    assert list(bench_rope_append.candidates(shape_of(cache="e4m3"), 1))[1] == "torch.compile"
