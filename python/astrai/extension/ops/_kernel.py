"""A compiled kernel as the wrappers of this package call it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from astrai.extension import loader

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _direct(*tensors: torch.Tensor | None) -> bool:
    """What ``direct`` of a module answers, for when there is no module."""
    plain = all(type(x) in _PLAIN or not isinstance(x, torch.Tensor) for x in tensors)
    return (
        plain
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
        and torch._C._functorch.maybe_current_level() is None
        and torch._C._get_tracing_state() is None
    )


class Kernel:
    """One function of a module, looked up on its first call.

    Attributes:
        direct: ``direct(*tensors)``, whether a call may go straight to the kernel: every tensor is
            exactly a Tensor or Parameter, and no mode, functorch transform or trace is active.
            Otherwise the call belongs to the registered operator.
        launch: The kernel, with positional arguments only. Raises what ``loader.get_module``
            raises.
    """

    __slots__ = ("_function", "_module", "direct", "launch")

    def __init__(self, module: str, function: str) -> None:
        self._module = module
        self._function = function
        self.direct: Callable[..., bool] = self._first_direct
        self.launch: Callable[..., None] = self._first_launch

    def _bind(self) -> bool:
        if not loader.is_available(self._module):
            return False
        module = loader.get_module(self._module)
        self.direct = module.direct
        self.launch = getattr(module, self._function)
        return True

    def _first_direct(self, *tensors: torch.Tensor | None) -> bool:
        return self.direct(*tensors) if self._bind() else _direct(*tensors)

    def _first_launch(self, *args: object) -> None:
        if not self._bind():
            loader.get_module(self._module)  # raises
        self.launch(*args)


def require_tensor(function: str, name: str, value: object) -> None:
    """Raises TypeError if an argument that the wrapper itself looks at is not a tensor."""
    if not isinstance(value, torch.Tensor):
        kind = "None" if value is None else type(value).__name__
        raise TypeError(f"{function}: {name} must be a torch.Tensor, got {kind}")
