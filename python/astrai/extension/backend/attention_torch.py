"""Attention in torch: SDPA where it can do the call, else the written-out reference."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from astrai.extension.backend import kv
from astrai.extension.backend.attention_base import (
    AttentionBackend,
    AttentionBackendFactory,
    AttentionResult,
)
from astrai.extension.backend.kv import PackedKVCache
from astrai.extension.backend.masks import UNLIMITED, combine, expand_mask, packed_masks
from astrai.extension.backend.reference import attention_reference, check_dense
from astrai.extension.dispatch import Spec


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    *,
    window: tuple[int, int] = UNLIMITED,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> AttentionResult:
    """Same contract as ``attention_reference``, by SDPA where it can do the call.

    SDPA differs in three ways that are evened out here: its causal flag is top-left aligned, it
    does not define rows without keys, and it returns no lse.
    """
    check_dense(q, k, v)
    q_len, kv_len = q.shape[1], k.shape[1]
    written_out = return_lse or softcap > 0 or sinks is not None or q.shape[3] != v.shape[3]
    if written_out or tuple(window) != UNLIMITED or q.numel() == 0 or kv_len == 0:
        return attention_reference(
            q,
            k,
            v,
            mask,
            is_causal,
            scale,
            return_lse,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )
    if mask is not None:
        mask = expand_mask(mask, q.shape[0], q.shape[2], q_len, kv_len)
    elif is_causal:
        if q_len == kv_len:
            return _sdpa(q, k, v, None, True, scale)
        if q_len > kv_len:
            # Aligned at the bottom right, the first rows see no key and the rest is a square.
            tail = _sdpa(q[:, q_len - kv_len :], k, v, None, True, scale)
            return F.pad(tail, (0, 0, 0, 0, q_len - kv_len, 0))
        if q_len == 1:
            is_causal = False
    if mask is None and not is_causal:
        return _sdpa(q, k, v, None, False, scale)

    keep, bias = combine(mask, is_causal, q_len, kv_len, q.device)
    seen = None
    if mask is not None:
        # A row without keys is computed over all keys and then set to 0: its gradient stays finite.
        seen = keep.any(-1, keepdim=True)
        keep = keep | ~seen
    if bias is None:
        out = _sdpa(q, k, v, keep, False, scale)
    else:
        bias = bias.to(q.dtype).masked_fill(~keep, float("-inf"))
        out = _sdpa(q, k, v, bias, False, scale)
    if seen is None:
        return out
    return out.masked_fill(~seen.expand(-1, -1, q_len, 1).transpose(1, 2), 0.0)


def _sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """SDPA on ``[batch, seq, heads, head_dim]``, K/V heads shared by groups of query heads."""
    # A plain bool also when TorchDynamo knows the head counts only as symbols.
    grouped = True if q.shape[2] != k.shape[2] else False  # noqa: SIM210
    if grouped and mask is not None:
        # With a mask, SDPA's grouped form has only its slowest implementation.
        repeats = q.shape[2] // k.shape[2]
        k, v = k.repeat_interleave(repeats, dim=2), v.repeat_interleave(repeats, dim=2)
        grouped = False
    if mask is not None and mask.dim() == 2:
        mask = mask[None, None]
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=grouped,
    )
    return out.transpose(1, 2)


@AttentionBackendFactory.register("torch_native")
class TorchNativeBackend(AttentionBackend):
    """Takes every call: any device, floating dtype, head size and mask, and autograd."""

    spec = Spec.always()

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
        """See ``attention``."""
        self._check_fwd(fwd)
        features = {"window": window, "softcap": softcap, "sinks": sinks}
        if kv_cache is None:
            return dense_attention(q, k, v, attn_mask, is_causal, scale, return_lse, **features)
        runs = kv.segments(kv_cache, q.shape[0], fwd)
        masks = packed_masks(attn_mask, runs, q.shape[1])
        kv.append(kv_cache, layer_id, k, v)
        parts = []
        for run, mask in zip(runs, masks, strict=True):
            keys, values, present = kv.keys_and_values(kv_cache, layer_id, run, q.dtype)
            if present is not None:
                mask = _with_holes(mask, present)
            query = q[run.q_start : run.q_end].unflatten(0, (run.count, run.q_len))
            parts.append(
                dense_attention(query, keys, values, mask, is_causal, scale, return_lse, **features)
            )
        if not parts:
            empty = q.new_zeros(q.shape)
            return (empty, q.new_zeros(q.shape[:-1], dtype=torch.float32)) if return_lse else empty
        if return_lse:
            out = torch.cat([part.flatten(0, 1) for part, _ in parts])
            return out, torch.cat([lse.flatten(0, 1) for _, lse in parts])
        return (
            parts[0].flatten(0, 1)
            if len(parts) == 1
            else torch.cat([p.flatten(0, 1) for p in parts])
        )


def _with_holes(mask: torch.Tensor | None, present: torch.Tensor) -> torch.Tensor:
    """Bar the positions without a token, ``present [count, kv_len]``, in a 4-D mask or none."""
    present = present[:, None, None]
    if mask is None:
        return present
    if mask.dtype is torch.bool:
        return mask & present
    return mask.masked_fill(~present, float("-inf"))
