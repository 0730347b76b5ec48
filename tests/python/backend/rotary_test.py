"""Rotary policy and torch fallback against complex multiplication in float64."""

import math

import pytest
import torch

from astrai.extension import (
    ExplicitSelectionError,
    ShapeError,
    apply_rotary_emb,
    explain,
    get_rotary_emb,
    op_backend,
    resolve,
    rotary_embed,
)
from tests.python.backend.attention_cases import randn, relative_error


def rotated(x, angles, interleaved):
    """Each pair as a complex number, times exp(i angle); angles [..., pairs]."""
    x = x.double()
    half = x.shape[-1] // 2
    pairs = x.unflatten(-1, (half, 2)) if interleaved else torch.stack(x.split(half, -1), -1)
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(
        torch.ones_like(angles), angles
    ).unsqueeze(-2)
    pairs = torch.view_as_real(turned)
    return pairs.flatten(-2) if interleaved else torch.cat([pairs[..., 0], pairs[..., 1]], -1)


def angle_table(dim, positions, base=10000.0):
    frequency = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    return positions.double()[..., None] * frequency


def cos_sin_cache(dim, max_pos):
    angles = angle_table(dim, torch.arange(max_pos))
    return torch.cat([angles.cos(), angles.sin()], -1).float()


def test_table():
    table = get_rotary_emb(8, 70000, base=500000.0)
    assert table.shape == (70000, 4, 2) and table.dtype is torch.float32
    for position, pair in [(0, 0), (1, 0), (69999, 0), (12345, 3)]:
        angle = position * 500000.0 ** (-2 * pair / 8)
        want = torch.tensor([math.cos(angle), math.sin(angle)])
        torch.testing.assert_close(table[position, pair], want, rtol=0, atol=1e-7)
    with pytest.raises(ShapeError, match="dim must be even and positive, got 7"):
        get_rotary_emb(7, 4)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float64, 1e-7),
        (torch.float32, 1e-6),
        (torch.float16, 1e-3),
        (torch.bfloat16, 5e-3),
    ],
)
@pytest.mark.parametrize("shape", [(5, 3, 16), (2, 5, 1, 16), (2, 5, 3, 16), (2, 2, 5, 3, 16)])
def test_apply(shape, dtype, tolerance):
    x = randn(*shape, dtype=dtype)
    positions = torch.arange(7, 7 + math.prod(shape[:-2])).view(shape[:-2])
    freqs = get_rotary_emb(16, 64)[positions]
    before = x.clone()
    got = apply_rotary_emb(x, freqs)
    assert got.dtype is dtype and got.shape == x.shape
    assert relative_error(got, rotated(x, angle_table(16, positions), True)) < tolerance
    assert torch.equal(x, before)


def test_apply_broadcasts_over_the_batch():
    x = randn(2, 5, 3, 16)
    freqs = get_rotary_emb(16, 5)
    torch.testing.assert_close(apply_rotary_emb(x, freqs)[1], apply_rotary_emb(x[1], freqs))
    torch.testing.assert_close(apply_rotary_emb(x, freqs[None]), apply_rotary_emb(x, freqs))


def test_apply_is_differentiable():
    x = randn(3, 2, 8, dtype=torch.float64).requires_grad_()
    freqs = get_rotary_emb(8, 3)
    assert torch.autograd.gradcheck(lambda x: apply_rotary_emb(x, freqs), (x,))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [32, 64, 96, 128])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("batched", [False, True])
def test_case_d15_partial_rotation_passes_the_rest_through(
    interleaved, rotary_dim, inplace, batched
):
    lead = (2, 3) if batched else (6,)
    q, k = randn(*lead, 4, 128, seed=1), randn(*lead, 1, 128, seed=2)
    positions = torch.tensor([3, 0, 9, 9, 1, 19])
    before = q.clone(), k.clone()
    if batched:
        positions = positions.view(lead)
    out = rotary_embed(
        q, k, cos_sin_cache(rotary_dim, 20), positions, interleaved, rotary_dim, inplace
    )
    for got, x, old in zip(out, (q, k), before, strict=True):
        want = rotated(old[..., :rotary_dim], angle_table(rotary_dim, positions), interleaved)
        assert relative_error(got[..., :rotary_dim], want) < 1e-6
        assert torch.equal(got[..., rotary_dim:], old[..., rotary_dim:])
        # case D17: an input changes only when asked to.
        assert (got is x) == inplace and torch.equal(x, got if inplace else old)


def test_case_d17_pairings_differ_and_default_is_half_split():
    q = randn(4, 2, 16)
    cache, positions = cos_sin_cache(16, 8), torch.tensor([1, 2, 3, 4], dtype=torch.int32)
    half, none = rotary_embed(q, None, cache, positions)
    assert none is None
    assert relative_error(half, rotated(q, angle_table(16, positions), False)) < 1e-6
    whole, _ = rotary_embed(q, None, cache, positions, interleaved=True)
    assert relative_error(whole, rotated(q, angle_table(16, positions), True)) < 1e-6
    assert relative_error(whole, half) > 0.1


def test_case_d04_slices_of_a_fused_projection():
    fused = randn(5, 8 * 32)
    q, k = fused[:, : 4 * 32].unflatten(-1, (4, 32)), fused[:, 128:192].unflatten(-1, (2, 32))
    cache, positions = cos_sin_cache(32, 8), torch.arange(5)
    got = rotary_embed(q, k, cache, positions)
    want = rotary_embed(q.contiguous(), k.contiguous(), cache, positions)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    rest = fused[:, 192:].clone()
    rotary_embed(q, k, cache, positions, inplace=True)
    assert torch.equal(q, want[0]) and torch.equal(k, want[1])
    assert torch.equal(fused[:, 192:], rest)


def test_position_outside_the_cache_shows_as_nan():
    q = randn(4, 2, 16)
    got, _ = rotary_embed(q, None, cos_sin_cache(8, 6), torch.tensor([5, 6, -1, 0]))
    assert torch.isnan(got[1:3, :, :8]).all()
    assert torch.equal(got[1:3, :, 8:], q[1:3, :, 8:])
    assert torch.isfinite(got[[0, 3]]).all()
    nothing, _ = rotary_embed(q, None, torch.ones(0, 8), torch.arange(4))
    assert torch.isnan(nothing[..., :8]).all()


def test_embed_is_differentiable():
    q = randn(3, 2, 8, dtype=torch.float64).requires_grad_()
    cache, positions = cos_sin_cache(8, 3), torch.arange(3)
    assert torch.autograd.gradcheck(lambda q: rotary_embed(q, None, cache, positions)[0], (q,))


def test_empty():
    assert apply_rotary_emb(torch.ones(0, 2, 8), torch.ones(0, 4, 2)).shape == (0, 2, 8)
    q, k = rotary_embed(
        torch.ones(0, 2, 8), torch.ones(0, 1, 8), torch.ones(4, 8), torch.ones(0, dtype=torch.int64)
    )
    assert q.shape == (0, 2, 8) and k.shape == (0, 1, 8)


@pytest.mark.parametrize(
    ("x", "freqs", "error", "message"),
    [
        ((3, 2, 7), (3, 3, 2), ShapeError, "even head_dim"),
        ((3, 2, 8), (3, 3, 2), ShapeError, r"freqs_cis must end in \[4, 2\]"),
        ((3, 2, 8), (5, 4, 2), ShapeError, "leading dims"),
        ((3, 2, 8), (1, 1, 3, 4, 2), ShapeError, "leading dims"),
    ],
)
def test_bad_apply(x, freqs, error, message):
    with pytest.raises(error, match=message):
        apply_rotary_emb(torch.ones(x), torch.ones(freqs))
    with pytest.raises(TypeError, match="x must be floating"):
        apply_rotary_emb(torch.ones(3, 2, 8, dtype=torch.int32), torch.ones(3, 4, 2))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": torch.ones(4, 16)}, ShapeError, "q must be 3D or 4D"),
        ({"k": torch.ones(5, 2, 16)}, ShapeError, "k must have q's tokens and head_dim"),
        ({"k": torch.ones(4, 2, 16).half()}, TypeError, "k must have q's dtype"),
        ({"cos_sin_cache": torch.ones(9)}, ShapeError, "cos_sin_cache must be 2D"),
        ({"cos_sin_cache": torch.ones(9, 18)}, ShapeError, "rotary_dim must be even and 2 to"),
        ({"rotary_dim": 8}, ShapeError, "must have rotary_dim 8 columns"),
        ({"rotary_dim": 7}, ShapeError, "rotary_dim must be even"),
        ({"q": None}, TypeError, "q must be a torch.Tensor, got None"),
        ({"k": [1.0]}, TypeError, "k must be a torch.Tensor, got list"),
        ({"positions": [0, 1, 2, 3]}, TypeError, "positions must be a torch.Tensor, got list"),
        ({"positions": torch.ones(4)}, TypeError, "positions must be int32 or int64"),
        ({"positions": torch.arange(3)}, ShapeError, r"positions must be \[4\]"),
        ({"positions": torch.ones(2, 2).long()}, ShapeError, r"positions must be \[4\]"),
    ],
)
def test_bad_embed(change, error, message):
    arguments = {
        "q": torch.ones(4, 2, 16),
        "k": torch.ones(4, 1, 16),
        "cos_sin_cache": torch.ones(9, 16),
        "positions": torch.arange(4),
        **change,
    }
    with pytest.raises(error, match=message):
        rotary_embed(**arguments)


def test_cpu_never_takes_the_kernel():
    x, freqs = randn(3, 2, 64, dtype=torch.bfloat16), get_rotary_emb(64, 3)
    assert resolve("rotary", x, freqs).record.name == "torch"
    assert explain("rotary", x, freqs).endswith("=> torch (origin=fallback)")
    with op_backend(rotary="cuda"), pytest.raises(ExplicitSelectionError, match="rotary call"):
        apply_rotary_emb(x, freqs)


def test_what_the_kernel_takes():
    from astrai.extension.backend.rotary import rotary_axes
    from astrai.extension.dispatch import get_family

    spec = get_family("rotary").records["cuda"].spec

    def takes(x, angles, k=None, positions=None):
        axes = rotary_axes(x, angles, k, positions)
        return spec.matches({**axes, "device_cuda": True, "capability": 90, "kernel_loaded": True})

    bf16 = randn(3, 2, 64, dtype=torch.bfloat16)
    freqs = get_rotary_emb(64, 3)
    assert takes(bf16, freqs) and takes(bf16.half(), freqs)
    assert takes(bf16[None], freqs[None])
    assert not takes(bf16.float(), freqs)
    assert not takes(bf16, freqs.double())
    assert not takes(bf16[None], freqs)
    assert not takes(bf16[None].expand(2, 3, 2, 64), freqs[None])
    positions = torch.arange(3)
    assert takes(bf16, torch.ones(9, 32), bf16[:, :1], positions)
    assert not takes(bf16, torch.ones(9, 32), bf16[:, :1].half(), positions)
    bf16.requires_grad_()
    assert not takes(bf16, freqs)
    with torch.no_grad():
        assert takes(bf16, freqs)
