"""Llama-family decoder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from astrai.model.components import GQA, MLP, Linear, RMSNorm, RotaryTable
from astrai.model.config import ModelConfig

if TYPE_CHECKING:
    from astrai.inference.cache import KVCache


class DecoderLayer(nn.Module):
    """One block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, layer_id: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = GQA(config, layer_id)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, config.mlp_bias)

    def forward(
        self, x: torch.Tensor, freqs_cis: torch.Tensor, kv_cache: KVCache | None, fwd: str | None
    ) -> torch.Tensor:
        """Applies the block to x; arguments as ``GQA.forward``."""
        x = x + self.self_attn(self.input_layernorm(x), freqs_cis, kv_cache, fwd)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Token ids in, logits of the next token out.

    Args:
        config: The model's shape.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self._rotary = RotaryTable(config)

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of weights and activations."""
        return self.embed_tokens.weight.dtype

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor | None = None,
        kv_cache: KVCache | None = None,
        fwd: str | None = None,
        select: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Runs the decoder.

        Args:
            input_ids: ``[tokens]``, the packed tokens of all requests, with a cache; ``[batch,
                seq]`` without (each row then is one whole causal sequence, and autograd works).
            positions: Position of each token in its sequence, ``input_ids``' shape, each below
                ``max_position``.
                None: 0, 1, ... in each row (only without a cache).
            kv_cache: Cache that K and V are appended to, or None.
            fwd: "prefill" or "decode" with a cache, None without.
            select: Indices of the packed tokens whose logits are wanted (only with a cache). None:
                all.

        Returns:
            Logits in the model's dtype, ``[*input_ids.shape, vocab]`` or ``[len(select), vocab]``.
        """
        if kv_cache is None:
            if input_ids.dim() != 2:
                raise ValueError(
                    "Decoder: input_ids must be [batch, seq] without a cache, got shape "
                    f"{tuple(input_ids.shape)}"
                )
            if select is not None:
                raise ValueError("Decoder: select must be None without a cache, got a tensor")
            if positions is None:
                if input_ids.shape[1] > self.config.max_position:
                    raise ValueError(
                        f"Decoder: input_ids must have at most {self.config.max_position} tokens "
                        "per row (the model's "
                        f"context), got {input_ids.shape[1]}"
                    )
                positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(
                    input_ids
                )
        elif input_ids.dim() != 1 or positions is None or positions.shape != input_ids.shape:
            raise ValueError(
                "Decoder: input_ids and positions must both be [tokens] with a cache, got shapes "
                f"{tuple(input_ids.shape)} and "
                f"{None if positions is None else tuple(positions.shape)}"
            )
        freqs_cis = self._rotary.at(positions)
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x, freqs_cis, kv_cache, fwd)
        x = self.norm(x)
        return self.lm_head(x if select is None else x[select])
