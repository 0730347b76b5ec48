"""Weights of a Hugging Face model folder, under the names and in the layout of ``Decoder``."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator

import torch

from astrai.model.config import ModelConfig


def read_safetensors(
    folder: pathlib.Path, config: ModelConfig
) -> tuple[int, Iterator[tuple[str, torch.Tensor]]]:
    """Opens the folder's weights.

    Args:
        folder: Holds ``model.safetensors``, or the shards that ``model.safetensors.index.json``
            names.
        config: The model's shape, needed to reorder the rows of q and k.

    Returns:
        The number of tensors, and an iterator over (name, CPU tensor).
    """
    from safetensors import SafetensorError, safe_open

    files = _weight_files(folder)
    try:
        opened = [safe_open(str(f), framework="pt", device="cpu") for f in files]
    except SafetensorError as error:
        raise ValueError(
            f"load: weights in {folder} must be readable safetensors files, got: {error}"
        ) from error

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for file in opened:
            for key in file.keys():  # noqa: SIM118 (not a dict: it has no __iter__)
                if key.endswith("rotary_emb.inv_freq"):
                    continue  # old writers stored this table; it follows from the config
                yield (
                    key.removeprefix("model."),
                    _to_neighbour_pairs(key, file.get_tensor(key), config),
                )

    return sum(len(file.keys()) for file in opened), tensors()


def _weight_files(folder: pathlib.Path) -> list[pathlib.Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        data = json.loads(index.read_text(encoding="utf-8"))
        names = data.get("weight_map") if isinstance(data, dict) else None
        # Names with a folder in them could lead out of the model's.
        if not isinstance(names, dict) or not all(
            isinstance(name, str) and pathlib.PurePath(name).name == name for name in names.values()
        ):
            raise ValueError(
                f"load: {index} must hold a weight_map of tensor names to file names, got {names!r}"
            )
        files = [folder / name for name in sorted(set(names.values()))]
        for file in files:
            if not file.is_file():
                raise FileNotFoundError(
                    f"load: {index.name} names {file.name}, which is not in {folder}"
                )
        return files
    raise FileNotFoundError(
        f"load: a model folder must hold {single.name} or {index.name}, got {folder} with neither"
    )


def _to_neighbour_pairs(name: str, tensor: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Reorders rows of q and k from rotary pairs (i, i + head_dim / 2) to (2i, 2i + 1).

    Scores do not change: q and k of a head are reordered alike. Other tensors pass through.
    """
    if ".q_proj." in name:
        heads = config.num_heads
    elif ".k_proj." in name:
        heads = config.num_kv_heads
    else:
        return tensor
    if tensor.dim() == 0 or tensor.shape[0] != heads * config.head_dim:
        return tensor  # the loader reports the shape
    rows = tensor.reshape(heads, 2, config.head_dim // 2, *tensor.shape[1:])
    return rows.transpose(1, 2).reshape(tensor.shape)
