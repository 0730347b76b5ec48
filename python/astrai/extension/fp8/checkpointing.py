"""Activation checkpointing: a function that is computed again does so in its first run's regions.

``torch.utils.checkpoint`` runs a function, forgets what it saved, and runs it again in the backward
pass: on another thread maybe, and after its region was left. Both of its variants pass the function
through one place each, which ``install`` wraps.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint

from astrai.extension.fp8.region import LOCAL, Step

_GENERATOR = "_checkpoint_without_reentrant_generator"
_originals: dict[str, Any] = {}


class Tape:
    """The regions of a checkpointed function's first run: the one around it, and those in it."""

    def __init__(self) -> None:
        self.frame = LOCAL.frame
        self.steps: list[Step] = []

    @contextlib.contextmanager
    def first_run(self, trains: bool) -> Iterator[None]:
        """The function runs: the regions that it enters are remembered.

        Args:
            trains: Whether autograd will record it, though it does not do so now.
        """
        saved = LOCAL.tapes, LOCAL.trains
        LOCAL.tapes, LOCAL.trains = (*LOCAL.tapes, self), LOCAL.trains or trains
        try:
            yield
        finally:
            LOCAL.tapes, LOCAL.trains = saved

    def rerun(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls the function in the regions of its first run."""
        saved = LOCAL.frame, LOCAL.tapes, LOCAL.trains, LOCAL.replay
        LOCAL.frame, LOCAL.tapes, LOCAL.trains = self.frame, (), False
        LOCAL.replay = iter(self.steps)
        try:
            return function(*args, **kwargs)
        finally:
            LOCAL.frame, LOCAL.tapes, LOCAL.trains, LOCAL.replay = saved


class _Reentrant:
    """A function for the reentrant variant, which runs it the first time without autograd."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._trains = torch.is_grad_enabled()
        self._tape: Tape | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._tape is None:
            self._tape = Tape()
            with self._tape.first_run(self._trains):
                return self._function(*args, **kwargs)
        return self._tape.rerun(self._function, *args, **kwargs)


def install() -> None:
    """Wraps torch's checkpointing, once."""
    if _originals:
        return
    function = torch_checkpoint.CheckpointFunction
    apply, generator = function.apply, getattr(torch_checkpoint, _GENERATOR)
    _originals[_GENERATOR] = generator

    def wrapped_apply(run_function: Callable[..., Any], *args: Any) -> Any:
        return apply(_Reentrant(run_function), *args)

    @functools.wraps(generator)
    def wrapped_generator(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[Any]:
        tape = Tape()
        inner = generator(functools.partial(tape.rerun, fn), *args, **kwargs)
        with tape.first_run(trains=False):
            yield from inner  # the caller runs the function itself, the first time

    function.apply = staticmethod(wrapped_apply)
    setattr(torch_checkpoint, _GENERATOR, wrapped_generator)


def remove() -> None:
    """Takes ``install`` back."""
    if _originals:
        del torch_checkpoint.CheckpointFunction.apply  # what it inherits is there again
        setattr(torch_checkpoint, _GENERATOR, _originals.pop(_GENERATOR))
