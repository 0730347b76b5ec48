"""Attention by this package's CUDA kernels."""

from __future__ import annotations

from typing import Any

import torch

from astrai.extension.backend import kv
from astrai.extension.backend.attention_base import (
    AttentionBackend,
    AttentionBackendFactory,
    AttentionResult,
    kernel_loaded,
)
from astrai.extension.backend.kv import PackedKVCache
from astrai.extension.backend.masks import UNLIMITED, check_packed_mask
from astrai.extension.backend.rotary import Rotary
from astrai.extension.dispatch import Spec, axis
from astrai.extension.errors import ShapeError
from astrai.extension.loader import why_unavailable
from astrai.extension.ops.attention import (
    attn_decode,
    attn_paged_decode,
    attn_paged_prefill,
    attn_prefill,
)
from astrai.extension.ops.rotary import rope_append_kv

MAX_HEAD_DIM = 256
MAX_GROUP = 64
MIN_CAPABILITY = 80


def _dense_rows(x: torch.Tensor) -> torch.Tensor:
    """The kernels take any strides but that of the last dimension, which must be 1."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _kernel_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    return_lse: bool,
    **features: Any,
) -> AttentionResult:
    """One launch on 4-D operands: the decode kernel for one query token, else prefill."""
    q, k, v = _dense_rows(q), _dense_rows(k), _dense_rows(v)
    if mask is not None:
        mask = _dense_rows(mask)
    op = attn_decode if q.shape[1] == 1 else attn_prefill
    return op(q, k, v, mask, is_causal, scale=scale, return_lse=return_lse, **features)


@AttentionBackendFactory.register("cuda")
class CudaBackend(AttentionBackend):
    """Dense and paged kernels. Inference only: autograd does not see through them.

    A packed decode call is one launch, which also writes the new keys and values; lengths and
    tables are read on the device, so that it can be captured in a CUDA graph. A packed prefill call
    writes them by a launch of its own, and so does a decode call with ``rotary``, which that launch
    applies.
    """

    priority = 10
    spec = (
        axis("device_cuda").truthy()
        & axis("dtype").in_(torch.bfloat16, torch.float16)
        & axis("needs_grad").falsy()
        & Spec.of(
            lambda axes: 0 < axes["head_dim"] <= MAX_HEAD_DIM and axes["head_dim"] % 8 == 0,
            f"head_dim a multiple of 8 up to {MAX_HEAD_DIM}",
        )
        & Spec.of(
            lambda axes: (
                axes["v_head_dim"] == axes["head_dim"]
                or (axes["head_dim"] == 192 and axes["v_head_dim"] == 128)
            ),
            "v_head_dim that is head_dim, or 128 with head_dim 192",
        )
        & axis("group").in_(*range(1, MAX_GROUP + 1))
        & axis("mask").in_(None, "bool")
        & axis("capability").at_least(MIN_CAPABILITY)
        & Spec.of(
            lambda axes: axes["rank"] == (4 if axes["cache"] is None else 3),
            "rank 4 without a KV cache, rank 3 with one",
        )
        & axis("kernel_loaded").truthy()
    )

    @classmethod
    def available(cls) -> bool:
        """Whether a dense attention kernel is built and loads."""
        return kernel_loaded("attn_prefill") or kernel_loaded("attn_decode")

    @classmethod
    def why_unavailable(cls) -> str:
        """What keeps the prefill kernel from running here."""
        return why_unavailable("attn_prefill")

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
        rotary: Rotary | None = None,
    ) -> AttentionResult:
        """See ``attention``."""
        self._check_fwd(fwd)
        if kv_cache is None:
            if attn_mask is not None and attn_mask.dim() > 1 and attn_mask.shape[0] == 1:
                attn_mask = attn_mask.expand(q.shape[0], *attn_mask.shape[1:])
            return _kernel_call(
                q,
                k,
                v,
                attn_mask,
                is_causal,
                scale,
                return_lse,
                window=window,
                softcap=softcap,
                sinks=sinks,
            )
        kv.check_new_tokens(kv_cache, k, v)
        q, k, v = _dense_rows(q), _dense_rows(k), _dense_rows(v)
        requests = kv_cache.seq_lens.numel()
        cache = {
            "k_cache": kv_cache.k_buffer[layer_id],
            "v_cache": kv_cache.v_buffer[layer_id],
            "kv_indptr": _kv_indptr(kv_cache),
            "block_table": kv.block_table(kv_cache),
            "req_to_token": None,
            "req_pool_indices": None,
            "mask": _packed_mask(attn_mask, kv_cache, q.shape[1], fwd),
            "is_causal": is_causal,
            "workspace": getattr(kv_cache, "workspace", None),
            "scale": scale,
            "return_lse": return_lse,
            "window": window,
            "softcap": softcap,
            "sinks": sinks,
        }
        cache["k_scale"], cache["v_scale"] = kv.steps(kv_cache)
        if cache["block_table"] is None:
            cache["req_to_token"] = kv_cache.req_to_token
            cache["req_pool_indices"] = kv_cache.req_pool_indices
        if fwd == "decode":
            if q.shape[0] != requests:
                raise ShapeError(
                    f"attention: decode must have one query token for each of the {requests} "
                    f"requests, got {q.shape[0]}"
                )
            if rotary is None:
                return attn_paged_decode(q, new_k=k, new_v=v, **cache)
        table, positions, interleaved = rotary or (None, None, True)
        q = rope_append_kv(
            q,
            k,
            v,
            table,
            positions,
            cache["k_cache"],
            cache["v_cache"],
            kv_cache.out_cache_loc,
            interleaved=interleaved,
            k_scale=cache["k_scale"],
            v_scale=cache["v_scale"],
        )
        if fwd == "decode":
            return attn_paged_decode(q, **cache)
        q_lens = getattr(kv_cache, "q_lens", None)
        return attn_paged_prefill(
            q,
            qo_indptr=kv_cache.qo_indptr,
            q_tile_to_batch=getattr(kv_cache, "q_tile_to_batch", None),
            q_tile_to_index=getattr(kv_cache, "q_tile_to_index", None),
            max_q_len=None if q_lens is None else max(q_lens, default=0),
            **cache,
        )

    @classmethod
    def supports_graph(cls) -> bool:
        """Packed decode reads lengths and tables on the device."""
        return True

    @classmethod
    def fuses_rotary(cls) -> bool:
        """The kernel that appends keys to a cache rotates them, and q with them."""
        return kernel_loaded("rotary_emb")


def _kv_indptr(cache: PackedKVCache) -> torch.Tensor:
    """Prefix sums of the numbers of keys: the cache's own, or made on the device."""
    indptr = getattr(cache, "kv_indptr", None)
    if indptr is not None:
        return indptr
    sums = cache.seq_lens.new_zeros(cache.seq_lens.numel() + 1, dtype=torch.int32)
    torch.cumsum(cache.seq_lens, 0, out=sums[1:])
    return sums


def _packed_mask(
    mask: torch.Tensor | None, cache: PackedKVCache, heads: int, fwd: str | None
) -> torch.Tensor | None:
    """A packed call's mask with its batch dimension written out, and 4-D if it has rows."""
    if mask is None:
        return None
    requests = cache.seq_lens.numel()
    q_lens = [1] if fwd == "decode" else getattr(cache, "q_lens", None)
    check_packed_mask(mask, requests, heads, q_lens, getattr(cache, "lens", None))
    if mask.shape[0] == 1:
        mask = mask.expand(requests, *mask.shape[1:])
    return _dense_rows(mask.unsqueeze(1) if mask.dim() == 3 else mask)
