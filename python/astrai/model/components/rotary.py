"""Rotary position table (Su et al. 2021), with the frequency scalings of the Llama family."""

from __future__ import annotations

import math

import torch

from astrai.model.config import ModelConfig


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """Angle per position of each rotary pair: fp64 ``[head_dim / 2]``, in radians.

    Pair i turns by ``theta ** (-2 i / head_dim)`` per position. ``linear`` scaling divides all of
    them by ``factor``; ``llama3`` divides the slow ones (fewer than ``low_freq_factor`` turns
    within the original context), keeps the quick ones (more than ``high_freq_factor`` turns) and
    blends between.
    """
    # The device is named, since decoders are built under torch.device("meta").
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float64, device="cpu") / config.head_dim
    freq = config.rope_theta**-half
    if config.rope_factors is not None:
        freq = freq / torch.tensor(config.rope_factors, dtype=torch.float64, device="cpu")
    scaling = config.rope_scaling
    if scaling is None:
        return freq
    kind = scaling["rope_type"]

    def positive(key: str) -> float:
        value = scaling.get(key)
        if not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ValueError(
                f"inverse_frequencies: {key} of rope_type {kind!r} must be positive, got {value!r}"
            )
        return value

    if kind == "linear":
        return freq / positive("factor")
    if kind == "llama3":
        low, high = positive("low_freq_factor"), positive("high_freq_factor")
        turns = positive("original_max_position_embeddings") * freq / (2 * math.pi)
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        return keep * freq + (1 - keep) * freq / positive("factor")
    raise ValueError(f"inverse_frequencies: rope_type must be 'linear' or 'llama3', got {kind!r}")


class RotaryTable:
    """Angles of every position, kept once per device.

    It is no module buffer on purpose: ``model.to(torch.bfloat16)`` must leave it in fp32.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._max_position = config.max_position
        self._frequencies = inverse_frequencies(config)
        self._tables: dict[torch.device, torch.Tensor] = {}

    def on(self, device: torch.device) -> torch.Tensor:
        """fp32 ``[max_position, head_dim]``: the cosines of a position's pairs, then the sines."""
        table = self._tables.get(device)
        if table is None:
            steps = torch.arange(self._max_position, dtype=torch.float64, device="cpu")
            angles = torch.outer(steps, self._frequencies)
            table = torch.cat((angles.cos(), angles.sin()), dim=-1).float().to(device)
            self._tables[device] = table
        return table
