"""Small models, and what fp8 makes of a layer, written out in plain torch."""

from __future__ import annotations

import itertools

import torch

from astrai.extension.fp8 import BlockScaling, DelayedScaling, DynamicScaling, RowwiseScaling

RECIPES = (DynamicScaling(), DelayedScaling(), RowwiseScaling(), BlockScaling())
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def names(recipe: object) -> str:
    """Of a recipe, for pytest."""
    return type(recipe).__name__


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Reproducible normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def mlp(*widths: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Sequential:
    """Linear layers with ReLU between them."""
    torch.manual_seed(seed)
    layers: list[torch.nn.Module] = []
    for k, n in itertools.pairwise(widths):
        layers += [torch.nn.Linear(k, n), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1]).to(dtype)


def step_of(x: torch.Tensor, dtype: torch.dtype, margin: float = 0.0) -> torch.Tensor:
    """Dequantisation step of a whole tensor."""
    return (x.abs().amax().float() / LARGEST[dtype] * 2.0**margin).clamp_min(1e-12)


def held(x: torch.Tensor, step: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What fp8 holds of x, in float32."""
    limit = LARGEST[dtype]
    codes = (x.float() * step.reciprocal()).clamp(-limit, limit).to(dtype)
    return codes.float() * step


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Size of the difference against the size of b."""
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits."""
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
