"""Shape and constants of a Llama-family decoder, from ``config.json`` or GGUF metadata."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

_SUPPORTED_TYPES = ("llama", "mistral")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A Llama-family decoder: RMSNorm, grouped-query attention, rotary positions, SwiGLU.

    Attributes:
        vocab_size: Rows of the embedding table.
        hidden_size: Width of the residual stream.
        intermediate_size: Width inside the feed-forward block.
        num_layers: Decoder blocks.
        num_heads: Query heads.
        num_kv_heads: Key/value heads; divides ``num_heads``.
        head_dim: Width of one head.
        max_position: Context length the model was made for, in tokens.
        rms_norm_eps: Added to the mean square in RMSNorm.
        rope_theta: Base of the rotary frequencies.
        rope_scaling: None, or how frequencies are stretched: ``{"rope_type": "linear" | "llama3",
            ...}`` with the keys of Hugging Face's ``config.json``.
        rope_factors: Divisors of the single frequencies (GGUF's ``rope_freqs.weight``), or None.
        tie_word_embeddings: Whether the output projection is the embedding table.
        attention_bias: Whether the q, k, v and output projections have a bias.
        mlp_bias: Whether the feed-forward projections have a bias.
        bos_token_id: Start token, or None.
        eos_token_ids: Tokens that end an answer.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None = None
    rope_factors: tuple[float, ...] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"ModelConfig: {name} must be an integer of at least 1, got {value!r}"
                )
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"ModelConfig: {name} must be positive, got {value}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"ModelConfig: num_heads must be a multiple of num_kv_heads, got {self.num_heads} "
                f"and {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"ModelConfig: head_dim must be even (rotary pairs), got {self.head_dim}"
            )
        if self.rope_factors is not None and len(self.rope_factors) != self.head_dim // 2:
            raise ValueError(
                f"ModelConfig: rope_factors must have head_dim / 2 = {self.head_dim // 2} entries, "
                f"got {len(self.rope_factors)}"
            )

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> ModelConfig:
        """Reads a Hugging Face ``config.json`` (as written before and after transformers 5)."""
        where = "ModelConfig.from_hf"
        kind = data.get("model_type")
        if kind not in _SUPPORTED_TYPES:
            raise ValueError(
                f"{where}: model_type must be one of {list(_SUPPORTED_TYPES)}, got {kind!r}"
            )
        if data.get("sliding_window"):
            raise ValueError(
                f"{where}: sliding_window must be null, got {data['sliding_window']!r}"
            )
        if data.get("hidden_act", "silu") != "silu":
            raise ValueError(f"{where}: hidden_act must be 'silu', got {data['hidden_act']!r}")

        def required(name: str) -> Any:
            if data.get(name) is None:
                raise ValueError(f"{where}: {name} must be in the config, got none")
            return data[name]

        rope = dict(data.get("rope_parameters") or data.get("rope_scaling") or {})
        theta = rope.pop("rope_theta", None) or data.get("rope_theta") or 10000.0
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        scaling = None if rope_type == "default" else {**rope, "rope_type": rope_type}
        heads = required("num_attention_heads")
        eos = data.get("eos_token_id")
        return cls(
            vocab_size=required("vocab_size"),
            hidden_size=required("hidden_size"),
            intermediate_size=required("intermediate_size"),
            num_layers=required("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=data.get("num_key_value_heads") or heads,
            head_dim=data.get("head_dim") or required("hidden_size") // heads,
            max_position=required("max_position_embeddings"),
            rms_norm_eps=float(required("rms_norm_eps")),
            rope_theta=float(theta),
            rope_scaling=scaling,
            tie_word_embeddings=bool(data.get("tie_word_embeddings", False)),
            attention_bias=bool(data.get("attention_bias", False)),
            mlp_bias=bool(data.get("mlp_bias", False)),
            bos_token_id=data.get("bos_token_id"),
            eos_token_ids=tuple(eos)
            if isinstance(eos, (list, tuple))
            else ()
            if eos is None
            else (eos,),
        )

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, Any],
        *,
        tie_word_embeddings: bool,
        rope_factors: tuple[float, ...] | None = None,
    ) -> ModelConfig:
        """Reads GGUF metadata (key -> value).

        Args:
            metadata: The file's key/value pairs.
            tie_word_embeddings: Whether the file has no ``output.weight``.
            rope_factors: Contents of the tensor ``rope_freqs.weight`` if there is one.
        """
        where = "ModelConfig.from_gguf"
        arch = metadata.get("general.architecture")
        if arch != "llama":
            raise ValueError(f"{where}: general.architecture must be 'llama', got {arch!r}")

        def required(name: str) -> Any:
            value = metadata.get(f"llama.{name}")
            if value is None:
                raise ValueError(f"{where}: llama.{name} must be in the metadata, got none")
            return value

        heads, hidden = required("attention.head_count"), required("embedding_length")
        head_dim = metadata.get("llama.attention.key_length") or hidden // heads
        rotary_dim = metadata.get("llama.rope.dimension_count", head_dim)
        if rotary_dim != head_dim:
            raise ValueError(
                f"{where}: llama.rope.dimension_count must be the head dim {head_dim}, got "
                f"{rotary_dim}"
            )
        if metadata.get("llama.expert_count"):
            raise ValueError(
                f"{where}: llama.expert_count must be 0, got {metadata['llama.expert_count']}"
            )
        scaling_type = metadata.get("llama.rope.scaling.type", "none")
        if scaling_type not in ("none", "linear"):
            raise ValueError(
                f"{where}: llama.rope.scaling.type must be 'none' or 'linear', got {scaling_type!r}"
            )
        scaling = None
        if scaling_type == "linear":
            scaling = {
                "rope_type": "linear",
                "factor": metadata.get("llama.rope.scaling.factor", 1.0),
            }
        vocab = metadata.get("llama.vocab_size")
        if vocab is None:
            vocab = len(metadata.get("tokenizer.ggml.tokens", ()))
        eos = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
        return cls(
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=required("feed_forward_length"),
            num_layers=required("block_count"),
            num_heads=heads,
            num_kv_heads=metadata.get("llama.attention.head_count_kv") or heads,
            head_dim=head_dim,
            max_position=required("context_length"),
            rms_norm_eps=required("attention.layer_norm_rms_epsilon"),
            rope_theta=metadata.get("llama.rope.freq_base", 10000.0),
            rope_scaling=scaling,
            rope_factors=rope_factors,
            tie_word_embeddings=tie_word_embeddings,
            bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
            eos_token_ids=tuple(dict.fromkeys(t for t in eos if t is not None)),
        )
