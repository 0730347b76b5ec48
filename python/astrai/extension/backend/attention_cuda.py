"""Attention by this package's CUDA kernels."""

from __future__ import annotations

import torch

from astrai.extension.backend import kv
from astrai.extension.backend.attention_base import (
    AttentionBackend,
    AttentionBackendFactory,
    AttentionResult,
    kernel_loaded,
)
from astrai.extension.backend.kv import PackedKVCache
from astrai.extension.backend.masks import packed_masks
from astrai.extension.dispatch import Spec, axis
from astrai.extension.loader import why_unavailable
from astrai.extension.ops.attention import attn_decode, attn_prefill

HEAD_DIMS = (64, 128, 256)
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
    out: torch.Tensor | None = None,
) -> AttentionResult:
    """One launch on 4-D operands: the decode kernel for one query token, else prefill."""
    q, k, v = _dense_rows(q), _dense_rows(k), _dense_rows(v)
    if mask is not None:
        mask = _dense_rows(mask)
    op = attn_decode if q.shape[1] == 1 else attn_prefill
    return op(q, k, v, mask, is_causal, scale=scale, return_lse=return_lse, out=out)


@AttentionBackendFactory.register("cuda")
class CudaBackend(AttentionBackend):
    """Dense kernels, and packed calls over a contiguous KV cache, cut into runs of equal lengths.

    Inference only: autograd does not see through the kernels. A packed call launches one kernel for
    each run of requests that have equal lengths and consecutive rows. The lengths come from
    the host, so a captured graph replays them: ``supports_graph`` stays False.
    """

    priority = 10
    spec = (
        axis("device_cuda").truthy()
        & axis("dtype").in_(torch.bfloat16, torch.float16)
        & axis("needs_grad").falsy()
        & axis("head_dim").in_(*HEAD_DIMS)
        & axis("group").in_(*range(1, MAX_GROUP + 1))
        & axis("mask").in_(None, "bool")
        & axis("cache").in_(None, "contiguous")
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
    ) -> AttentionResult:
        """See ``attention``."""
        self._check_fwd(fwd)
        if kv_cache is None:
            if attn_mask is not None and attn_mask.dim() > 1 and attn_mask.shape[0] == 1:
                attn_mask = attn_mask.expand(q.shape[0], *attn_mask.shape[1:])
            return _kernel_call(q, k, v, attn_mask, is_causal, scale, return_lse)
        runs = kv.segments(kv_cache, q.shape[0], fwd)
        masks = packed_masks(attn_mask, runs, q.shape[1])
        kv.append(kv_cache, layer_id, k, v)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        parts = []
        for run, mask in zip(runs, masks, strict=True):
            keys, values, _ = kv.keys_and_values(kv_cache, layer_id, run)
            if mask is not None:
                mask = mask.expand(run.count, *mask.shape[1:])
            part = slice(run.q_start, run.q_end)
            query = q[part].unflatten(0, (run.count, run.q_len))
            target = out[part].unflatten(0, (run.count, run.q_len))
            result = _kernel_call(
                query, keys, values, mask, is_causal, scale, return_lse, out=target
            )
            if return_lse:
                parts.append(result[1].flatten(0, 1))
        if not return_lse:
            return out
        if not parts:
            return out, out.new_empty(q.shape[:-1], dtype=torch.float32)
        return out, torch.cat(parts)
