"""Casts of weights, kept between two optimizer steps where a region asks for it.

What proves that a weight did not change? Not its version counter or address alone: fused optimizers
and FSDP write through both. So an entry ends with the first of these:

- a step of any ``torch.optim`` optimizer, or ``fp8_weights_changed()``;
- another version, address or dtype of the weight.

Weights that FSDP gathers anew for each use have no entries: their memory comes and goes. While a
CUDA graph is captured nothing is read or kept, so that the graph holds its own cast; and once an
optimizer's step was captured nothing is kept at all, since a replay of it calls no hook.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from astrai.extension.fp8.rings import is_capturing
from astrai.extension.fp8.weights import WeightState

_epoch = 0
_blocked = False
_hook: Any = None


def fp8_weights_changed() -> None:
    """Ends all cached casts of weights.

    To be called after weights changed by anything but an optimizer of ``torch.optim`` or an
    in-place operation that autograd sees: writes through ``weight.data``, kernels of one's own, the
    replay of a CUDA graph that holds such a write.
    """
    global _epoch
    _epoch += 1


def _after_step(*_: Any) -> None:
    global _blocked
    fp8_weights_changed()
    if is_capturing():
        _blocked = True


def watch() -> None:
    """Starts to look for what changes weights. Called whenever a region with a cache opens."""
    global _hook
    if _hook is None:
        _hook = register_optimizer_step_post_hook(_after_step)


def cast(
    state: WeightState | None,
    weight: torch.Tensor,
    key: tuple[Any, ...],
    make: Callable[[], tuple[torch.Tensor, ...]],
) -> tuple[torch.Tensor, ...]:
    """The cast of a weight, from the cache if it is there.

    Args:
        state: Of the weight; None if the region asks for no cache.
        weight: The parameter.
        key: What distinguishes this cast from others of the weight.
        make: Makes it.
    """
    if not usable(state, weight):
        return make()
    proof = (_epoch, weight._version, weight.data_ptr(), weight.dtype)
    found = state.casts.get(key)
    if found is not None and found[0] == proof:
        return found[1]
    tensors = make()
    state.casts[key] = (proof, tensors)
    return tensors


def usable(state: WeightState | None, weight: torch.Tensor) -> bool:
    """Whether casts of the weight may be kept now."""
    if state is None or torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return False  # tensors of inference mode could not be saved by autograd later
    if _blocked or state.sharded:
        return False
    # FSDP1 marks the parameters that live in its flat one.
    return not getattr(weight, "_fsdp_flattened", False) and not is_capturing()
