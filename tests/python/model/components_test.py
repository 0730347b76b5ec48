"""Building blocks: sums in place, stacked projections, and the names that checkpoints have."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from astrai.model.components import MLP, Linear, StackedLinear
from tests.python.model import tiny


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("lead", [(5,), (2, 3), (0,)])
def test_add_is_residual_plus_projection(bias, grad, lead):
    layer = Linear(8, 6, bias)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    residual, x = randn(*lead, 6), randn(*lead, 16)[..., :8]  # rows that are apart
    expected = residual + layer(x)
    kept = residual.clone()
    with torch.set_grad_enabled(grad):
        got = layer.add(residual, x)
    torch.testing.assert_close(got, expected)
    assert got.requires_grad == grad
    if bias or grad:
        assert torch.equal(residual, kept), "only a product without bias or autograd may overwrite"
    else:
        assert got.data_ptr() == residual.data_ptr()


def test_a_stacked_projection_is_its_parts_side_by_side():
    layer = StackedLinear(8, {"a": 3, "b": 5}, bias=True)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    x = randn(4, 8)
    parts = layer(x).split((3, 5), dim=-1)
    for part, rows in zip(parts, layer.parts.values(), strict=True):
        expected = torch.nn.functional.linear(x, layer.weight[rows], layer.bias[rows])
        torch.testing.assert_close(part, expected)


@pytest.mark.parametrize("grad", [False, True])
def test_the_feed_forward_block(grad):
    mlp = MLP(6, 10, bias=True)
    with torch.no_grad():
        for parameter in mlp.parameters():
            parameter.normal_()
    x, residual = randn(3, 6), randn(3, 6) + 1
    rows, linear = mlp.gate_up_proj.parts, torch.nn.functional.linear
    gate, up = (
        linear(x, mlp.gate_up_proj.weight[rows[name]], mlp.gate_up_proj.bias[rows[name]])
        for name in ("gate_proj", "up_proj")
    )
    expected = residual + mlp.down_proj(gate / (1 + torch.exp(-gate)) * up)
    kept = x.clone()
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(mlp(x, residual), expected)
    assert torch.equal(x, kept)


@pytest.mark.parametrize("tied", [False, True])
def test_the_names_of_checkpoints_cover_every_weight_once(tied):
    config = dataclasses.replace(tiny.CONFIG, attention_bias=True, tie_word_embeddings=tied)
    decoder = tiny.decoder(config)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.zero_()
        for weight in decoder.weights().values():
            weight += 1
    assert all((parameter == 1).all() for parameter in decoder.parameters())
    names = decoder.weights().keys()
    assert ("lm_head.weight" in names) != tied
    for part in ("q_proj.weight", "k_proj.bias", "v_proj.weight", "o_proj.bias"):
        assert f"layers.1.self_attn.{part}" in names
    assert {"layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight"} <= names
