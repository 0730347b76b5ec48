"""Grouped-query attention (Ainslie et al. 2023) over ``astrai.extension``'s public API."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from astrai.extension import Rotary, attention
from astrai.model.components.linear import Linear, StackedLinear
from astrai.model.config import ModelConfig

if TYPE_CHECKING:
    from astrai.inference.cache import KVCache


class GQA(nn.Module):
    """Causal self-attention with fewer K/V heads than query heads, added to a residual.

    Rotary pairs are neighbours, (2i, 2i + 1): the rows of the q and k projections are stored in
    that order. GGUF files hold them so; the safetensors loader reorders the rows, which are stored
    for pairs (i, i + head_dim / 2) there.
    """

    def __init__(self, config: ModelConfig, layer_id: int) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.num_heads, self.num_kv_heads, self.head_dim = (
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
        )
        q_width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.qkv_proj = StackedLinear(
            config.hidden_size,
            {"q_proj": q_width, "k_proj": kv_width, "v_proj": kv_width},
            config.attention_bias,
        )
        self.o_proj = Linear(q_width, config.hidden_size, config.attention_bias)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        rotary: Rotary,
        kv_cache: KVCache | None = None,
        fwd: str | None = None,
    ) -> torch.Tensor:
        """Attends.

        Args:
            x: ``[tokens, hidden]`` packed with a cache, ``[batch, seq, hidden]`` without.
            residual: x's shape; see ``Linear.add``.
            rotary: Angles, and the position of each token.
            kv_cache: Where K and V are appended, or None.
            fwd: "prefill" or "decode" with a cache, None without.

        Returns:
            The sum of ``residual`` and what attention gives.
        """
        heads = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=-2)
        out = attention(
            q,
            k,
            v,
            kv_cache=kv_cache,
            layer_id=self.layer_id,
            is_causal=True,
            fwd=fwd,
            rotary=rotary,
        )
        return self.o_proj.add(residual, out.flatten(-2))
