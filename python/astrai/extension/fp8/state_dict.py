"""What is there to see, save and load of the state of fp8."""

from __future__ import annotations

from typing import Any

import torch

from astrai.extension.fp8 import region, rings
from astrai.extension.fp8.recipes import DelayedScaling, FP8Format, FP8Recipe
from astrai.extension.fp8.region import LOCAL
from astrai.extension.fp8.weights import known_state, ring_key, rings_of, state_of

VERSION = 1


def fp8_state_dict(model: torch.nn.Module) -> dict[str, Any]:
    """The state of delayed scaling for a model's weights, for a checkpoint.

    To be called between training steps. Waits for the device.

    Args:
        model: Its weights are told apart by their names of ``named_parameters``.

    Returns:
        Plain dicts, numbers, strings and CPU tensors: ``torch.load(weights_only=True)`` reads them.
    """
    weights: dict[str, list[dict[str, Any]]] = {}
    for name, weight in model.named_parameters():
        state = known_state(weight)
        if state is None or not state.rings:
            continue
        weights[name] = [
            {"rings": found.read(), **_description(found)} for found in state.rings.values()
        ]
    return {"version": VERSION, "weights": weights}


def _description(found: rings.WeightRings) -> dict[str, Any]:
    recipe, formats = found.x.table.recipe, (found.x.table.fmt, found.g.table.fmt)
    fp8_format = next(f for f in FP8Format if (f.fwd(), f.bwd()) == formats)
    return {
        "history_len": recipe.history_len,
        "margin": recipe.margin,
        "amax": recipe.amax,
        "fp8_format": fp8_format.value,
    }


def fp8_load_state_dict(
    model: torch.nn.Module, state_dict: dict[str, Any], strict: bool = True
) -> None:
    """Sets the state of delayed scaling to what ``fp8_state_dict`` gave.

    Args:
        model: On the device where it will train.
        state_dict: See above.
        strict: Whether a name that the model does not have is an error.

    Raises:
        ValueError: Another version; with ``strict``, weights that the model does not have.
    """
    version = state_dict.get("version")
    if version != VERSION:
        raise ValueError(
            f"fp8_load_state_dict: state_dict must have version {VERSION}, got {version!r}"
        )
    parameters = dict(model.named_parameters())
    unknown = sorted(state_dict["weights"].keys() - parameters.keys())
    if unknown and strict:
        raise ValueError(
            "fp8_load_state_dict: the model must have every weight of state_dict, got none for "
            f"{len(unknown)}, first {unknown[:3]}"
        )
    for name, entries in state_dict["weights"].items():
        weight = parameters.get(name)
        if weight is None:
            continue
        for entry in entries:
            recipe = DelayedScaling(entry["history_len"], entry["margin"], entry["amax"])
            fp8_format = FP8Format(entry["fp8_format"])
            found = rings_of(state_of(weight), recipe, fp8_format, weight.device, {})
            found.write(entry["rings"])


class FP8State:
    """What is in force in this thread, and what is known of weights. ``fp8_state()`` returns it."""

    @property
    def enabled(self) -> bool:
        """Whether linear layers take fp8 here."""
        return LOCAL.frame is not None and LOCAL.frame.config.enabled

    @property
    def recipe(self) -> FP8Recipe:
        """The recipe of the innermost region; the default one outside of regions."""
        return self._config.recipe

    @property
    def fp8_format(self) -> FP8Format:
        """The format of the innermost region; the default one outside of regions."""
        return self._config.fp8_format

    @property
    def _config(self) -> region.Config:
        return region.DEFAULT if LOCAL.frame is None else LOCAL.frame.config

    @staticmethod
    def rings(
        weight: torch.Tensor, recipe: FP8Recipe, fp8_format: FP8Format | str = "hybrid"
    ) -> dict[str, dict[str, torch.Tensor]] | None:
        """Copies of a weight's rings on the CPU, to look at; None if it has none.

        Waits for the device.

        Returns:
            "forward": the rings of its input and of itself; "gradient": the ring of its output's
            gradient; each with "history", "position", "step", "pending" and "nonfinite".
        """
        state = known_state(weight)
        if state is None or not isinstance(recipe, DelayedScaling):
            return None
        found = state.rings.get(ring_key(recipe, FP8Format(fp8_format)))
        return None if found is None else found.read()

    @staticmethod
    def reset(model: torch.nn.Module) -> None:
        """Forgets rings and cached casts of a model's weights; names and opt-outs stay."""
        for weight in model.parameters():
            state = known_state(weight)
            if state is not None:
                state.rings.clear()
                state.casts.clear()


_STATE = FP8State()


def fp8_state() -> FP8State:
    """What is in force in this thread."""
    return _STATE
