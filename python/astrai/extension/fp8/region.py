"""Regions: where linear layers take fp8, and which training step they belong to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from astrai.extension.fp8 import rings
from astrai.extension.fp8.recipes import DelayedScaling, DynamicScaling, FP8Format, FP8Recipe
from astrai.extension.fp8.rings import RingTable
from astrai.extension.fp8.weights import ring_key

Filter = Callable[[str, int, int, int], bool]


@dataclass(frozen=True)
class Config:
    """What a region asks for: the arguments of ``fp8_autocast``."""

    enabled: bool
    recipe: FP8Recipe
    fp8_format: FP8Format
    fp8_group: Any = None
    cache_weights: bool = False
    bf16_weight_grad: bool = False
    filter: Filter | None = None
    # Key of the rings that the recipe uses; "" if it uses none.
    ring_key: str = field(init=False, default="")

    def __post_init__(self) -> None:
        if isinstance(self.recipe, DelayedScaling):
            object.__setattr__(self, "ring_key", ring_key(self.recipe, self.fp8_format))


class Step:
    """One training step as delayed scaling sees it: what an outermost region encloses.

    All tensors of a step are quantised with the steps that the rings had when it began, those of
    its backward pass too, and those that activation checkpointing computes again.

    Attributes:
        records: Whether its amaxes count; they do not in what is computed again.
        live: Table id -> snapshot of the table's steps.
    """

    def __init__(self, records: bool) -> None:
        self.records = records
        self.live: dict[int, torch.Tensor] = {}
        self._opened: dict[str, Config] = {}

    def open(self, config: Config) -> None:
        """Prepares for a region: folds what the last backward pass left, and takes snapshots."""
        key = config.ring_key
        if not key or key in self._opened or not config.enabled:
            return
        self._opened[key] = config
        for pair in _tables_of(config):
            if self.records:
                pair.gradient.fold(config.fp8_group)
            for table in (pair.forward, pair.gradient):
                self.live[table.id] = table.snapshot()

    def live_of(self, table: RingTable) -> torch.Tensor:
        """The snapshot of a table, which may have been made in this step."""
        live = self.live.get(table.id)
        if live is None:
            live = self.live[table.id] = table.snapshot()
        return live

    def close(self) -> None:
        """Folds the forward rings."""
        if self.records:
            for config in self._opened.values():
                for pair in _tables_of(config):
                    pair.forward.fold(config.fp8_group)


def _tables_of(config: Config) -> list[Any]:
    formats = (config.fp8_format.fwd(), config.fp8_format.bwd())
    return rings.tables(config.recipe, formats)


class Frame:
    """One level of nested regions."""

    __slots__ = ("config", "owns_step", "parent", "step")

    def __init__(self, config: Config, step: Step, owns_step: bool, parent: Frame | None) -> None:
        self.config, self.step = config, step
        self.owns_step, self.parent = owns_step, parent


class _Local(threading.local):
    """The regions of a thread.

    Attributes:
        frame: The innermost region.
        tapes: Of the checkpointed functions that are running for the first time.
        trains: Whether one of them will be recorded by autograd when it runs again.
        replay: Steps of the regions that a function which is computed again will enter; None while
            nothing is.
    """

    # TorchDynamo guards on these as on any attribute: compiled code follows its thread's regions.
    def __init__(self) -> None:
        self.frame: Frame | None = None
        self.tapes: tuple[Any, ...] = ()
        self.trains = False
        self.replay: Iterator[Step] | None = None


LOCAL = _Local()


def in_backward() -> bool:
    """Whether this thread runs a backward pass."""
    return torch._C._current_graph_task_id() != -1


def is_recording() -> bool:
    """Whether a linear layer that runs now counts for delayed scaling.

    It does where it trains: autograd records it, or will when a checkpointed function runs again.
    """
    return LOCAL.replay is None and (torch.is_grad_enabled() or LOCAL.trains)


def enter(config: Config) -> None:
    """Opens a region."""
    parent = LOCAL.frame
    if parent is not None:
        step, owns = parent.step, False
    elif LOCAL.replay is not None:
        step, owns = next(LOCAL.replay, None) or Step(records=False), False
    else:
        step, owns = Step(records=not in_backward()), True
    if parent is None:
        for tape in LOCAL.tapes:
            tape.steps.append(step)
    if owns or parent is not None:
        step.open(config)
    LOCAL.frame = Frame(config, step, owns, parent)


def leave(fold: bool) -> None:
    """Closes the innermost region; an outermost one ends its training step, if ``fold``."""
    frame = LOCAL.frame
    if frame is None:
        raise RuntimeError("fp8_autocast: must be left as often as entered, got one exit too many")
    LOCAL.frame = frame.parent
    if frame.owns_step and fold:
        frame.step.close()


DEFAULT = Config(False, DynamicScaling(), FP8Format.HYBRID)
