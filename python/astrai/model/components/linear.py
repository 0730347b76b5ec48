"""Linear projections."""

from __future__ import annotations

from collections.abc import Mapping

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

    def add(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Returns ``residual + self(x)``, summed in the matrix product where that is possible.

        That saves a launch; the result then stands in ``residual``'s memory. It is possible without
        a bias, and while autograd does not record.

        Args:
            residual: ``[..., out_features]``, contiguous; not to be used afterwards.
            x: ``[..., in_features]``.
        """
        if self.bias is not None or torch.is_grad_enabled():
            return residual + self(x)
        out_features, in_features = self.weight.shape
        rows = residual.view(-1, out_features)
        rows.addmm_(x.reshape(-1, in_features), self.weight.t())
        return residual


class StackedLinear(Linear):
    """Several projections of the same x as one matrix product: their weights are one matrix.

    Args:
        in_features: Width of x.
        parts: Name -> width of each projection, in the order in which they stand in y.
        bias: Whether the projections have biases.

    Attributes:
        parts: Name -> the rows of ``weight`` (and of ``bias``) that are this projection's.
    """

    def __init__(self, in_features: int, parts: Mapping[str, int], bias: bool = False) -> None:
        super().__init__(in_features, sum(parts.values()), bias)
        self.parts: dict[str, slice] = {}
        end = 0
        for name, width in parts.items():
            self.parts[name] = slice(end, end + width)
            end += width
