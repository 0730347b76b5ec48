"""Linear projection."""

from __future__ import annotations

import torch
from torch import nn

# The module calls this name, so that a kernel-backed `linear` can take its place in one line.
from torch.nn.functional import linear


class Linear(nn.Module):
    """``y = x @ weight.T + bias``; x ``[..., in_features]``, y ``[..., out_features]``.

    Args:
        in_features: Width of x.
        out_features: Width of y.
        bias: Whether there is a bias.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        if not self.weight.is_meta:
            nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Projects x."""
        return linear(x, self.weight, self.bias)
