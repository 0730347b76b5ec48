"""Model calls as CUDA graphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch


def padded_batch_size(batch: int, limit: int) -> int:
    """The batch size, out of a small set, that a decode step of ``batch`` requests runs as.

    Powers of two up to 8, then multiples of 8, then, above 64, of 16; never more than ``limit``.
    """
    if batch <= 8:
        size = 1 << (batch - 1).bit_length()
    else:
        step = 8 if batch <= 64 else 16
        size = -(-batch // step) * step
    return min(size, limit)


@dataclasses.dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    output: Any
    addresses: list[int]


class CudaGraphContext:
    """Runs a model call eagerly once, captures it the second time, and replays it from then on.

    The call must do the same work on the same addresses each time: what changes from call to call
    must lie in the tensors, not in Python values. All graphs share one memory pool, so what a call
    returns, tensors in any structure, is valid until the next ``forward``.

    Args:
        enabled: If False, every call runs eagerly.
    """

    def __init__(self, enabled: bool = True) -> None:
        self._enabled = enabled
        self._warm: set[Hashable] = set()
        self._captured: dict[Hashable, _Captured] = {}
        self._memory: Any = None

    def set_enabled(self, flag: bool) -> None:
        """Turns graphs on or off; captured ones are kept."""
        self._enabled = flag

    def has_graph(self, key: Hashable) -> bool:
        """Whether a call with this key has been captured."""
        return key in self._captured

    def forward(self, model: Callable[..., Any], *, key: Hashable, **kwargs: Any) -> Any:
        """Runs ``model(**kwargs)``.

        Args:
            model: What to run.
            key: Names the work: calls with one key differ in the contents of tensors only.
            **kwargs: Arguments; tensors, and tensors in dataclasses, must keep their addresses.

        Raises:
            RuntimeError: A tensor lies elsewhere than when the graph was captured.
        """
        if not self._enabled:
            return model(**kwargs)
        if key not in self._captured:
            if key not in self._warm:
                # Libraries set themselves up in their first call, which a capture does not allow.
                self._warm.add(key)
                return model(**kwargs)
            self._captured[key] = self._capture(model, kwargs)
        captured = self._captured[key]
        if captured.addresses != list(_addresses(kwargs)):
            raise RuntimeError(
                f"CudaGraphContext.forward: tensors of {key!r} must be where they were at capture, "
                "got others"
            )
        captured.graph.replay()
        return captured.output

    def _capture(self, model: Callable[..., Any], kwargs: dict[str, Any]) -> _Captured:
        if self._memory is None:
            self._memory = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            output = model(**kwargs)
        return _Captured(graph, output, list(_addresses(kwargs)))


def _addresses(kwargs: dict[str, Any]) -> Iterator[int]:
    """Where the tensors among the arguments, and in dataclasses among them, lie."""
    for value in kwargs.values():
        if isinstance(value, torch.Tensor):
            yield value.data_ptr()
        elif dataclasses.is_dataclass(value):
            yield from _addresses(vars(value))
