"""Weights that FSDP gathers: the state of the parameter that users see serves the gathered one."""

from __future__ import annotations

import functools
import sys
from typing import Any

from astrai.extension.fp8.weights import ATTRIBUTE, state_of

_FSDP2 = "torch.distributed.fsdp._fully_shard._fsdp_param"


def watch() -> None:
    """Has ``fully_shard`` tell which weights it gathers, if it is in use. Each region asks."""
    module = sys.modules.get(_FSDP2)
    if module is not None and not hasattr(module.FSDPParam.to_unsharded, "astrai_fp8"):
        _wrap(module.FSDPParam)


def _wrap(fsdp_param: Any) -> None:
    to_unsharded = fsdp_param.to_unsharded

    @functools.wraps(to_unsharded)
    def wrapped(self: Any) -> None:
        to_unsharded(self)
        state = state_of(self.sharded_param)
        state.sharded = True
        state.casts.clear()
        setattr(self._unsharded_param, ATTRIBUTE, state)

    wrapped.astrai_fp8 = True
    fsdp_param.to_unsharded = wrapped
