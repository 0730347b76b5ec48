"""A GGUF file: its metadata, and its weights under the names and in the layout of ``Decoder``.

The container and the quantised formats are read by the ``gguf`` package, its authors' reference
reader.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import torch

from astrai.model.config import ModelConfig

_NAMES = {
    "token_embd.weight": "embed_tokens.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"


class GGUFFile:
    """Reads a GGUF file of a Llama-family model.

    q and k need no reordering: a GGUF file of architecture ``llama`` stores their rows for rotary
    pairs (2i, 2i + 1).

    Args:
        path: The file.

    Attributes:
        metadata: Key -> value (numbers, strings, booleans, lists of them).
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        from gguf import GGUFReader

        self._path = os.fspath(path)
        try:
            self._reader = GGUFReader(self._path)
            self.metadata: dict[str, Any] = {
                key: f.contents() for key, f in self._reader.fields.items()
            }
        except (
            ValueError,
            IndexError,
            KeyError,
            OverflowError,
            TypeError,
            UnicodeDecodeError,
        ) as error:
            raise ValueError(
                f"GGUFFile: path must be a readable GGUF file, got {self._path}: damaged, "
                "truncated or of another kind "
                f"({error})"
            ) from error
        self._tensors = {t.name: t for t in self._reader.tensors}

    def config(self) -> ModelConfig:
        """The model's shape."""
        factors = None
        if _ROPE_FACTORS in self._tensors:
            factors = tuple(self._read(_ROPE_FACTORS).flatten().tolist())
        return ModelConfig.from_gguf(
            self.metadata,
            tie_word_embeddings="output.weight" not in self._tensors,
            rope_factors=factors,
        )

    def weights(self) -> tuple[int, Iterator[tuple[str, torch.Tensor]]]:
        """The number of weights, and an iterator over (name in ``Decoder``, fp32 CPU tensor)."""
        names = [name for name in self._tensors if name != _ROPE_FACTORS]
        return len(names), ((self._decoder_name(name), self._read(name)) for name in names)

    def _read(self, name: str) -> torch.Tensor:
        """Dequantised tensor, fp32, in torch's row-major shape (GGUF lists dimensions reversed)."""
        from gguf import dequantize

        tensor = self._tensors[name]
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise ValueError(
                f"GGUFFile: {name} must have a type that gguf can dequantise, got "
                f"{tensor.tensor_type.name}"
            ) from error
        # dequantize may give a read-only view of the mapped file; the copy owns its memory.
        return torch.tensor(values, dtype=torch.float32)

    def _decoder_name(self, name: str) -> str:
        if name in _NAMES:
            return _NAMES[name]
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
        if match and match[2] in _BLOCK_NAMES:
            return f"layers.{match[1]}.{_BLOCK_NAMES[match[2]]}.{match[3]}"
        raise ValueError(
            f"GGUFFile: every tensor must belong to a llama model, got {name} in {self._path}"
        )
