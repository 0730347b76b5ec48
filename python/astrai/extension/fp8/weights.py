"""What is known of a weight: its rings, its cached casts, its name, whether it is opted out.

It hangs on the weight itself, as an attribute: it belongs to that object, is found without a table
that could leak or be inherited by reused memory, and compiled code can guard on it. Copies and
pickles of the weight do not take it with them.
"""

from __future__ import annotations

import fnmatch
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from astrai.extension.fp8 import rings
from astrai.extension.fp8.recipes import DelayedScaling, FP8Format
from astrai.extension.fp8.rings import WeightRings

ATTRIBUTE = "_astrai_fp8"


class WeightState:
    """See the module.

    Attributes:
        name: Qualified name in its model, "" where none was given.
        opted_out: Whether it never takes fp8.
        sharded: Whether its memory is gathered anew for each use, as FSDP does.
        rings: By ``ring_key``.
        casts: Cached casts, see ``cache``.
    """

    def __init__(self) -> None:
        self.name = ""
        self.opted_out = False
        self.sharded = False
        self.rings: dict[str, WeightRings] = {}
        self.casts: dict[Any, Any] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> OrderedDict[str, Any]:
        return OrderedDict()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        # A type that torch.load(weights_only=True) knows; state_of takes it for nothing.
        return (OrderedDict, ())


def leaf_of(weight: torch.Tensor) -> torch.Tensor:
    """The parameter whose copy in another dtype ``weight`` is (torch.autocast), else itself."""
    node = None if torch.compiler.is_compiling() else weight.grad_fn
    if node is not None and node.name() == "ToCopyBackward0":
        return getattr(node.next_functions[0][0], "variable", weight)
    return weight


def known_state(weight: torch.Tensor) -> WeightState | None:
    """The weight's state if there is one."""
    state = getattr(weight, ATTRIBUTE, None)
    return state if type(state) is WeightState else None


def state_of(weight: torch.Tensor) -> WeightState:
    """The weight's state, made if there is none."""
    state = known_state(weight)
    if state is None:
        state = WeightState()
        setattr(weight, ATTRIBUTE, state)
    return state


def ring_key(recipe: DelayedScaling, fp8_format: FP8Format) -> str:
    """What rings belong to besides their weight, as text."""
    return (
        f"delayed/{fp8_format.value}/history_len={recipe.history_len}/margin={float(recipe.margin)}/"
        f"amax={recipe.amax}"
    )


def rings_of(
    state: WeightState,
    recipe: DelayedScaling,
    fp8_format: FP8Format,
    device: torch.device,
    live: Mapping[int, torch.Tensor],
) -> WeightRings:
    """The weight's rings for a recipe and format, made anew where the weight changed its device.

    Args:
        state: Of the weight.
        recipe: See above.
        fp8_format: See above.
        device: Of the weight.
        live: Snapshots of the running step, by table: new rings have no step in them either.
    """
    key = ring_key(recipe, fp8_format)
    found = state.rings.get(key)
    if found is None or found.device != device:
        formats = (fp8_format.fwd(), fp8_format.bwd())
        found = state.rings[key] = rings.new_rings(recipe, formats, device)
        for ring in (found.x, found.w, found.g):
            if ring.table.id in live:
                ring.clear_in(live[ring.table.id])
    return found


def fp8_name_weights(model: torch.nn.Module) -> None:
    """Tells each weight its name in the model, for filters.

    Args:
        model: Its parameters get their names of ``named_parameters``. To be called after
            ``fully_shard``, which makes parameters of its own.
    """
    for name, parameter in model.named_parameters():
        state_of(parameter).name = name


def fp8_prepare(
    model: torch.nn.Module,
    recipe: DelayedScaling,
    fp8_format: FP8Format | str = FP8Format.HYBRID,
) -> None:
    """Makes the rings of a model's weights now instead of at their first use.

    For code that compiles the layers of a model one by one: a weight that is met without rings
    makes torch.compile compile its layer again, although the code is the same.

    Args:
        model: On the device where it will train, and after ``fully_shard``. All parameters of two
            dimensions get rings.
        recipe: Of the regions to come.
        fp8_format: Likewise.
    """
    for parameter in model.parameters():
        if parameter.dim() == 2:
            state = state_of(parameter)
            rings_of(state, recipe, FP8Format(fp8_format), parameter.device, {})


def fp8_opt_out(module: torch.nn.Module, *patterns: str) -> list[str]:
    """Keeps weights out of fp8, in every region from now on.

    Args:
        module: Whose weights. To be called after ``fully_shard``, which makes parameters of its
            own.
        patterns: Shell patterns of names, such as ``"lm_head.*"``; all weights if none is given.

    Returns:
        The names of the weights that match.

    Raises:
        ValueError: A pattern matches no weight.
    """
    return _mark("fp8_opt_out", module, patterns, True)


def fp8_opt_in(module: torch.nn.Module, *patterns: str) -> list[str]:
    """Takes ``fp8_opt_out`` back; arguments and result as there."""
    return _mark("fp8_opt_in", module, patterns, False)


def _mark(
    function: str, module: torch.nn.Module, patterns: tuple[str, ...], opted_out: bool
) -> list[str]:
    weights = dict(module.named_parameters(remove_duplicate=False))
    names: dict[str, None] = {}
    for pattern in patterns or ("*",):
        matching = fnmatch.filter(weights, pattern)
        if not matching:
            raise ValueError(f"{function}: patterns must match a weight, got {pattern!r}")
        names.update(dict.fromkeys(matching))
    for name in names:
        state_of(weights[name]).opted_out = opted_out
    return list(names)
