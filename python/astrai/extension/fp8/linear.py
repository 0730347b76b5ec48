"""Linear layers in fp8, with autograd."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from astrai.extension.fp8 import region
from astrai.extension.fp8.recipes import FP8Recipe
from astrai.extension.fp8.region import LOCAL, Config, Frame, Step
from astrai.extension.fp8.schemes import Job, has_rings, scheme_of
from astrai.extension.fp8.weights import (
    WeightState,
    known_state,
    leaf_of,
    rings_of,
    state_of,
)
from astrai.extension.ops import fp8 as ops
from astrai.extension.ops._fp8_arguments import FP8_DTYPES

# Layers in fp32 are left alone: who keeps one in fp32 wants its precision.
DTYPES = (torch.bfloat16, torch.float16)
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class _LinearFp8(torch.autograd.Function):
    """``x @ weight^T + bias``; what it saves is said by the schemes."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, job: Job) -> torch.Tensor:
        needs_x, needs_w = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        rows = x.reshape(-1, x.shape[-1])
        scheme = scheme_of(job.config.recipe)
        out, _, _, saved = scheme.forward(job, rows, weight, bias, needs_w, needs_x)
        ctx.save_for_backward(*saved)
        ctx.job, ctx.x_shape = job, x.shape
        ctx.bias_dtype = None if bias is None else bias.dtype
        return out.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needs_x, needs_w, needs_b = ctx.needs_input_grad[:3]
        g = grad.reshape(-1, grad.shape[-1])
        grad_x = grad_w = grad_b = None
        if needs_x or needs_w:
            scheme = scheme_of(ctx.job.config.recipe)
            grad_x, grad_w = scheme.backward(ctx.job, g, ctx.saved_tensors, needs_x, needs_w)
        if grad_x is not None:
            grad_x = grad_x.view(ctx.x_shape)
        if needs_b:
            grad_b = g.sum(0, dtype=ctx.bias_dtype)
        return grad_x, grad_w, grad_b, None


def route(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
    """The layer's result if the region that is open wants it in fp8, else None."""
    frame = LOCAL.frame
    if frame is None or not frame.config.enabled or not _fits(x, weight, bias):
        return None
    # Only what needs a state makes one: compiled code guards on whether there is one.
    config = frame.config
    if torch.compiler.is_compiling() or not (config.ring_key or config.cache_weights):
        return _run(frame, x, weight, bias, known_state(leaf_of(weight)))
    return _run(frame, x, weight, bias, state_of(leaf_of(weight)))


def route_without_state(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor | None:
    """``route`` for a weight that compiled code computes: rings have nothing to hang on."""
    frame = LOCAL.frame
    if frame is None or not frame.config.enabled or not _fits(x, weight, bias):
        return None
    return _run(frame, x, weight, bias, None)


def _fits(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether these are tensors that the fp8 layer takes."""
    if type(x) not in _PLAIN or type(weight) not in _PLAIN:
        return False
    if bias is not None and (type(bias) not in _PLAIN or bias.dim() != 1):
        return False
    return (
        x.dtype in DTYPES
        and weight.dtype == x.dtype
        and x.dim() >= 2
        and weight.dim() == 2
        and x.shape[-1] == weight.shape[1]
        and x.device == weight.device
        and x.numel() > 0
        and weight.numel() > 0
    )


def _run(
    frame: Frame,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: WeightState | None,
) -> torch.Tensor | None:
    config = frame.config
    if state is not None and state.opted_out:
        return None
    if config.filter is not None:
        name = state.name if state is not None else ""
        (n, k), m = weight.shape, math.prod(x.shape[:-1])
        if not config.filter(name, m, n, k):
            return None
    records = frame.step.records and region.is_recording()
    job = _job(config, frame.step, x, state, records)
    if torch.is_grad_enabled():
        return _LinearFp8.apply(x, weight, bias, job)
    return _forward(job, x, weight, bias)[0]


def _job(
    config: Config, step: Step, x: torch.Tensor, state: WeightState | None, records: bool
) -> Job:
    rings = None
    if config.ring_key and state is not None:
        if torch.compiler.is_compiling():
            rings = state.rings[config.ring_key]
        else:
            rings = rings_of(state, config.recipe, config.fp8_format, x.device, step.live)
    cached = state if config.cache_weights else None
    return Job(config, step, rings, cached, records, x.dtype)


def _forward(
    job: Job, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = x.reshape(-1, x.shape[-1])
    scheme = scheme_of(job.config.recipe)
    out, step_x, step_w, _ = scheme.forward(job, rows, weight, bias, False, False)
    return out.view(*x.shape[:-1], weight.shape[0]), step_x, step_w


def fp8_linear_forward(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    recipe: FP8Recipe | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One linear layer in fp8, forward alone: no autograd, nothing recorded.

    Args:
        x: bf16 or fp16 [..., K].
        w: x's dtype [N, K], or fp8 codes, which are taken as they are (with step 1).
        bias: [N] or None.
        recipe: None: that of the region that is open, or ``DynamicScaling()``.

    Returns:
        (out [..., N] in x's dtype, step of x, step of w).

    Raises:
        TypeError: Tensors that the layer does not take.
    """
    frame = LOCAL.frame
    config = frame.config if frame is not None else region.DEFAULT
    step = frame.step if frame is not None else Step(records=False)
    if recipe is not None:
        config = Config(True, recipe, config.fp8_format)
    with torch.no_grad():
        if w.dtype in FP8_DTYPES.values():
            return _forward_codes(config, step, x, w, bias)
        if not _fits(x, w, bias):
            raise TypeError(
                "fp8_linear_forward: x and w must be plain bf16 or fp16 tensors [..., K] and "
                f"[N, K], got {x.dtype} {tuple(x.shape)} and {w.dtype} {tuple(w.shape)}"
            )
        state = state_of(leaf_of(w)) if has_rings(config.recipe) else None
        return _forward(_job(config, step, x, state, False), x, w, bias)


def _forward_codes(
    config: Config, step: Step, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    step_x = ops.dynamic_step(x, config.fp8_format.fwd())
    x8, _ = ops.quantize(x.reshape(-1, x.shape[-1]), step_x.reciprocal(), config.fp8_format.fwd())
    step_w = torch.ones_like(step_x)
    out = ops.mm_fp8(x8, w, step_x, trans_b=True, bias=bias, out_dtype=x.dtype)
    return out.view(*x.shape[:-1], w.shape[0]), step_x, step_w
