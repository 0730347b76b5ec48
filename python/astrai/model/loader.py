"""Loads a model, its tokenizer and its chat template from one path."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Iterable

import torch

from astrai.model.chat_template import ChatTemplate
from astrai.model.config import ModelConfig
from astrai.model.decoder import Decoder
from astrai.model.gguf_file import GGUFFile
from astrai.model.safetensors_dir import read_safetensors
from astrai.model.tokenizer import Tokenizer

Progress = Callable[[int, int], None]
"""Called as progress(tensors done, tensors in all)."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclasses.dataclass
class LoadedModel:
    """A decoder with what is needed to talk to it.

    Attributes:
        decoder: The network, in evaluation mode.
        tokenizer: Text <-> token ids, or None where the path holds none.
        chat_template: Messages -> prompt text, or None where the path holds none.
    """

    decoder: Decoder
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None


def load(
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> LoadedModel:
    """Loads a Llama-family model.

    Args:
        path: A ``.gguf`` file (quantised weights are dequantised), or a folder with ``config.json``
            and ``*.safetensors`` as Hugging Face writes it.
        dtype: Type of weights and activations: float32, bfloat16 or float16.
        device: Where the weights go.
        progress: Called after each tensor.

    Raises:
        FileNotFoundError: Nothing is at the path, or a file of the folder is missing.
        ValueError: The files are damaged, or hold another kind of model.
    """
    if dtype not in _DTYPES:
        raise TypeError(f"load: dtype must be float32, bfloat16 or float16, got {dtype}")
    path = pathlib.Path(path)
    if path.is_dir():
        return _load_folder(path, dtype, device, progress)
    if not path.is_file():
        raise FileNotFoundError(
            f"load: path must be a .gguf file or a model folder, got {path}, which does not exist"
        )
    return _load_gguf(path, dtype, device, progress)


def _load_gguf(
    path: pathlib.Path, dtype: torch.dtype, device: torch.device | str, progress: Progress | None
) -> LoadedModel:
    file = GGUFFile(path)
    decoder = _fill(file.config(), file.weights(), dtype, device, progress, str(path))
    template = file.metadata.get("tokenizer.chat_template")
    tokenizer = Tokenizer.from_gguf(file.metadata)
    return LoadedModel(
        decoder, tokenizer, ChatTemplate(template, tokenizer.special_tokens) if template else None
    )


def _load_folder(
    path: pathlib.Path, dtype: torch.dtype, device: torch.device | str, progress: Progress | None
) -> LoadedModel:
    config_file = path / "config.json"
    if not config_file.is_file():
        raise FileNotFoundError(
            f"load: a model folder must hold config.json, got {path} without it"
        )
    data = json.loads(config_file.read_text(encoding="utf-8"))
    if not isinstance(data, dict):
        raise ValueError(f"load: {config_file} must hold a JSON object, got {type(data).__name__}")
    config = ModelConfig.from_hf(data)
    decoder = _fill(config, read_safetensors(path, config), dtype, device, progress, str(path))
    tokenizer = Tokenizer.from_folder(path) if (path / "tokenizer.json").is_file() else None
    template = tokenizer.chat_template if tokenizer else None
    return LoadedModel(
        decoder, tokenizer, ChatTemplate(template, tokenizer.special_tokens) if template else None
    )


def _fill(
    config: ModelConfig,
    weights: tuple[int, Iterable[tuple[str, torch.Tensor]]],
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Progress | None,
    source: str,
) -> Decoder:
    """Builds a decoder of the given weights; none is initialised only to be overwritten."""
    total, pairs = weights
    if config.num_layers > total:  # before a damaged number makes as many layers
        raise ValueError(
            f"load: {source} must hold weights of {config.num_layers} layers, got {total} tensors"
        )
    with torch.device("meta"):
        decoder = Decoder(config)
    slots, expected = decoder.slots(), decoder.weights()
    parameters = dict(decoder.named_parameters())
    state: dict[str, torch.Tensor] = {}
    found: set[str] = set()
    for done, (name, tensor) in enumerate(pairs, 1):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue  # some writers store the tied matrix twice
        if name not in expected:
            raise ValueError(f"load: every tensor must belong to the model, got {name} in {source}")
        shape = tuple(expected[name].shape)
        if tensor.shape != shape:
            raise ValueError(
                f"load: {name} must have shape {shape}, got {tuple(tensor.shape)} in {source}"
            )
        if tensor.dtype not in _DTYPES:  # quantised: its numbers mean nothing without their scales
            raise ValueError(
                f"load: {name} must be float32, bfloat16 or float16, got {tensor.dtype} in {source}"
            )
        parameter, rows = slots[name]
        if rows == slice(None):
            state[parameter] = tensor.to(device=device, dtype=dtype)
        else:
            if parameter not in state:
                state[parameter] = torch.empty_like(
                    parameters[parameter], device=device, dtype=dtype, requires_grad=False
                )
            state[parameter][rows] = tensor.to(device=device, dtype=dtype)
        found.add(name)
        if progress is not None:
            progress(done, total)
    missing = sorted(expected.keys() - found)
    if missing:
        raise ValueError(
            f"load: {source} must hold all weights, got none for {len(missing)}, first "
            f"{missing[:3]}"
        )
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["embed_tokens.weight"]
    decoder.load_state_dict(state, assign=True)
    if config.tie_word_embeddings:  # assign=True makes two parameters of one tensor
        decoder.lm_head.weight = decoder.embed_tokens.weight
    return decoder.eval()
