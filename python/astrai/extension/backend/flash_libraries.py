"""The libraries of FlashAttention behind one interface: flash-attn 2, and 4 (``flash_attn.cute``).

Both are optional. They are imported when a call comes that they might take, not with this package.
A call that reaches a library has at least one key for each query.
"""

from __future__ import annotations

import importlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch

from astrai.extension.ops.reference import Features

# out, and lse if it was asked for: [batch, q_heads, q_len], or [q_heads, tokens] of packed queries.
Result = tuple[torch.Tensor, torch.Tensor | None]

FLASH2_PAGE_MULTIPLE = 256


class Packed(NamedTuple):
    """Offsets of packed queries and keys.

    Attributes:
        cu_seqlens_q: int32 ``[batch + 1]``, prefix sums of the numbers of queries.
        cu_seqlens_k: Likewise of keys.
        max_seqlen_q: The largest number of queries.
        max_seqlen_k: Likewise of keys.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int


def diagonal(features: Features) -> tuple[bool, int, int]:
    """Causal flag and window, as (causal, left, right) where causal implies a right side of -1."""
    left, right = features.window
    if features.is_causal or right == 0:
        return True, left, -1
    return False, left, right


class FlashLibrary(ABC):
    """One library.

    Attributes:
        title: Its name in messages.
        module: What is imported.
        names: The functions that are taken from it.
    """

    title: ClassVar[str]
    module: ClassVar[str]
    names: ClassVar[tuple[str, ...]]

    def __init__(self) -> None:
        self._functions: dict[str, Callable[..., Any]] | None = None
        self._error: str | None = None
        self._errors: dict[int, str] = {}

    def error(self) -> str:
        """Why it cannot be imported, empty if it can. Imports it the first time."""
        if self._error is None:
            try:
                module = importlib.import_module(self.module)
                self._functions = {name: getattr(module, name) for name in self.names}
                self._error = self._version_error(module)
            except Exception as error:  # one built for another torch raises more than ImportError
                self._error = _summary(error)
        return self._error

    def error_on(self, device_index: int) -> str:
        """What one small call on a device raises, empty if it runs; tried once.

        That the library imports does not say so: it may be built for other devices.
        """
        if device_index not in self._errors:
            x = torch.zeros(
                1, 1, 1, 64, dtype=torch.bfloat16, device=torch.device("cuda", device_index)
            )
            try:
                with torch.no_grad():
                    self.dense(x, x, x, Features(), False)
                self._errors[device_index] = ""
            except Exception as error:  # whatever it is, this device is not for it
                self._errors[device_index] = f"does not run here: {_summary(error)}"
        return self._errors[device_index]

    def why_not(self, axes: Mapping[str, Any]) -> str | None:
        """Why it cannot take a call (``attention_axes``); None if it can."""
        return (
            _error_of(self.title)
            or self._refusal(axes)
            or _error_on(self.title, axes["call"][0].device.index)
            or None
        )

    def _version_error(self, module: Any) -> str:
        """What is wrong with the version that was imported; empty if nothing is."""
        return ""

    def _function(self, name: str) -> Callable[..., Any]:
        error = self.error()
        if error:
            raise RuntimeError(f"attention: {self.title} is not available: {error}")
        return self._functions[name]

    @abstractmethod
    def _refusal(self, axes: Mapping[str, Any]) -> str:
        """Why it does not implement a call, such as "takes no sinks"; empty if it does."""

    @abstractmethod
    def dense(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        features: Features,
        return_lse: bool,
    ) -> Result:
        """Attention of q ``[batch, q_len, q_heads, head_dim]``; differentiable."""

    @abstractmethod
    def packed(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        offsets: Packed,
        features: Features,
        return_lse: bool,
    ) -> Result:
        """Attention of q ``[tokens, q_heads, head_dim]``, k and v ``[keys, kv_heads, dim]``."""


class FlashAttn2(FlashLibrary):
    """flash-attn 2, from 2.7 on: sm_80 and newer."""

    title = "flash-attn 2"
    module = "flash_attn"
    names = ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")

    def _version_error(self, module: Any) -> str:
        version = str(getattr(module, "__version__", "none"))
        found = re.match(r"(\d+)\.(\d+)", version)
        if found is None or not (2, 7) <= tuple(map(int, found.groups())) < (3, 0):
            return f"needs version 2.7 or a later 2.x, got {version}"
        return ""

    def _refusal(self, axes: Mapping[str, Any]) -> str:
        if axes["capability"] < 80:
            return f"needs compute capability 8.0 or newer, got {_dotted(axes)}"
        head_dim = axes["head_dim"]
        if head_dim > 256 or head_dim % 8 or axes["v_head_dim"] != head_dim:
            return (
                "needs one head_dim of q, k and v, a multiple of 8 up to 256, "
                f"got {head_dim} and {axes['v_head_dim']}"
            )
        if axes["sinks"]:
            return "takes no sinks"
        if axes["needs_grad"] and axes["return_lse"]:
            return "has no gradient of lse"
        return ""

    def dense(self, q, k, v, features, return_lse):
        """See ``FlashLibrary``."""
        result = self._function("flash_attn_func")(
            q, k, v, return_attn_probs=return_lse, **self._arguments(features)
        )
        return (result[0], result[1]) if return_lse else (result, None)

    def packed(self, q, k, v, offsets, features, return_lse, block_table=None):
        """See ``FlashLibrary``.

        With ``block_table``, int32 ``[batch, max_pages]``, k and v are ``[pages, page_size,
        kv_heads, head_dim]``, page_size a multiple of 256.
        """
        # A maximum of one query makes it take every request to have exactly one.
        one_each = len(q) == len(offsets.cu_seqlens_q) - 1
        max_seqlen_q = max(offsets.max_seqlen_q, 1 if one_each else 2)
        result = self._function("flash_attn_varlen_func")(
            q,
            k,
            v,
            *offsets._replace(max_seqlen_q=max_seqlen_q),
            return_attn_probs=return_lse,
            block_table=block_table,
            **self._arguments(features),
        )
        return (result[0], result[1]) if return_lse else (result, None)

    def paged_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        block_table: torch.Tensor,
        kv_lens: torch.Tensor,
        features: Features,
        return_lse: bool,
    ) -> Result:
        """Attention of one query a request, q ``[batch, q_heads, head_dim]``, as ``packed``.

        Unlike that function it splits the keys of any request over the GPU. No autograd.
        """
        result = self._function("flash_attn_with_kvcache")(
            q.unsqueeze(1),
            k,
            v,
            cache_seqlens=kv_lens,
            block_table=block_table,
            return_softmax_lse=return_lse,
            **self._arguments(features),
        )
        out, lse = result if return_lse else (result, None)
        return out.squeeze(1), None if lse is None else lse.squeeze(2).transpose(0, 1)

    @staticmethod
    def _arguments(features: Features) -> dict[str, Any]:
        causal, left, right = diagonal(features)
        return {
            "softmax_scale": features.scale,
            "causal": causal,
            "window_size": (left, right),
            "softcap": features.softcap,
        }


class FlashAttn4(FlashLibrary):
    """flash-attn 4, the package ``flash_attn.cute``: sm_90, sm_100 and sm_110.

    Its kernels are compiled when first called. It reads whole pages, in which what no token was
    written to would have to be finite; so it gets the keys of paged caches gathered.
    """

    title = "flash-attn 4"
    module = "flash_attn.cute"
    names = ("flash_attn_func", "flash_attn_varlen_func")

    def _refusal(self, axes: Mapping[str, Any]) -> str:
        if not 90 <= axes["capability"] < 120:
            return f"needs compute capability 9.x to 11.x, got {_dotted(axes)}"
        dims = axes["head_dim"], axes["v_head_dim"]
        largest = 256 if axes["capability"] < 100 else 128
        plain = dims[0] == dims[1] <= largest and dims[0] % 8 == 0
        if not plain and dims not in ((192, 128), (256, 256)):
            return (
                f"needs one head_dim of q, k and v, a multiple of 8 up to {largest}, 256, or 192 "
                f"with 128 of v, got {dims[0]} and {dims[1]}"
            )
        if axes["needs_grad"]:
            if axes["softcap"] or axes["sinks"]:
                return "is not used for gradients of softcap or sinks"
            if max(dims) > 128:
                return f"is not used for gradients with a head_dim above 128, got {max(dims)}"
        if torch.compiler.is_compiling():
            return "cannot be traced by torch.compile"
        return ""

    def dense(self, q, k, v, features, return_lse):
        """See ``FlashLibrary``."""
        out, lse = self._function("flash_attn_func")(
            q, k, v, return_lse=return_lse, **self._arguments(features)
        )
        return out, lse if return_lse else None

    def packed(self, q, k, v, offsets, features, return_lse):
        """See ``FlashLibrary``."""
        out, lse = self._function("flash_attn_varlen_func")(
            q, k, v, **offsets._asdict(), return_lse=return_lse, **self._arguments(features)
        )
        return out, lse if return_lse else None

    @staticmethod
    def _arguments(features: Features) -> dict[str, Any]:
        causal, *window = diagonal(features)
        return {
            "softmax_scale": features.scale,
            "causal": causal,
            "window_size": tuple(None if side < 0 else side for side in window),
            "softcap": features.softcap,
            "learnable_sink": features.sinks,
        }


# In order of preference.
LIBRARIES: tuple[FlashLibrary, ...] = (FlashAttn4(), FlashAttn2())


def library_for(axes: Mapping[str, Any]) -> FlashLibrary | None:
    """The first library that can take a call."""
    for library in LIBRARIES:
        if library.why_not(axes) is None:
            return library
    return None


def why_none(axes: Mapping[str, Any]) -> str | None:
    """Why no library can take a call; None if one can."""
    reasons = {}
    for library in LIBRARIES:
        reason = library.why_not(axes)
        if reason is None:
            return None
        reasons[library.title] = reason
    return _joined(reasons)


def import_errors() -> str:
    """Why no library can be imported; empty if one can."""
    errors = {library.title: library.error() for library in LIBRARIES}
    return _joined(errors) if all(errors.values()) else ""


def _joined(reasons: Mapping[str, str]) -> str:
    if len(set(reasons.values())) == 1:
        return next(iter(reasons.values()))
    return "; ".join(f"{title}: {reason}" for title, reason in reasons.items())


def _summary(error: BaseException) -> str:
    """Type and first line of an error."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def _dotted(axes: Mapping[str, Any]) -> str:
    return f"{axes['capability'] // 10}.{axes['capability'] % 10}"


# Constants to TorchDynamo, which must trace neither an import nor a trial call.
@torch.compiler.assume_constant_result
def _error_of(title: str) -> str:
    return _named(title).error()


@torch.compiler.assume_constant_result
def _error_on(title: str, device_index: int) -> str:
    return _named(title).error_on(device_index)


def _named(title: str) -> FlashLibrary:
    return next(library for library in LIBRARIES if library.title == title)
