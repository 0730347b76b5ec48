"""What an attention backend is, the axes of an attention call, and the registry of backends."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from astrai.extension.backend.kv import PackedKVCache, is_contiguous
from astrai.extension.backend.masks import UNLIMITED, mask_kind
from astrai.extension.dispatch import (
    ImplRecord,
    Spec,
    is_family,
    pop_choices,
    push_choices,
    refresh_family,
)
from astrai.extension.loader import is_available

FAMILY = "attention"
FORWARD_MODES = ("prefill", "decode", None)
# Arguments of attention that reach a backend only when they are used.
FEATURES = ("scale", "return_lse", "window", "softcap", "sinks")

AttentionResult = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@torch.compiler.assume_constant_result
def kernel_loaded(name: str) -> bool:
    """``loader.is_available``, as a constant to TorchDynamo, which must not trace an import."""
    return is_available(name)


_capabilities: dict[int, int] = {}


@torch.compiler.assume_constant_result
def compute_capability(device_index: int) -> int:
    """Compute capability of a CUDA device as one number (90 = sm_90), asked once per device."""
    found = _capabilities.get(device_index)
    if found is None:
        major, minor = torch.cuda.get_device_capability(device_index)
        found = _capabilities[device_index] = 10 * major + minor
    return found


def attention_axes(
    q: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    kv_cache: PackedKVCache | None = None,
    layer_id: int = 0,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    fwd: str | None = None,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    window: tuple[int, int] = UNLIMITED,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> dict[str, Any]:
    """Describe an ``attention(...)`` call to the dispatcher. Takes that call's own arguments.

    Axes: those of ``tensor_axes(q)``; ``dtype`` is ``"mixed"`` unless q, k, v and the cache agree;
    ``device_cuda`` holds only if all of them are on one CUDA device; ``capability`` (90 = sm_90; 0
    on a CPU); ``needs_grad`` (autograd must record the call); ``rank`` of q; ``cache`` (None,
    ``"contiguous"`` or ``"paged"``); ``fwd``; ``mask`` (None, ``"bool"``, ``"additive"``,
    ``"other"``); ``head_dim``; ``v_head_dim``; ``group`` (q heads per K/V head, 0 if that is no
    whole number); ``window``, ``softcap``, ``sinks`` and ``return_lse`` (bool, whether the call
    uses them); ``scale``; ``kernel_loaded`` (the kernels that such a call needs); ``call``, the
    arguments themselves, for predicates of third-party backends.
    """
    k = q if k is None else k
    v = k if v is None else v
    dtype = q.dtype
    cache = None
    if kv_cache is not None:
        cache = "contiguous" if is_contiguous(kv_cache) else "paged"
        held = kv_cache.k_buffer.dtype
        same = dtype is k.dtype and dtype is v.dtype
        same = same and (dtype is held or held is torch.float8_e4m3fn)
    else:
        same = dtype is k.dtype and dtype is v.dtype
    grad_enabled = torch.is_grad_enabled()
    cuda = q.is_cuda
    capability = 0
    loaded = False
    q_shape = q.shape
    rank = len(q_shape)
    if cuda:
        device = q.device
        cuda = device == k.device and device == v.device
        capability = compute_capability(device.index)
        # Asked only for CUDA tensors: a module that is not needed is not even loaded.
        if rank == 3:
            loaded = kernel_loaded("attn_paged_decode" if fwd == "decode" else "attn_paged_prefill")
            loaded = loaded and (fwd == "decode" or kernel_loaded("rotary_emb"))  # its append
        else:
            loaded = kernel_loaded("attn_decode" if q_shape[1:2] == (1,) else "attn_prefill")
    group = 0
    if rank > 2 and k.dim() > 2:
        q_heads, kv_heads = q_shape[-2], k.shape[-2]
        if kv_heads > 0 and q_heads % kv_heads == 0:
            group = q_heads // kv_heads
    return {
        "dtype": dtype if same else "mixed",
        "device_cuda": cuda,
        "grad_enabled": grad_enabled,
        "capability": capability,
        "needs_grad": grad_enabled
        and (
            q.requires_grad
            or k.requires_grad
            or v.requires_grad
            or (sinks is not None and sinks.requires_grad)
        ),
        "rank": rank,
        "cache": cache,
        "fwd": fwd,
        "mask": None if attn_mask is None else mask_kind(attn_mask),
        "head_dim": q_shape[-1] if rank else 0,
        "v_head_dim": v.shape[-1] if rank else 0,
        "window": tuple(window) != UNLIMITED,
        "softcap": softcap > 0,
        "sinks": sinks is not None,
        "return_lse": return_lse,
        "scale": scale,
        "group": group,
        "kernel_loaded": loaded,
        "call": (q, k, v, kv_cache, attn_mask, is_causal, fwd),
    }


class AttentionBackend(ABC):
    """One way to compute attention. Instances are stateless; the factory keeps one of each class.

    An instance is a context manager: inside ``with backend:`` the attention calls of this thread or
    task take it, strictly, as with ``attn_backend(backend)``.

    A subclass of your own implements ``forward`` and may override ``available`` and
    ``supports_call``, with the signatures given here. The keyword-only arguments reach ``forward``
    only when a caller uses them: without one of them in its signature, it does not get the calls
    that do.

    Attributes:
        name: Set by ``AttentionBackendFactory.register``.
        priority: Place in the automatic chain, lower first (cuda 10, flash 20; torch_native is the
            fallback).
        faithful: False keeps it out of the automatic chain: it is then taken only when named.
        spec: Which calls it takes; None leaves the question to ``supports_call``.
    """

    name: ClassVar[str] = ""
    priority: ClassVar[int] = 100
    faithful: ClassVar[bool] = True
    spec: ClassVar[Spec | None] = None

    @classmethod
    def available(cls) -> bool:
        """Whether this backend can run on this machine at all."""
        return True

    @classmethod
    def why_unavailable(cls) -> str:
        """Why ``available`` is false, as a sentence; empty if it is true or nothing is known."""
        return ""

    def supports_call(
        self,
        q: torch.Tensor,
        kv_cache: PackedKVCache | None = None,
        attn_mask: torch.Tensor | None = None,
        is_causal: bool = False,
        fwd: str | None = None,
        *,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
    ) -> bool:
        """Whether this backend can take the call. Without k and v they are taken to be like q."""
        if self.spec is None:
            return True
        return self.spec.matches(attention_axes(q, k, v, kv_cache, 0, attn_mask, is_causal, fwd))

    @classmethod
    def supports_graph(cls) -> bool:
        """Whether packed decode calls may be captured in a CUDA graph and replayed."""
        return False

    @classmethod
    def fuses_rotary(cls) -> bool:
        """Whether ``forward`` takes ``rotary`` in packed calls; if not, ``attention`` rotates."""
        return False

    @abstractmethod
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: PackedKVCache | None,
        layer_id: int,
        attn_mask: torch.Tensor | None,
        is_causal: bool,
        fwd: str | None,
        *,
        scale: float | None = None,
        return_lse: bool = False,
        window: tuple[int, int] = UNLIMITED,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> AttentionResult:
        """Compute the call; arguments and result as ``attention``."""

    @staticmethod
    def _check_fwd(fwd: str | None) -> None:
        """Refuse an unknown forward mode.

        Raises:
            ValueError: ``fwd`` is not one of "prefill", "decode" and None.
        """
        if fwd not in FORWARD_MODES:
            raise ValueError(
                f"unsupported attention forward mode: {fwd!r} (must be 'prefill', 'decode' or None)"
            )

    def __enter__(self) -> AttentionBackend:
        push_choices({FAMILY: self})
        return self

    def __exit__(self, *exc_info: object) -> None:
        pop_choices()


class AttentionBackendFactory:
    """The registered attention backends, by name."""

    _classes: ClassVar[dict[str, type[AttentionBackend]]] = {}
    _instances: ClassVar[dict[type[AttentionBackend], AttentionBackend]] = {}

    @classmethod
    def register(cls, name: str) -> Callable[[type[AttentionBackend]], type[AttentionBackend]]:
        """Class decorator: register a class under a name, or replace the one of that name."""

        def decorate(component: type[AttentionBackend]) -> type[AttentionBackend]:
            if not (isinstance(component, type) and issubclass(component, AttentionBackend)):
                raise TypeError(
                    "AttentionBackendFactory.register: component must be a subclass of "
                    f"AttentionBackend, got {component!r}"
                )
            component.name = name
            cls._classes[name] = component
            if is_family(FAMILY):
                refresh_family(FAMILY)
            return component

        return decorate

    @classmethod
    def unregister(cls, name: str) -> None:
        """Forget a backend."""
        component = cls._classes.pop(name, None)
        cls._instances.pop(component, None)
        if is_family(FAMILY):
            refresh_family(FAMILY)

    @classmethod
    def get_component_class(cls, name: str) -> type[AttentionBackend]:
        """The class registered under a name.

        Raises:
            ValueError: There is none.
        """
        component = cls._classes.get(name)
        if component is None:
            raise ValueError(
                f"Unknown component: '{name}'. Supported types: {cls.list_registered()}"
            )
        return component

    @classmethod
    def create(cls, name: str) -> AttentionBackend:
        """The one instance of the backend registered under a name.

        Raises:
            ValueError: There is none.
        """
        return cls.instance(cls.get_component_class(name))

    @classmethod
    def instance(cls, component: type[AttentionBackend]) -> AttentionBackend:
        """The one instance of a backend class, registered or not."""
        found = cls._instances.get(component)
        if found is None:
            found = cls._instances.setdefault(component, component())
        return found

    @classmethod
    def list_registered(cls) -> list[str]:
        """Names of the registered backends, sorted."""
        return sorted(cls._classes)

    @classmethod
    def records(cls) -> list[ImplRecord]:
        """A dispatch record for every registered backend."""
        return [record_of(cls.create(name)) for name in cls._classes]


def _untaken_features(component: type[AttentionBackend]) -> list[str]:
    """Keyword-only arguments of ``attention`` that ``forward`` has no place for."""
    parameters = inspect.signature(component.forward).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return []
    return [name for name in FEATURES if name not in parameters]


def record_of(backend: AttentionBackend) -> ImplRecord:
    """The dispatch record of a backend instance."""
    component = type(backend)
    spec = component.spec
    if spec is None:

        def takes(axes: Any) -> bool:
            q, _, _, kv_cache, attn_mask, is_causal, fwd = axes["call"]
            return backend.supports_call(q, kv_cache, attn_mask, is_causal, fwd)

        spec = Spec.of(takes, f"{component.__name__}.supports_call")
    untaken = _untaken_features(component)
    if untaken:

        def why_not(axes: Any) -> str | None:
            used = [name for name in untaken if axes[name] is not None and axes[name] is not False]
            if not used:
                return None
            return f"{component.__name__}.forward takes no {' and no '.join(used)}"

        spec = spec & Spec.unless(why_not, "no argument that forward does not take")
    return ImplRecord(
        family=FAMILY,
        name=component.name or component.__name__,
        obj=backend,
        spec=spec,
        available=lambda: component.available(),
        priority=component.priority,
        faithful=component.faithful,
        why_unavailable=lambda: component.why_unavailable(),
    )
