"""What the attention operators share: feature arguments, outputs, registration.

Each kernel has three operators: ``<name>`` returns out, ``<name>_lse`` returns (out, lse), and
``<name>_out`` writes out, lse and the workspace, and whatever else the kernel writes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from astrai.extension.ops._kernel import require_tensor
from astrai.extension.ops._registration import define
from astrai.extension.ops.reference import Features, Step

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Window = tuple[int, int]

UNLIMITED: Window = (-1, -1)

# A step is one argument to the functions, a number and a tensor to the operators.
FEATURE_SCHEMA = (
    "bool is_causal=False, float? scale=None, int[] window=[-1, -1], float softcap=0.0, "
    "Tensor? sinks=None, float? k_scale=None, float? v_scale=None, Tensor? k_scale_tensor=None, "
    "Tensor? v_scale_tensor=None"
)
FEATURES = 9  # arguments of the schema


def split_step(step: Step) -> tuple[float | None, torch.Tensor | None]:
    """A dequantisation step as the operators take it."""
    return (None, step) if isinstance(step, torch.Tensor) else (step, None)


def pack_features(
    is_causal: bool,
    scale: float | None,
    window: list[int],
    softcap: float,
    sinks: torch.Tensor | None,
    k_scale: float | None,
    v_scale: float | None,
    k_scale_tensor: torch.Tensor | None,
    v_scale_tensor: torch.Tensor | None,
) -> Features:
    """The arguments of FEATURE_SCHEMA as one value."""
    return Features(
        is_causal,
        scale,
        (window[0], window[1]),
        softcap,
        sinks,
        k_scale if k_scale_tensor is None else k_scale_tensor,
        v_scale if v_scale_tensor is None else v_scale_tensor,
    )


def schema_arguments(
    is_causal: bool,
    scale: float | None,
    window: Window,
    softcap: float,
    sinks: torch.Tensor | None,
    k_scale: Step,
    v_scale: Step,
) -> tuple[object, ...]:
    """The arguments of a function as those of FEATURE_SCHEMA."""
    (k_number, k_tensor), (v_number, v_tensor) = split_step(k_scale), split_step(v_scale)
    return is_causal, scale, list(window), softcap, sinks, k_number, v_number, k_tensor, v_tensor


def kernel_arguments(arguments: tuple[object, ...]) -> tuple[object, ...]:
    """The arguments of FEATURE_SCHEMA as the bindings take them, each step as one."""
    *first, k_number, v_number, k_tensor, v_tensor = arguments
    return (
        *first,
        k_number if k_tensor is None else k_tensor,
        v_number if v_tensor is None else v_tensor,
    )


def new_out(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """An output for q, with the head dim of v: contiguous."""
    if q.dim() == 0 or v.dim() == 0 or q.size(-1) == v.size(-1):
        return torch.empty_like(q, memory_format=torch.contiguous_format)
    return q.new_empty((*q.shape[:-1], v.size(-1)))


def new_lse(q: torch.Tensor) -> torch.Tensor:
    """An lse for q."""
    return torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)


def outputs(
    name: str,
    q: torch.Tensor,
    v: torch.Tensor,
    v_name: str,
    out: torch.Tensor | None,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``out`` or a new one, and a new lse if it is wanted."""
    if out is None or return_lse:
        require_tensor(name, "q", q)
    if out is None:
        require_tensor(name, v_name, v)
        out = new_out(q, v)
    return out, new_lse(q) if return_lse else None


@dataclass(frozen=True)
class AttentionOperators:
    """The operators of one kernel.

    Attributes:
        name: Of the operators.
        schema: Of the inputs, the first of which is q.
        v: Index of the input that has the head dim of the output, v or v_cache.
        launch: ``launch(inputs, extra, out, lse, workspace)``; the extra ones are None for
            ``<name>`` and ``<name>_lse``.
        reference: ``reference(inputs, extra)`` -> (out, lse) on the CPU.
        extra: Schema of inputs that ``<name>_out`` alone has, behind the others.
        mutates: Indices of the inputs that ``<name>_out`` writes.
    """

    name: str
    schema: str
    v: int
    launch: Callable[..., None]
    reference: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    extra: str = ""
    mutates: tuple[int, ...] = ()

    def call(
        self,
        inputs: tuple[object, ...],
        extra: tuple[object, ...],
        out: torch.Tensor | None,
        return_lse: bool,
        workspace: torch.Tensor | None,
    ) -> Result:
        """A call through torch's dispatcher."""
        operators = torch.ops.astrai
        if all(x is None for x in (out, workspace, *extra)):
            return getattr(operators, self.name + ("_lse" if return_lse else ""))(*inputs)
        out, lse = outputs(self.name, inputs[0], inputs[self.v], "v", out, return_lse)
        getattr(operators, f"{self.name}_out")(*inputs, *extra, out, lse, workspace)
        return out if lse is None else (out, lse)

    def register(self) -> None:
        """Defines the three operators."""
        defaults = [
            argument.default_value
            for argument in torch._C.parse_schema(f"{self.name}({self.schema}) -> ()").arguments
        ]
        extra_count = len(_split_schema(self.extra))
        no_extra = (None,) * extra_count

        def fill(args):
            """All inputs; torch leaves out those at the end that have their defaults."""
            return (*args, *defaults[len(args) :])

        def new_outputs(inputs):
            return new_out(inputs[0], inputs[self.v]), new_lse(inputs[0])

        def run(*args):
            inputs = fill(args)
            out = new_out(inputs[0], inputs[self.v])
            self.launch(inputs, no_extra, out, None, None)
            return out

        def run_lse(*args):
            inputs = fill(args)
            out, lse = new_outputs(inputs)
            self.launch(inputs, no_extra, out, lse, None)
            return out, lse

        def split(args):
            count = len(defaults)
            return args[:count], args[count : count + extra_count], args[count + extra_count :]

        def run_out(*args):
            inputs, extra, outs = split(args)
            self.launch(inputs, extra, *outs)

        def cpu(*args):
            return self.reference(fill(args), no_extra)[0]

        def cpu_lse(*args):
            return self.reference(fill(args), no_extra)

        def cpu_out(*args):
            inputs, extra, (out, lse, _) = split(args)
            results = self.reference(inputs, extra)
            for target, result in zip((out, lse), results, strict=True):
                if target is not None:
                    target.copy_(result)

        define(
            f"{self.name}({self.schema}) -> Tensor",
            run,
            lambda *args: new_outputs(fill(args))[0],
            cpu,
        )
        define(
            f"{self.name}_lse({self.schema}) -> (Tensor, Tensor)",
            run_lse,
            lambda *args: new_outputs(fill(args)),
            cpu_lse,
        )
        define(f"{self.name}_out({self._out_schema()}) -> ()", run_out, lambda *args: None, cpu_out)

    def _out_schema(self) -> str:
        """The inputs without defaults, those that are written marked, and the outputs."""
        inputs = [argument.split("=")[0] for argument in _split_schema(self.schema)]
        letters = iter("abcdefgh")
        for i in self.mutates:
            inputs[i] = inputs[i].replace("Tensor", f"Tensor({next(letters)}!)", 1)
        outs = [
            f"Tensor({next(letters)}!){optional} {name}"
            for name, optional in (("out", ""), ("lse", "?"), ("workspace", "?"))
        ]
        return ", ".join([*inputs, *_split_schema(self.extra), *outs])


def _split_schema(schema: str) -> list[str]:
    """The arguments of a schema; commas inside of brackets do not part them."""
    return [part.strip() for part in re.split(r",(?![^\[]*\])", schema) if part.strip()]
