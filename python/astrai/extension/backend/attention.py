"""``attention``: the policy entry point, and how its backend is chosen."""

from __future__ import annotations

import math
from contextlib import ContextDecorator
from enum import Enum
from typing import Any

import torch

from astrai.extension.backend.attention_base import (
    FAMILY,
    FORWARD_MODES,
    AttentionBackend,
    AttentionBackendFactory,
    AttentionResult,
    attention_axes,
    record_of,
)
from astrai.extension.backend.attention_cuda import CudaBackend
from astrai.extension.backend.attention_flash import FlashAttnBackend
from astrai.extension.backend.attention_torch import TorchNativeBackend
from astrai.extension.backend.kv import PackedKVCache
from astrai.extension.backend.masks import UNLIMITED
from astrai.extension.backend.reference import check_features
from astrai.extension.backend.rotary import Rotary, rotary_embed
from astrai.extension.dispatch import (
    ImplRecord,
    env_choice,
    get_family,
    get_override,
    pop_choices,
    push_choices,
    register_env_alias,
    register_family,
    resolve,
)
from astrai.extension.errors import ShapeError

__all__ = [
    "ATTN_BACKEND",
    "AttentionBackend",
    "AttentionBackendFactory",
    "CudaBackend",
    "FlashAttnBackend",
    "PackedKVCache",
    "TorchNativeBackend",
    "attention",
    "attn_backend",
    "get_backend",
]


class ATTN_BACKEND(Enum):
    """The built-in attention backends."""

    TORCH_NATIVE = "torch_native"
    CUDA = "cuda"
    FLASH = "flash"


def _backend_of(choice: Any, where: str) -> AttentionBackend:
    """The backend instance of a choice: name, enum member, class or instance.

    Raises:
        ValueError: Unknown name.
        TypeError: None of these.
    """
    if isinstance(choice, AttentionBackend):
        return choice
    if isinstance(choice, ATTN_BACKEND):
        return AttentionBackendFactory.create(choice.value)
    if isinstance(choice, str):
        return AttentionBackendFactory.create(choice)
    if isinstance(choice, type) and issubclass(choice, AttentionBackend):
        return AttentionBackendFactory.instance(choice)
    raise TypeError(
        f"{where}: backend must be a name, an ATTN_BACKEND, an AttentionBackend class or instance, "
        f"got {choice!r}"
    )


def _adopt(choice: Any) -> ImplRecord | None:
    """Dispatch hook: enum members, classes, and instances that the factory does not hold."""
    if not isinstance(choice, (AttentionBackend, ATTN_BACKEND, type)):
        return None
    backend = _backend_of(choice, "op_backend")
    for record in get_family(FAMILY).records.values():
        if record.obj is backend:
            return record
    return record_of(backend)


register_family(
    FAMILY, attention_axes, AttentionBackendFactory.records, "torch_native", adopt=_adopt
)
register_env_alias(FAMILY, "ASTR_BACKEND", {"torch": "torch_native"})


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: PackedKVCache | None = None,
    layer_id: int = 0,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    fwd: str | None = None,
    backend: Any = None,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    window: tuple[int, int] = UNLIMITED,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    rotary: Rotary | None = None,
) -> AttentionResult:
    """Scaled dot-product attention by the best backend that can take the call.

    The backend is ``backend``, else the one of the ``attn_backend`` (or ``op_backend``) context,
    else the one that ``ASTR_OPS`` or ``ASTR_BACKEND`` names, else the first of cuda, flash and
    torch_native that can take the call. The first two choices are strict; a backend named by the
    environment is passed over if it cannot.

    Args:
        q: Dense calls: ``[batch, q_len, q_heads, head_dim]``. Packed calls (with ``kv_cache``):
            ``[tokens, q_heads, head_dim]``, the tokens of all requests one after another.
        k: ``[batch, kv_len, kv_heads, head_dim]``, or packed ``[tokens, kv_heads, head_dim]``: the
            keys of the call's own tokens. q_heads must be a multiple of kv_heads.
        v: As k.
        kv_cache: Cache of a packed call (see ``PackedKVCache``). The call writes k and v into it,
            at ``out_cache_loc``, and attends over all the tokens it holds of each request.
        layer_id: Layer of the cache.
        attn_mask: Bool (True = keep) or floating (added to the scores; torch_native only). 2-D
            ``[batch, kv_len]``, 3-D ``[batch, q_len | 1, kv_len]`` or 4-D ``[batch, heads | 1,
            q_len | 1, kv_len]``. In packed calls ``batch`` counts requests, and rows and columns
            are positions within the call and within the request.
        is_causal: Causal mask aligned at the bottom right (the last query sees every key), on top
            of ``attn_mask``.
        fwd: ``"prefill"`` or ``"decode"`` in packed calls (decode: one token per request); None,
            for training, in dense ones.
        backend: Name, ``ATTN_BACKEND``, class or instance, for this call alone.
        scale: Factor of the scores; None = ``1 / sqrt(head_dim)``.
        return_lse: Also return the log-sum-exp of each row's scores.
        window: Keys left and right of the bottom-right diagonal that each query sees, -1 = all;
            on top of the mask and of ``is_causal``.
        softcap: Scaled scores s become ``softcap * tanh(s / softcap)`` before the mask; 0 = none.
        sinks: float32 ``[q_heads]``: a natural-log logit for each head that stands in the
            denominator of the softmax and in lse, but has no value.
        rotary: Rotates q and k first, as ``rotary_embed``; packed calls on CUDA write K into the
            cache in the same launch.

    Returns:
        ``out`` with q's shape (but v's head_dim) and dtype, or ``(out, lse)`` with lse float32
        ``out.shape[:-1]``, natural logarithm. A row that sees no key has out 0 and lse -inf, or
        with a sink lse = sink.

    Raises:
        ExplicitSelectionError: The backend chosen by argument or context cannot take the call.
        ShapeError, ValueError, TypeError: Arguments that do not fit together.
    """
    _check_call(q, k, v, kv_cache, attn_mask, fwd, scale)
    used = {}
    if scale is not None:
        used["scale"] = scale
    if return_lse:
        used["return_lse"] = True
    if window != UNLIMITED or softcap != 0.0 or sinks is not None:
        check_features(window, softcap, sinks, q)
        if tuple(window) != UNLIMITED:
            used["window"] = tuple(window)
        if softcap != 0.0:
            used["softcap"] = softcap
        if sinks is not None:
            used["sinks"] = sinks
    if backend is not None:
        backend = _backend_of(backend, "attention")
    chosen = resolve(
        FAMILY,
        q,
        k,
        v,
        kv_cache,
        layer_id,
        attn_mask,
        is_causal,
        fwd,
        explicit=backend,
        **used,
    ).record.obj
    if rotary is not None:
        if kv_cache is not None and chosen.fuses_rotary():
            used["rotary"] = rotary
        else:
            q, k = rotary_embed(q, k, *rotary)
    return chosen.forward(q, k, v, kv_cache, layer_id, attn_mask, is_causal, fwd, **used)


def _check_call(
    q: Any,
    k: Any,
    v: Any,
    kv_cache: PackedKVCache | None,
    attn_mask: Any,
    fwd: str | None,
    scale: float | None,
) -> None:
    """The checks that decide which kind of call it is; the backends check the rest."""
    if fwd not in FORWARD_MODES:
        AttentionBackend._check_fwd(fwd)
    if not (
        isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)
    ):
        name, value = next(
            (n, x) for n, x in (("q", q), ("k", k), ("v", v)) if not isinstance(x, torch.Tensor)
        )
        raise TypeError(f"attention: {name} must be a torch.Tensor, got {type(value).__name__}")
    if attn_mask is not None and not isinstance(attn_mask, torch.Tensor):
        raise TypeError(
            f"attention: attn_mask must be a torch.Tensor or None, got {type(attn_mask).__name__}"
        )
    if scale is not None and not math.isfinite(scale):
        raise ShapeError(f"attention: scale must be finite, got {scale}")
    rank = q.dim()
    if rank == 4:
        if kv_cache is not None:
            raise ShapeError(
                "attention: q must be 3D [tokens, heads, head_dim] with kv_cache, "
                f"got shape {tuple(q.shape)}"
            )
    elif rank == 3:
        if kv_cache is None:
            raise ValueError("packed attention requires KV cache metadata (kv_cache), got None")
        if fwd is None:
            raise ValueError("attention: fwd must be 'prefill' or 'decode' with kv_cache, got None")
    else:
        raise ShapeError(
            f"attention: q must be 3D (packed) or 4D (dense), got shape {tuple(q.shape)}"
        )
    if k.dim() != rank or v.dim() != rank:
        raise ShapeError(
            f"attention: k and v must have q's rank {rank}, got {k.dim()} and {v.dim()}"
        )


class attn_backend(ContextDecorator):
    """Context (or decorator) that chooses the attention backend, strictly.

    Entering it yields the backend instance. TorchDynamo cannot trace it: inside compiled code pass
    ``attention(..., backend=...)`` instead.

    Args:
        backend: Name, ``ATTN_BACKEND``, ``AttentionBackend`` class or instance.

    Raises:
        ValueError: Unknown name.
        TypeError: Anything else.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = _backend_of(backend, "attn_backend")

    def __enter__(self) -> AttentionBackend:
        push_choices({FAMILY: self._backend})
        return self._backend

    def __exit__(self, *exc_info: object) -> None:
        pop_choices()


def get_backend(use_default: bool = True) -> AttentionBackend | None:
    """The backend selected by context, else by environment, else the default.

    Args:
        use_default: With nothing selected, return the first backend of the automatic chain that is
            available on this machine; if False, return None then.

    Whether a given call can run on it is another question: see ``dispatch.explain("attention", q,
    k, v, ...)``.
    """
    override = get_override(FAMILY)
    if override is not None:
        return override.obj
    family = get_family(FAMILY)
    named, _ = env_choice(family)
    if named is not None:
        return named.obj
    if not use_default:
        return None
    for candidate in family.chain:
        if candidate.record.available():
            return candidate.record.obj
    return family.fallback.obj
