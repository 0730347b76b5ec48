"""Gated feed-forward block (SwiGLU, Shazeer 2020)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import silu

from astrai.model.components.linear import Linear


class MLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``.

    Args:
        dim: Width of x and of the result.
        hidden_dim: Width between the projections.
        bias: Whether the three projections have biases.
    """

    def __init__(self, dim: int, hidden_dim: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = Linear(dim, hidden_dim, bias)
        self.up_proj = Linear(dim, hidden_dim, bias)
        self.down_proj = Linear(hidden_dim, dim, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Applies the block to x, ``[..., dim]``."""
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
