"""Gated feed-forward block (SwiGLU, Shazeer 2020)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import silu

from astrai.model.components.linear import Linear, StackedLinear


class MLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``, added to a residual.

    Args:
        dim: Width of x and of the result.
        hidden_dim: Width between the projections.
        bias: Whether the three projections have biases.
    """

    def __init__(self, dim: int, hidden_dim: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_up_proj = StackedLinear(
            dim, {"gate_proj": hidden_dim, "up_proj": hidden_dim}, bias
        )
        self.down_proj = Linear(hidden_dim, dim, bias)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Applies the block.

        Args:
            x: ``[..., dim]``.
            residual: x's shape; see ``Linear.add``.

        Returns:
            The sum of ``residual`` and the block's result.
        """
        return self.down_proj.add(residual, self.gated(x))

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """``silu(gate(x)) * up(x)``, ``[..., hidden_dim]``."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        if torch.is_grad_enabled():
            return silu(gate) * up
        return silu(gate, inplace=True).mul_(up)  # nobody else has the product's memory
