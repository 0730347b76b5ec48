"""Root-mean-square normalisation (Zhang and Sennrich 2019)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import rms_norm


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension.

    All arithmetic is fp32, with one rounding to x's dtype at the end.

    Args:
        dim: Width of x.
        eps: Added to the mean square.
    """

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalises x, ``[..., dim]``."""
        return rms_norm(x, self.weight.shape, self.weight, self.eps)
