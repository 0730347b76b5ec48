"""Attention by the optional packages flash-attn (2) and flash-attn-4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from astrai.extension.backend import kv
from astrai.extension.backend.attention_base import (
    AttentionBackend,
    AttentionBackendFactory,
    AttentionResult,
    attention_axes,
)
from astrai.extension.backend.flash_libraries import (
    FLASH2_PAGE_MULTIPLE,
    FlashAttn2,
    FlashLibrary,
    Packed,
    Result,
    import_errors,
    library_for,
    why_none,
)
from astrai.extension.backend.kv import PackedKVCache
from astrai.extension.backend.masks import UNLIMITED
from astrai.extension.backend.reference import check_dense, check_heads
from astrai.extension.dispatch import Spec, axis
from astrai.extension.errors import ShapeError
from astrai.extension.ops.reference import Features, PagedCache, Requests


@torch.compiler.assume_constant_result
def _import_errors() -> str:
    """``import_errors``, as a constant to TorchDynamo, which must not trace an import."""
    return import_errors()


def _has_holes(axes: Mapping[str, Any]) -> bool:
    cache = axes["call"][3]
    return cache is not None and not kv.is_complete(cache)


def _looks_past_its_keys(axes: Mapping[str, Any]) -> bool:
    """Whether rows have a window but, being before the first key, no diagonal: libraries differ."""
    q, k = axes["call"][:2]
    return axes["window"] and axes["rank"] == 4 and q.shape[1] > k.shape[1]


@AttentionBackendFactory.register("flash")
class FlashAttnBackend(AttentionBackend):
    """flash-attn 4 or 2, the first that can take the call; for calls without a mask.

    Dense calls may be trained. Packed calls gather the keys of the requests, but for flash-attn 2
    with pages of a multiple of 256 tokens, which it reads where they are.
    """

    priority = 20
    spec = (
        axis("device_cuda").truthy()
        & axis("dtype").in_(torch.bfloat16, torch.float16)
        & axis("group").at_least(1)
        & axis("mask").none()
        & Spec.of(
            # The libraries take the maximum of the scores before they scale them.
            lambda axes: axes["scale"] is None or axes["scale"] > 0,
            "a scale above 0",
        )
        & Spec.of(
            lambda axes: axes["rank"] == (4 if axes["cache"] is None else 3),
            "rank 4 without a KV cache, rank 3 with one",
        )
        & Spec.of(
            lambda axes: axes["call"][0].numel() > 0 and axes["call"][1].numel() > 0,
            "at least one query and one key",
        )
        & Spec.of(
            lambda axes: not _has_holes(axes),
            "a KV cache that is known to have no holes (contiguous or complete)",
        )
        & Spec.of(
            lambda axes: axes["cache"] is None or not axes["needs_grad"],
            "no autograd with a KV cache",
        )
        & Spec.of(
            lambda axes: not _looks_past_its_keys(axes),
            "no more queries than keys with a window",
        )
        & Spec.unless(why_none, "a flash-attn that takes the call")
    )

    @classmethod
    def available(cls) -> bool:
        """Whether flash-attn 2 or 4 is installed and imports."""
        return not _import_errors()

    @classmethod
    def why_unavailable(cls) -> str:
        """What importing them raised."""
        return _import_errors()

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
        """See ``attention``.

        Raises:
            ValueError: There is a mask, which flash-attn cannot apply, or something else that
                neither library can do.
        """
        self._check_fwd(fwd)
        if attn_mask is not None:
            raise ValueError("attention: flash-attn cannot apply a custom attention mask")
        features = Features(is_causal, scale, tuple(window), softcap, sinks)
        axes = attention_axes(
            q,
            k,
            v,
            kv_cache,
            layer_id,
            None,
            is_causal,
            fwd,
            scale=scale,
            return_lse=return_lse,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )
        library = library_for(axes)
        if library is None:
            raise ValueError(f"attention: flash cannot take this call: {why_none(axes)}")
        if kv_cache is None:
            check_dense(q, k, v)
            return _dense(library, q, k, v, features, return_lse)
        requests = kv.requests(kv_cache, q.shape[0], fwd)
        short = [(m, n) for m, n in zip(requests.q_sizes, requests.kv_sizes, strict=True) if m > n]
        if short:
            raise ShapeError(
                "attention: kv_cache's seq_lens must count the call's own tokens, got "
                f"{short[0][1]} for a request of {short[0][0]} tokens"
            )
        check_heads(q.shape[1], k.shape[1])
        kv.append(kv_cache, layer_id, k, v)
        out, lse = _packed(
            library, _unit_rows(q), kv_cache, layer_id, requests, features, return_lse
        )
        return out if lse is None else (out, lse.transpose(0, 1).contiguous())


def _unit_rows(x: torch.Tensor) -> torch.Tensor:
    """The libraries take any strides but that of the last dimension, which must be 1."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _dense(
    library: FlashLibrary,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    features: Features,
    return_lse: bool,
) -> AttentionResult:
    q, k, v = _unit_rows(q), _unit_rows(k), _unit_rows(v)
    blind = max(q.shape[1] - k.shape[1], 0) if features.is_causal else 0
    # The first rows see no key. Not all versions of the libraries agree on what is their result.
    out, lse = library.dense(q[:, blind:], k, v, features, return_lse)
    if lse is not None:
        lse = lse.transpose(1, 2)
    if blind:
        out = torch.nn.functional.pad(out, (0, 0, 0, 0, blind, 0))
        if lse is not None:
            sinks = lse.new_full((q.shape[2],), float("-inf"))
            sinks = sinks if features.sinks is None else features.sinks
            lse = torch.cat([sinks.expand(q.shape[0], blind, -1), lse], 1)
    return out if lse is None else (out, lse.contiguous())


def _packed(
    library: FlashLibrary,
    q: torch.Tensor,
    cache: PackedKVCache,
    layer_id: int,
    requests: Requests,
    features: Features,
    return_lse: bool,
) -> Result:
    held = kv.paged_cache(cache, layer_id)
    offsets = Packed(
        requests.q_starts.int(),
        torch.nn.functional.pad(requests.kv_lens.cumsum(0), (1, 0)).int(),
        max(requests.q_sizes),
        max(requests.kv_sizes),
    )
    if isinstance(library, FlashAttn2) and held.k.dtype is q.dtype:
        pages = _large_pages(cache, held)
        if pages is not None:
            k, v, table = pages
            if len(q) == len(requests.q_sizes) and offsets.max_seqlen_q == 1:
                kv_lens = requests.kv_lens.int()
                return library.paged_decode(q, k, v, table, kv_lens, features, return_lse)
            return library.packed(q, k, v, offsets, features, return_lse, block_table=table)
    k, v = held.gather(held.slots(*requests.of_keys(), requests))
    steps = kv.steps(cache)
    k, v = (kv.restored(x, step, q.dtype) for x, step in zip((k, v), steps, strict=True))
    return library.packed(q, k, v, offsets, features, return_lse)


def _large_pages(
    cache: PackedKVCache, held: PagedCache
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """K and V in pages that flash-attn 2 can read, and their block table; None if there are none.

    A contiguous cache has such pages if its rows are cut into them evenly.
    """
    if held.k.stride(-1) != 1 or held.v.stride(-1) != 1:
        return None
    if kv.block_table(cache) is not None:
        return (held.k, held.v, held.table) if held.page_size % FLASH2_PAGE_MULTIPLE == 0 else None
    if not kv.is_contiguous(cache):
        return None
    if held.table.shape[1] % FLASH2_PAGE_MULTIPLE or held.k.shape[0] % FLASH2_PAGE_MULTIPLE:
        return None
    k, v = (x.unflatten(0, (-1, FLASH2_PAGE_MULTIPLE)) for x in (held.k, held.v))
    count = held.table.shape[1] // FLASH2_PAGE_MULTIPLE  # of pages in a row
    pages = torch.arange(count, dtype=torch.int32, device=held.table.device)
    return k, v, held.rows[:, None].int() * count + pages
