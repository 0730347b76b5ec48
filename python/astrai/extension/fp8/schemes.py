"""The three matrix products of a linear layer in fp8, for each recipe.

    out [M, N] = x [M, K] @ w [N, K]^T
    grad_x [M, K] = g [M, N] @ w [N, K]
    grad_w [N, K] = g [M, N]^T @ x [M, K]

Operands are laid out so that the summed dimension is the last one in memory: that is what tensor
cores of every GPU take without a detour. Forward sums in the tensor cores' accumulators
(``fast_accum``), backward in fp32.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from astrai.extension.fp8 import cache
from astrai.extension.fp8.recipes import (
    BlockScaling,
    DelayedScaling,
    FP8Recipe,
    RowwiseScaling,
)
from astrai.extension.fp8.region import Config, Step
from astrai.extension.fp8.rings import Ring, WeightRings
from astrai.extension.fp8.weights import WeightState
from astrai.extension.ops import fp8 as ops

WEIGHT_BLOCK = (ops.BLOCK, ops.BLOCK)
Saved = tuple[torch.Tensor | None, ...]
Grads = tuple[torch.Tensor | None, torch.Tensor | None]


class Job(NamedTuple):
    """What a linear layer needs to know besides its tensors.

    Attributes:
        config: Of the region.
        step: Of the region.
        rings: Of the weight, if the recipe has rings.
        state: Of the weight, if its casts may be cached.
        records: Whether the amaxes of x and w count; those of gradients always do, since a backward
            pass belongs to one forward pass, be it computed again.
        out_dtype: Of the result and of the gradients.
    """

    config: Config
    step: Step
    rings: WeightRings | None
    state: WeightState | None
    records: bool
    out_dtype: torch.dtype

    def weight_grad_in_fp8(self) -> bool:
        """Whether grad_w is an fp8 product."""
        return not self.config.bf16_weight_grad


class Scheme:
    """The products under one kind of scaling; all tensors are two-dimensional."""

    @staticmethod
    def forward(
        job: Job,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        saves_x: bool,
        saves_w: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Saved]:
        """Computes out.

        Args:
            job: See there.
            x: [M, K].
            w: [N, K].
            bias: [N] or None.
            saves_x: Whether grad_w will be asked for.
            saves_w: Whether grad_x will be asked for.

        Returns:
            (out, steps of x, steps of w, what ``backward`` wants).
        """
        raise NotImplementedError

    @staticmethod
    def backward(job: Job, g: torch.Tensor, saved: Saved, needs_x: bool, needs_w: bool) -> Grads:
        """Computes grad_x and grad_w, each None if it is not needed."""
        raise NotImplementedError


class TensorScheme(Scheme):
    """One step for each tensor: dynamic and delayed scaling.

    Saved: x in fp8 and transposed (or as it came, for a grad_w in its own dtype), its step, w as it
    came, its step. The fp8 w is made again in the backward pass, with the same step: kept, it would
    hold a copy of all weights between the passes, and those that FSDP gathers would stay gathered.
    """

    @staticmethod
    def forward(job, x, w, bias, saves_x, saves_w):  # noqa: D102
        fmt = job.config.fp8_format.fwd()
        step_x, scale_x = _scales(job, _ring(job, "x"), x, fmt)
        amax_x = job.records
        if saves_x and job.weight_grad_in_fp8():
            x8, saved_x = _quantize_both(_ring(job, "x"), x, scale_x, fmt, amax_x)
        else:
            x8 = _quantize(_ring(job, "x"), x, scale_x, fmt, False, amax_x)
            saved_x = x if saves_x else None
        w8, step_w = cache.cast(
            job.state,
            w,
            _cast_key(job, "forward"),
            functools.partial(_tensor_weight, job, w, fmt),
        )
        out = _mm(job, x8, w8, step_x, step_w, bias=bias, fast_accum=True)
        return out, step_x, step_w, (saved_x, step_x, w if saves_w else None, step_w)

    @staticmethod
    def backward(job, g, saved, needs_x, needs_w):  # noqa: D102
        x, step_x, w, step_w = saved
        formats = job.config.fp8_format
        ring = _ring(job, "g")
        step_g, scale_g = _scales(job, ring, g, formats.bwd())
        in_fp8 = needs_w and job.weight_grad_in_fp8()
        g8 = g8_t = grad_x = grad_w = None
        if needs_x and in_fp8:
            g8, g8_t = _quantize_both(ring, g, scale_g, formats.bwd(), True)
        elif needs_x:
            g8 = _quantize(ring, g, scale_g, formats.bwd(), False, True)
        elif in_fp8:
            g8_t = _quantize(ring, g, scale_g, formats.bwd(), True, True)
        if needs_x:
            w8_t, step_w = cache.cast(
                job.state,
                w,
                _cast_key(job, "backward"),
                functools.partial(_tensor_weight_again, w, step_w, formats.fwd()),
            )
            grad_x = _mm(job, g8, w8_t, step_g, step_w)
        if in_fp8:
            grad_w = _mm(job, g8_t, x, step_g, step_x)
        elif needs_w:
            grad_w = g.t() @ x
        return grad_x, grad_w


def _ring(job: Job, name: str) -> Ring | None:
    if job.rings is None:
        return None
    return job.rings.x if name == "x" else job.rings.w if name == "w" else job.rings.g


def _scales(
    job: Job, ring: Ring | None, x: torch.Tensor, fmt: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(step, its reciprocal) for x."""
    if ring is not None:
        return ring.scales(job.step.live_of(ring.table), x)
    # Of a recipe with rings too, for a weight that has none: one that compiled code computes.
    step = ops.dynamic_step(x, fmt, job.config.recipe.pow2_margin)
    return step, step.reciprocal()


def _quantize(
    ring: Ring | None,
    x: torch.Tensor,
    scale: torch.Tensor,
    fmt: str,
    transposed: bool,
    records: bool,
) -> torch.Tensor:
    if ring is None or not records:
        return ops.quantize(x, scale, fmt, transposed)[0]
    if torch.compiler.is_compiling():
        x8, amax = ops.quantize(x, scale, fmt, transposed)
        ring.record(amax)
        return x8
    return ops.quantize(x, scale, fmt, transposed, amax_out=ring.pending())[0]


def _quantize_both(
    ring: Ring | None, x: torch.Tensor, scale: torch.Tensor, fmt: str, records: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    if ring is None or not records:
        return ops.quantize_dual(x, scale, fmt)[:2]
    if torch.compiler.is_compiling():
        x8, x8_t, amax = ops.quantize_dual(x, scale, fmt)
        ring.record(amax)
        return x8, x8_t
    return ops.quantize_dual(x, scale, fmt, amax_out=ring.pending())[:2]


def _tensor_weight(job: Job, w: torch.Tensor, fmt: str) -> tuple[torch.Tensor, torch.Tensor]:
    ring = _ring(job, "w")
    step, scale = _scales(job, ring, w, fmt)
    return _quantize(ring, w, scale, fmt, False, job.records), step


def _tensor_weight_again(
    w: torch.Tensor, step: torch.Tensor, fmt: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return ops.quantize(w, step.reciprocal(), fmt, transposed=True)[0], step


def _cast_key(job: Job, direction: str) -> tuple[str, FP8Recipe, str]:
    return direction, job.config.recipe, job.config.fp8_format.value


def _mm(
    job: Job,
    a: torch.Tensor,
    b: torch.Tensor,
    step_a: torch.Tensor,
    step_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    trans_b: bool = True,
    fast_accum: bool = False,
) -> torch.Tensor:
    """The product of a [rows, summed] and b [columns, summed] (transposed without trans_b)."""
    return ops.mm_fp8(
        a,
        b,
        step_a,
        trans_b=trans_b,
        bias=bias,
        scale_b=step_b,
        out_dtype=job.out_dtype,
        fast_accum=fast_accum,
    )


class _FreshScheme(Scheme):
    """Operands with several steps, along the summed dimension.

    The products sum along different dimensions, so that each needs casts of its own: x and w are
    saved as they came.
    """

    @staticmethod
    def operand(x: torch.Tensor, fmt: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and steps of x or g [rows, summed]."""
        raise NotImplementedError

    @staticmethod
    def weight(job: Job, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and steps of w [N, K] for out."""
        raise NotImplementedError

    @staticmethod
    def grad_x(job: Job, g8: torch.Tensor, step_g: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """The product of g and w."""
        raise NotImplementedError

    @classmethod
    def forward(cls, job, x, w, bias, saves_x, saves_w):
        x8, step_x = cls.operand(x, job.config.fp8_format.fwd())
        w8, step_w = cls.weight(job, w)
        out = _mm(job, x8, w8, step_x, step_w, bias=bias, fast_accum=True)
        return out, step_x, step_w, (x if saves_x else None, None, w if saves_w else None, None)

    @classmethod
    def backward(cls, job, g, saved, needs_x, needs_w):
        x, _, w, _ = saved
        formats = job.config.fp8_format
        grad_x = grad_w = None
        if needs_x:
            g8, step_g = cls.operand(g, formats.bwd())
            grad_x = cls.grad_x(job, g8, step_g, w)
        if needs_w and job.weight_grad_in_fp8():
            g8, step_g = cls.operand(g.t(), formats.bwd())
            x8, step_x = cls.operand(x.t(), formats.fwd())
            grad_w = _mm(job, g8, x8, step_g, step_x)
        elif needs_w:
            grad_w = g.t() @ x
        return grad_x, grad_w


class RowwiseScheme(_FreshScheme):
    """A step for each row of an operand."""

    @staticmethod
    def operand(x, fmt):  # noqa: D102
        return ops.quantize_rowwise(x, fmt)

    @staticmethod
    def weight(job, w):  # noqa: D102
        make = functools.partial(ops.quantize_rowwise, w, job.config.fp8_format.fwd())
        return cache.cast(job.state, w, _cast_key(job, "forward"), make)

    @staticmethod
    def grad_x(job, g8, step_g, w):  # noqa: D102
        make = functools.partial(ops.quantize_rowwise, w.t(), job.config.fp8_format.fwd())
        w8, step_w = cache.cast(job.state, w, _cast_key(job, "backward"), make)
        return _mm(job, g8, w8, step_g, step_w)


class BlockScheme(_FreshScheme):
    """A step for 128 elements of x and g along the summed dimension, and for 128 x 128 of w."""

    @staticmethod
    def operand(x, fmt):  # noqa: D102
        return ops.quantize_block(x, fmt=fmt)

    @staticmethod
    def weight(job, w):  # noqa: D102
        fmt = job.config.fp8_format.fwd()
        make = functools.partial(ops.quantize_block, w, WEIGHT_BLOCK, fmt)
        return cache.cast(job.state, w, _cast_key(job, "forward"), make)

    @staticmethod
    def grad_x(job, g8, step_g, w):  # noqa: D102
        w8, step_w = BlockScheme.weight(job, w)  # square blocks: the transpose has the same codes
        return _mm(job, g8, w8, step_g, step_w.t().contiguous(), trans_b=False)


def scheme_of(recipe: FP8Recipe) -> type[Scheme]:
    """The products for a recipe."""
    if isinstance(recipe, RowwiseScaling):
        return RowwiseScheme
    if isinstance(recipe, BlockScaling):
        return BlockScheme
    return TensorScheme


def has_rings(recipe: FP8Recipe) -> bool:
    """Whether the recipe keeps state for each weight."""
    return isinstance(recipe, DelayedScaling)
