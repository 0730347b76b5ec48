"""Rotary on a GPU: the policy takes the kernel where it can, and both ways agree."""

import pytest
import torch

from astrai.extension import (
    ExplicitSelectionError,
    apply_rotary_emb,
    get_rotary_emb,
    op_backend,
    resolve,
    rotary_embed,
)
from tests.python.backend.attention_cases import randn, relative_error

TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(33, 9, 128), (2, 17, 1, 64), (1, 1, 4, 256)])
def test_apply(shape, dtype):
    x = randn(*shape, dtype=dtype, device="cuda")
    freqs = get_rotary_emb(shape[-1], 2048, device="cuda")
    freqs = freqs[torch.randint(0, 2048, shape[:-2], device="cuda")]
    assert resolve("rotary", x, freqs).record.name == "cuda"
    with op_backend(rotary="torch"):
        want = apply_rotary_emb(x.double(), freqs)
    with op_backend(rotary="cuda"):
        got = apply_rotary_emb(x, freqs)
    assert got.dtype is dtype and relative_error(got, want) < TOLERANCE[dtype]
    assert torch.equal(apply_rotary_emb(x, freqs), got)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [32, 96, 128])
@pytest.mark.parametrize("inplace", [False, True])
def test_embed(interleaved, rotary_dim, inplace):
    fused = randn(21, (8 + 2 * 2) * 128, dtype=torch.bfloat16, device="cuda")
    q = fused[:, : 8 * 128].unflatten(-1, (8, 128))
    k = fused[:, 8 * 128 : 10 * 128].unflatten(-1, (2, 128))
    rest = fused[:, 10 * 128 :].clone()
    cache = randn(64, rotary_dim, device="cuda")
    positions = torch.randint(0, 64, (21,), device="cuda")
    with op_backend(rotary="torch"):
        want = rotary_embed(q.double(), k.double(), cache, positions, interleaved, rotary_dim)
    tail = q[..., rotary_dim:].clone()
    with op_backend(rotary="cuda"):
        got = rotary_embed(q, k, cache, positions, interleaved, rotary_dim, inplace)
    for a, b in zip(got, want, strict=True):
        assert relative_error(a, b) < 4e-3
    assert torch.equal(got[0][..., rotary_dim:], tail)
    assert (got[0].data_ptr() == q.data_ptr()) == inplace
    assert torch.equal(fused[:, 10 * 128 :], rest)


def test_position_outside_the_cache_is_nan_in_both():
    q = randn(4, 2, 64, dtype=torch.bfloat16, device="cuda")
    cache, positions = randn(6, 32, device="cuda"), torch.tensor([5, 6, -1, 0], device="cuda")
    for name in ("cuda", "torch"):
        with op_backend(rotary=name):
            got, _ = rotary_embed(q, None, cache, positions)
        assert torch.equal(
            torch.isnan(got).any(-1).any(-1).cpu(), torch.tensor([0, 1, 1, 0]).bool()
        )
        assert torch.equal(got[..., 32:], q[..., 32:])


def test_odd_strides_are_taken():
    x = randn(5, 64, 4, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
    freqs, cache = get_rotary_emb(64, 5, device="cuda"), randn(8, 64, device="cuda")
    positions = torch.arange(5, device="cuda")
    with op_backend(rotary="cuda"):
        assert torch.equal(apply_rotary_emb(x, freqs), apply_rotary_emb(x.contiguous(), freqs))
        got = rotary_embed(x, None, cache.t().contiguous().t(), positions)[0]
        assert torch.equal(got, rotary_embed(x.contiguous(), None, cache, positions)[0])


def test_fallbacks():
    freqs = get_rotary_emb(64, 3, device="cuda")
    x = randn(3, 2, 64, device="cuda")
    assert resolve("rotary", x, freqs).record.name == "torch"
    grad = x.bfloat16().requires_grad_()
    assert resolve("rotary", grad, freqs).record.name == "torch"
    torch.autograd.grad(apply_rotary_emb(grad, freqs).sum(), grad)
    with torch.no_grad():
        assert resolve("rotary", grad, freqs).record.name == "cuda"
    with op_backend(rotary="cuda"), pytest.raises(ExplicitSelectionError, match="float32"):
        apply_rotary_emb(x, freqs)
    assert resolve("rotary", x.bfloat16().cpu(), freqs.cpu()).record.name == "torch"


@pytest.mark.parametrize("dynamic", [False, True])
def test_case_e09_compiles_to_one_graph_with_the_kernel(dynamic):
    torch._dynamo.reset()
    seen = []

    def spy(graph, inputs):
        seen.append(graph.print_readable(print_output=False))
        return graph.forward

    def call(x, freqs, cache, positions):
        q, k = rotary_embed(x, x[:, :1], cache, positions)
        return apply_rotary_emb(x, freqs), q, k

    traced = torch.compile(call, fullgraph=True, dynamic=dynamic, backend=spy)
    for tokens in (3, 9):
        x = randn(tokens, 4, 64, dtype=torch.bfloat16, device="cuda")
        arguments = (
            x,
            get_rotary_emb(64, tokens, device="cuda"),
            randn(16, 64, device="cuda"),
            torch.arange(tokens, device="cuda"),
        )
        for a, b in zip(traced(*arguments), call(*arguments), strict=True):
            assert torch.equal(a, b)
    assert all("astrai.rotary_emb" in text and "astrai.rotary_embed" in text for text in seen)
    torch._dynamo.reset()
