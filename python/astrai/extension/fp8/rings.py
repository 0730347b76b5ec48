"""Device state of delayed scaling: rings of amaxes and the steps that follow from them.

The rings of many weights lie in one table, so that a training step folds all of them in a few
launches. A table never moves: captured CUDA graphs keep pointing at it. Forward rings (inputs and
weights) and gradient rings are tables of their own, because they fold at different times, and
because compiled code may write a tensor in its forward or in its backward graph, not in both.

A ring is written in three ways:

- ``pending`` takes the largest amax of the step that is running (0: none yet);
- ``fold`` enters the pending amaxes and makes new steps, at the end of a step;
- the first tensor that a ring sees gives its first step ("seeding").

Nothing here waits for the device.
"""

from __future__ import annotations

import itertools
import weakref

import torch

from astrai.extension.fp8.recipes import FP8_MAX, DelayedScaling
from astrai.extension.ops._registration import define
from astrai.extension.ops.reference.fp8 import finite_amax, step_of

CAPACITY = 512  # weights of a table
# Uses at which a ring without a step takes it from the tensor. More than one, since the first may
# be zero: a weight that starts so, or the gradient before such a weight.
SEEDINGS = 4
_FIELDS = ("history", "position", "step", "pending", "nonfinite")

_table_ids = itertools.count()


class RingTable:
    """Rings of one recipe, format and device.

    Attributes:
        history: fp32 [rings, history_len], amaxes.
        position: int64 [rings], the entry that is written next.
        step: fp32 [rings], the current dequantisation steps; 0 before a ring's first use.
        pending: fp32 [rings], the largest amax of the running step.
        nonfinite: int64 [rings], how many steps had an amax that was not finite.
    """

    # Tensors of inference mode could not be written outside of it.
    @torch.inference_mode(False)
    def __init__(self, recipe: DelayedScaling, fmt: str, rings: int, device: torch.device) -> None:
        self.id = next(_table_ids)
        self.recipe, self.fmt, self.device = recipe, fmt, device
        self.history = torch.zeros(rings, recipe.history_len, device=device)
        self.position = torch.zeros(rings, dtype=torch.int64, device=device)
        self.step = torch.zeros(rings, device=device)
        self.pending = torch.zeros(rings, device=device)
        self.nonfinite = torch.zeros(rings, dtype=torch.int64, device=device)

    @torch.inference_mode(False)
    def snapshot(self) -> torch.Tensor:
        """The steps as they are now: fp32 [3, rings].

        Returns:
            The steps, their reciprocals (1 for rings without a step), and 1 for rings with one.
        """
        return _columns(self.step)

    def fold(self, group: torch.distributed.ProcessGroup | None) -> None:
        """Enters the pending amaxes, largest over the group's ranks, and makes new steps.

        Where nothing is pending, or something that is not finite, the ring and its step stay.
        """
        pending = self.pending
        if group is not None:
            # Infinity stands for NaN too: it is the largest on every rank in any order.
            pending.nan_to_num_(nan=float("inf"), posinf=float("inf"))
            torch.distributed.all_reduce(pending, torch.distributed.ReduceOp.MAX, group=group)
        finite = torch.isfinite(pending)
        good = finite & (pending > 0)
        entry = self.position.unsqueeze(1)
        kept = self.history.gather(1, entry).squeeze(1)
        self.history.scatter_(1, entry, torch.where(good, pending, kept).unsqueeze(1))
        amax = pending if self.recipe.amax == "most_recent" else self.history.amax(1)
        step = step_of(amax, FP8_MAX[self.fmt], self.recipe.pow2_margin)
        self.step.copy_(torch.where(good, step, self.step))
        self.position.copy_(
            torch.where(good, (self.position + 1) % self.recipe.history_len, self.position)
        )
        self.nonfinite.add_(~finite)
        pending.zero_()

    def clear(self, rows: slice) -> None:
        """Empties rings."""
        for name in _FIELDS:
            getattr(self, name)[rows] = 0

    def read(self, rows: slice) -> dict[str, torch.Tensor]:
        """Copies of rings on the CPU, by field."""
        return {name: getattr(self, name)[rows].detach().cpu().clone() for name in _FIELDS}

    def write(self, rows: slice, fields: dict[str, torch.Tensor]) -> None:
        """Sets rings to what ``read`` gave."""
        for name in _FIELDS:
            getattr(self, name)[rows].copy_(fields[name])


class Ring:
    """One ring of a table.

    Attributes:
        table: Where it lies.
        index: Its row.
        row: The same as an int64 tensor [1], for compiled code.
        seedings: Uses that may still seed it, see ``SEEDINGS``.
    """

    @torch.inference_mode(False)
    def __init__(self, table: RingTable, index: int) -> None:
        self.table, self.index = table, index
        self.row = torch.full((1,), index, dtype=torch.int64, device=table.device)
        self.seedings = SEEDINGS
        _rings[self.row.data_ptr()] = self

    def pending(self) -> torch.Tensor:
        """The slot that takes amaxes, fp32 [1]."""
        return self.table.pending[self.index : self.index + 1]

    def scales(self, live: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(step, its reciprocal), fp32 [1] each; from x itself if the ring has no step yet.

        Args:
            live: The training step's snapshot of the table.
            x: The tensor to be quantised.
        """
        if torch.compiler.is_compiling():
            self._seed(live, x)
            scales = live.index_select(1, self.row)
            return scales[0], scales[1]
        if self.seedings:
            self._seed(live, x)
        # Through .data: backward passes save these views, and another ring's seeding, which writes
        # elsewhere in the snapshot, must not count as a change of theirs.
        column = live.data[:, self.index : self.index + 1]
        return column[0], column[1]

    def clear_in(self, live: torch.Tensor) -> None:
        """Takes the ring out of a snapshot, where its row may have been another's."""
        live[:, self.index] = 1.0
        live[2, self.index] = 0.0

    def _seed(self, live: torch.Tensor, x: torch.Tensor) -> None:
        table = self.table
        torch.ops.astrai.fp8_seed_(
            x, table.step, live, self.row, table.fmt, table.recipe.pow2_margin
        )

    def record(self, amax: torch.Tensor) -> None:
        """Takes an amax into the pending slot; for compiled code, which has no views as inputs."""
        pending = self.table.pending
        larger = torch.maximum(pending.index_select(0, self.row), amax)
        pending.index_copy_(0, self.row, larger)


class WeightRings:
    """The three rings of a weight: its input x, itself w, and the gradient g of its output."""

    def __init__(self, pair: _Tables, row: int) -> None:
        self.device = pair.forward.device
        self.x = Ring(pair.forward, 2 * row)
        self.w = Ring(pair.forward, 2 * row + 1)
        self.g = Ring(pair.gradient, row)
        self._release = weakref.finalize(self, pair.release, row)
        self._release.atexit = False

    def read(self) -> dict[str, dict[str, torch.Tensor]]:
        """The contents on the CPU."""
        forward = slice(self.x.index, self.x.index + 2)
        gradient = slice(self.g.index, self.g.index + 1)
        return {
            "forward": self.x.table.read(forward),
            "gradient": self.g.table.read(gradient),
        }

    def write(self, contents: dict[str, dict[str, torch.Tensor]]) -> None:
        """Sets the contents to what ``read`` gave."""
        self.x.table.write(slice(self.x.index, self.x.index + 2), contents["forward"])
        self.g.table.write(slice(self.g.index, self.g.index + 1), contents["gradient"])
        steps = [*contents["forward"]["step"].tolist(), *contents["gradient"]["step"].tolist()]
        for ring, step in zip((self.x, self.w, self.g), steps, strict=True):
            ring.seedings = 0 if step > 0 else SEEDINGS


class _Tables:
    """A table of forward rings and one of gradient rings, for the same weights."""

    def __init__(
        self, recipe: DelayedScaling, formats: tuple[str, str], device: torch.device
    ) -> None:
        self.forward = RingTable(recipe, formats[0], 2 * CAPACITY, device)
        self.gradient = RingTable(recipe, formats[1], CAPACITY, device)
        self._free = list(range(CAPACITY - 1, -1, -1))
        self._dirty: set[int] = set()

    def take(self) -> int | None:
        """A row with empty rings; None if all are in use."""
        if not self._free:
            return None
        row = self._free.pop()
        if row in self._dirty:
            self._dirty.remove(row)
            self.forward.clear(slice(2 * row, 2 * row + 2))
            self.gradient.clear(slice(row, row + 1))
        return row

    def release(self, row: int) -> None:
        """Gives a row back. Called when a weight dies, so it only takes a note."""
        self._dirty.add(row)
        self._free.append(row)


# By the address of ``row``, which is the ring's own as long as it lives. It only saves work: rings
# that are not found, as in graphs that copy their inputs, are seeded by what the device holds.
_rings: weakref.WeakValueDictionary[int, Ring] = weakref.WeakValueDictionary()
_tables: dict[tuple[DelayedScaling, tuple[str, str], torch.device], list[_Tables]] = {}


def new_rings(
    recipe: DelayedScaling, formats: tuple[str, str], device: torch.device
) -> WeightRings:
    """Empty rings for a weight; formats are those of forward and backward."""
    pairs = _tables.setdefault((recipe, formats, device), [])
    for pair in pairs:
        row = pair.take()
        if row is not None:
            return WeightRings(pair, row)
    pairs.append(_Tables(recipe, formats, device))
    return WeightRings(pairs[-1], pairs[-1].take())


def tables(recipe: DelayedScaling, formats: tuple[str, str]) -> list[_Tables]:
    """All tables of a recipe and its formats, on any device, in the order they were made."""
    found = [pairs for key, pairs in _tables.items() if key[:2] == (recipe, formats)]
    return [pair for pairs in found for pair in pairs]


def is_capturing() -> bool:
    """Whether the current stream records a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _columns(step: torch.Tensor) -> torch.Tensor:
    there = step > 0
    usable = torch.where(there, step, 1.0)
    return torch.stack((usable, usable.reciprocal(), there.float()))


def _seed_ring(x, step, live, row, fmt, pow2_margin):
    ring = _rings.get(row.data_ptr())
    if ring is not None and not ring.seedings:
        return
    # The device decides, so that a captured graph seeds at its first replay alone.
    old, amax = step.index_select(0, row), finite_amax(x.detach())
    first = torch.where(amax > 0, step_of(amax, FP8_MAX[fmt], pow2_margin), 0.0)
    new = torch.where(old > 0, old, first)
    step.index_copy_(0, row, new)
    # A step that the snapshot has stays: after the end of its training step the ring has another.
    kept = live.index_select(1, row)
    live.index_copy_(1, row, torch.where(kept[2] > 0, kept, _columns(new)))
    if ring is not None and not is_capturing():
        ring.seedings -= 1


define(
    "fp8_seed_(Tensor x, Tensor(a!) step, Tensor(b!) live, Tensor row, str fmt, "
    "float pow2_margin) -> ()",
    _seed_ring,
    lambda *args: None,
    _seed_ring,
)
