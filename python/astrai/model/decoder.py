"""Llama-family decoder."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from astrai.extension import Rotary
from astrai.model.components import GQA, MLP, Linear, RMSNorm, RotaryTable, StackedLinear
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
        self, x: torch.Tensor, rotary: Rotary, kv_cache: KVCache | None, fwd: str | None
    ) -> torch.Tensor:
        """Applies the block to x, whose memory may then hold the result (see ``Linear.add``).

        The other arguments are those of ``GQA.forward``.
        """
        x = self.self_attn(self.input_layernorm(x), x, rotary, kv_cache, fwd)
        return self.mlp(self.post_attention_layernorm(x), x)


class Slot(NamedTuple):
    """Where a tensor of a checkpoint goes.

    Attributes:
        parameter: Name of the decoder's parameter.
        rows: The rows of it that are the tensor's.
    """

    parameter: str
    rows: slice = slice(None)


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

    def slots(self) -> dict[str, Slot]:
        """Where each tensor of a checkpoint goes, by its name in Hugging Face's checkpoints.

        Projections that are computed together are tensors of their own there.
        """
        slots = {}
        for prefix, module in self.named_modules():
            for name, _ in module.named_parameters(prefix, recurse=False):
                if isinstance(module, StackedLinear):
                    parent, kind = prefix.rpartition(".")[0], name.rpartition(".")[2]
                    for part, rows in module.parts.items():
                        slots[f"{parent}.{part}.{kind}"] = Slot(name, rows)
                else:
                    slots[name] = Slot(name)
        if self.config.tie_word_embeddings:
            del slots["lm_head.weight"]
        return slots

    def weights(self) -> dict[str, torch.Tensor]:
        """The weights by their names in Hugging Face's checkpoints, as views."""
        whole = dict(self.named_parameters())
        return {name: whole[parameter][rows] for name, (parameter, rows) in self.slots().items()}

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
        rotary = Rotary(self._rotary.on(input_ids.device), positions, interleaved=True)
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x, rotary, kv_cache, fwd)
        if select is not None:
            x = x[select]
        return self.lm_head(self.norm(x))
