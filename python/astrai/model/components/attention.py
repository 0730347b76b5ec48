"""Grouped-query attention (Ainslie et al. 2023) over ``astrai.extension``'s public API."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from astrai.extension import apply_rotary_emb, attention
from astrai.model.components.linear import Linear
from astrai.model.config import ModelConfig

if TYPE_CHECKING:
    from astrai.inference.cache import KVCache


class GQA(nn.Module):
    """Causal self-attention with fewer K/V heads than query heads.

    Rotary pairs are neighbours, (2i, 2i + 1): the rows of ``q_proj`` and ``k_proj`` are stored in
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
        self.q_proj = Linear(config.hidden_size, q_width, config.attention_bias)
        self.k_proj = Linear(config.hidden_size, kv_width, config.attention_bias)
        self.v_proj = Linear(config.hidden_size, kv_width, config.attention_bias)
        self.o_proj = Linear(q_width, config.hidden_size, config.attention_bias)

    def forward(
        self,
        x: torch.Tensor,
        freqs_cis: torch.Tensor,
        kv_cache: KVCache | None = None,
        fwd: str | None = None,
    ) -> torch.Tensor:
        """Attends.

        Args:
            x: ``[tokens, hidden]`` packed with a cache, ``[batch, seq, hidden]`` without.
            freqs_cis: fp32 ``[*x.shape[:-1], head_dim / 2, 2]``: (cos, sin) of each token's
                position.
            kv_cache: Where K and V are appended, or None.
            fwd: "prefill" or "decode" with a cache, None without.

        Returns:
            x's shape.
        """
        lead = x.shape[:-1]
        q = apply_rotary_emb(self.q_proj(x).view(*lead, self.num_heads, self.head_dim), freqs_cis)
        k = apply_rotary_emb(
            self.k_proj(x).view(*lead, self.num_kv_heads, self.head_dim), freqs_cis
        )
        v = self.v_proj(x).view(*lead, self.num_kv_heads, self.head_dim)
        out = attention(q, k, v, kv_cache=kv_cache, layer_id=self.layer_id, is_causal=True, fwd=fwd)
        return self.o_proj(out.reshape(*lead, self.num_heads * self.head_dim))
