"""Where linear layers are caught: an override of ``aten::linear``, and its counterpart in Dynamo.

The override is installed by entering the first region, so that a process without one runs torch's
own code alone, and can be removed again. Code that TorchDynamo traces does not reach it: there, a
handler of ``torch.nn.functional.linear`` traces ``route`` instead, which reads the thread's region.
That read is guarded as any other, so that entering, leaving or changing a region recompiles.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import warnings
from typing import Any

import torch

from astrai.extension.fp8 import checkpointing
from astrai.extension.fp8.linear import route, route_without_state
from astrai.extension.fp8.region import LOCAL
from astrai.extension.fp8.weights import rings_of, state_of

_KEYS = ("CPU", "CUDA", "AutogradCPU", "AutogradCUDA")
_library: torch.library.Library | None = None


def fp8_linear_enabled() -> bool:
    """Whether ``aten::linear`` is overridden in this process."""
    return _library is not None


def fp8_linear_enable(flag: bool = True) -> None:
    """Installs or removes the override of ``aten::linear``; the first region installs it too.

    Without the override regions have no effect.
    """
    global _library
    if flag == (_library is not None):
        return
    if flag:
        library = torch.library.Library("aten", "IMPL")
        for key in _KEYS:
            library.impl("linear", _linear, key)
        checkpointing.install()
        _install_handler()
        _library = library
    else:
        _library._destroy()
        _library = None
        checkpointing.remove()
        _remove_handler()
    # Torch's dispatcher in Python, which tracing uses, remembers where calls went.
    torch.ops.aten.linear.default._dispatch_cache.clear()


# What torch.compile runs outside of its graphs comes here as well, and must not be traced.
@torch._disable_dynamo
def _linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    if LOCAL.frame is not None and not _is_traced():
        out = route(x, weight, bias)
        if out is not None:
            return out
    return torch.ops.aten.linear.default.decompose(x, weight, bias)


def _is_traced() -> bool:
    """Whether what runs is a trace or a transform, which sees the layer as torch's own."""
    return (
        torch._C._functorch.maybe_current_level() is not None
        or torch._C._get_tracing_state() is not None
        or torch.compiler.is_compiling()
    )


# ---- TorchDynamo ----


def _handlers() -> dict[Any, Any]:
    dynamo = importlib.import_module("torch._dynamo.variables.torch")
    return dynamo.TorchInGraphFunctionVariable._get_handlers()


def _install_handler() -> None:
    loaded = "torch._dynamo" in sys.modules
    try:
        _handlers()[torch.nn.functional.linear] = _trace_linear
    except (ImportError, AttributeError) as error:  # it is no public interface
        warnings.warn(
            f"fp8_autocast: code compiled with this torch {torch.__version__} does not see regions "
            f"({error})",
            RuntimeWarning,
            stacklevel=4,
        )
        return
    if loaded:  # what was compiled before has no guard on regions
        torch._dynamo.reset()


def _remove_handler() -> None:
    with contextlib.suppress(ImportError, AttributeError):
        _handlers().pop(torch.nn.functional.linear, None)
        torch._dynamo.reset()


def _trace_linear(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    """Dynamo's handler: traces ``_routed`` in place of the layer."""
    from torch._dynamo.variables.base import VariableTracker

    del variable
    arguments = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
    weight = arguments["weight"]
    weight = weight.realize() if hasattr(weight, "realize") else weight
    known = _prepare(tx, weight)
    function = _routed if known else _routed_without_state
    return tx.inline_user_function_return(
        VariableTracker.build(tx, function), list(args), dict(kwargs)
    )


def _prepare(tx: Any, weight: Any) -> bool:
    """Makes the state that traced code will look up; False if the weight is not an input."""
    source = getattr(weight, "source", None)
    if source is None:
        return False
    name = source.name if isinstance(source.name, str) else source.name()
    try:
        value = eval(name, {"L": tx.output.local_scope, "G": tx.output.global_scope})
    except Exception:  # a source that has no expression
        return False
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return False
    frame = LOCAL.frame
    if frame is not None and frame.config.ring_key:
        _refuse_checkpoint(tx)
        state, config, live = state_of(value), frame.config, frame.step.live
        rings = rings_of(state, config.recipe, config.fp8_format, value.device, live)
        for ring in (rings.x, rings.g):
            frame.step.live_of(ring.table)
    return True


def _refuse_checkpoint(tx: Any) -> None:
    """Raises Dynamo's error for what it cannot trace: rings inside a compiled checkpoint.

    What is computed again in the backward graph would write the same rings as the forward graph.
    """
    tracer = tx.output.current_tracer
    while tracer is not None:
        if "checkpoint" in str(getattr(tracer, "source_target", "")):
            raise torch._dynamo.exc.Unsupported(
                "fp8_autocast: delayed scaling cannot be compiled together with "
                "torch.utils.checkpoint; compile the function that is checkpointed instead"
            )
        tracer = tracer.parent


def _routed(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    x, w, b = _autocast(input, weight, bias)
    if w is weight:
        out = route(x, w, b)
    else:
        out = route_without_state(x, w, b)
    return torch.ops.aten.linear.default(input, weight, bias) if out is None else out


def _routed_without_state(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    out = route_without_state(*_autocast(input, weight, bias))
    return torch.ops.aten.linear.default(input, weight, bias) if out is None else out


def _autocast(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The arguments as torch.autocast would cast them on their way to aten::linear."""
    kind = x.device.type
    if LOCAL.frame is None or not torch.is_autocast_enabled(kind):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(kind)
    return x.to(dtype), weight.to(dtype), bias if bias is None else bias.to(dtype)
