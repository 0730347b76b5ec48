"""attention(rotary=...): q and k are rotated once, by attention or by a backend that fuses it."""

from __future__ import annotations

import torch

from astrai.extension import AttentionBackend, Rotary, attention, rotary_embed


def table(positions: int, dim: int) -> torch.Tensor:
    angles = torch.outer(torch.arange(positions).double(), 100 ** -torch.arange(0, 1, 2 / dim))
    return torch.cat((angles.cos(), angles.sin()), dim=-1).float()


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


class Recording(AttentionBackend):
    """Keeps what it is given."""

    def forward(self, q, k, v, kv_cache, layer_id, attn_mask, is_causal, fwd, **used):
        self.given = (q, k, v, used)
        return q


class Fusing(Recording):
    @classmethod
    def fuses_rotary(cls) -> bool:
        return True


def test_dense_calls_rotate_q_and_k():
    q, (k, v) = randn(2, 5, 4, 8).requires_grad_(), randn(2, 2, 5, 2, 8)
    kept = q.detach().clone(), k.clone()
    rotary = Rotary(table(9, 8), torch.tensor([[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]]), True)
    out = attention(q, k, v, is_causal=True, rotary=rotary)
    expected = attention(*rotary_embed(q, k, *rotary), v, is_causal=True)
    assert torch.equal(out, expected) and not torch.equal(out, attention(q, k, v, is_causal=True))
    (gradient,) = torch.autograd.grad(out.square().sum(), q)
    assert gradient.isfinite().all()
    assert torch.equal(q, kept[0]) and torch.equal(k, kept[1]), "the call's own tensors stay"


def test_a_backend_gets_rotary_only_if_it_fuses_it_and_there_is_a_cache():
    q, k, v = randn(3, 4, 8), randn(3, 2, 8), randn(3, 2, 8)
    rotary = Rotary(table(9, 8), torch.tensor([2, 5, 8]))
    cache = type("Cache", (), {"k_buffer": randn(1, 9, 2, 8)})()
    rotated = rotary_embed(q, k, *rotary)
    plain, fusing = Recording(), Fusing()
    attention(q, k, v, cache, fwd="prefill", backend=plain, rotary=rotary)
    assert torch.equal(plain.given[0], rotated[0]) and torch.equal(plain.given[1], rotated[1])
    assert plain.given[2] is v and plain.given[3] == {}
    attention(q, k, v, cache, fwd="prefill", backend=fusing, rotary=rotary)
    assert fusing.given[0] is q and fusing.given[1] is k and fusing.given[3] == {"rotary": rotary}
    attention(q[None], k[None], v[None], backend=fusing, rotary=rotary)
    assert torch.equal(fusing.given[0][0], rotated[0]) and fusing.given[3] == {}
