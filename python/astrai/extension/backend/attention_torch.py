"""Attention in torch: SDPA where it can do the call, else the definition of ``ops.reference``."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from astrai.extension.backend import kv
from astrai.extension.backend.attention_base import (
    AttentionBackend,
    AttentionBackendFactory,
    AttentionResult,
)
from astrai.extension.backend.kv import PackedKVCache
from astrai.extension.backend.masks import UNLIMITED, check_packed_mask, expand_mask
from astrai.extension.backend.reference import check_dense, check_heads
from astrai.extension.dispatch import Spec
from astrai.extension.ops import reference
from astrai.extension.ops.reference import Features, Lengths


def padded_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    features: Features,
    lengths: Lengths | None = None,
    *,
    return_lse: bool,
) -> tuple[torch.Tensor, ...]:
    """Same contract as ``ops.reference.attention``, but lse is returned only if it is wanted."""
    defined = return_lse or features.softcap > 0 or features.sinks is not None
    if defined or k.dtype is not q.dtype or q.shape[3] != v.shape[3]:
        return reference.attention(q, k, v, mask, features, lengths)
    if q.numel() == 0 or k.shape[1] == 0:
        return reference.attention(q, k, v, mask, features, lengths)
    return (_by_sdpa(q, k, v, mask, features, lengths),)


def _by_sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    features: Features,
    lengths: Lengths | None,
) -> torch.Tensor:
    """Attention by SDPA, evening out where it differs.

    Its causal flag is top-left aligned, it does not define rows without keys, and what no query
    sees must be finite.
    """
    q_len, kv_len, scale = q.shape[1], k.shape[1], features.scale
    if mask is None and lengths is None and features.window == UNLIMITED:
        if not features.is_causal or q_len == 1:
            return _sdpa(q, k, v, None, False, scale)
        if q_len == kv_len:
            return _sdpa(q, k, v, None, True, scale)
        if q_len > kv_len:
            # Aligned at the bottom right, the first rows see no key and the rest is a square.
            tail = _sdpa(q[:, q_len - kv_len :], k, v, None, True, scale)
            return F.pad(tail, (0, 0, 0, 0, q_len - kv_len, 0))
    if q_len == 1 and lengths is None:
        features = replace(features, is_causal=False)  # the one query sees every key

    keep, bias = reference.permitted(mask, q_len, kv_len, features, q.device, lengths)
    if mask is None and lengths is None and features.window == UNLIMITED:
        return _sdpa(q, k, v, keep, False, scale)  # causal, fewer queries than keys
    k, v = reference.cleared(k, keep), reference.cleared(v, keep)
    # A row without keys is computed over all keys and then set to 0: its gradient stays finite.
    seen = keep.any(-1, keepdim=True)
    keep = keep | ~seen
    if bias is not None:
        bias = bias.to(q.dtype).masked_fill(~keep, float("-inf"))
    out = _sdpa(q, k, v, keep if bias is None else bias, False, scale)
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
    kv_heads = k.shape[2]
    if q.shape[1] == 1 and (mask is None or mask.shape[1] == 1):
        # The one query of each head of a group sees the same: as if they were queries of one head.
        folded = q.unflatten(2, (kv_heads, -1)).flatten(1, 2)
        out = F.scaled_dot_product_attention(
            folded, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, scale=scale
        )
        return out.flatten(1, 2).unsqueeze(1)
    # A plain bool also when TorchDynamo knows the head counts only as symbols.
    grouped = True if q.shape[2] != k.shape[2] else False  # noqa: SIM210
    if grouped and mask is not None:
        # With a mask, SDPA's grouped form has only its slowest implementation.
        repeats = q.shape[2] // k.shape[2]
        k, v = k.repeat_interleave(repeats, dim=2), v.repeat_interleave(repeats, dim=2)
        grouped = False
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
    """Takes every call: any device, floating dtype, head size and mask; autograd in dense calls.

    Packed calls are computed in runs of requests, padded to one length each. With the lengths on
    the host (see ``PackedKVCache``) nothing waits for the device.
    """

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
        features = Features(is_causal, scale, tuple(window), softcap, sinks)
        attend = partial(padded_attention, return_lse=return_lse)
        if kv_cache is None:
            check_dense(q, k, v)
            if attn_mask is not None:
                attn_mask = expand_mask(attn_mask, q.shape[0], q.shape[2], q.shape[1], k.shape[1])
            result = attend(q, k, v, attn_mask, features)
            return result if return_lse else result[0]
        requests = kv.requests(kv_cache, q.shape[0], fwd)
        if attn_mask is not None:
            sizes = requests.q_sizes, requests.kv_sizes
            check_packed_mask(attn_mask, len(requests.kv_sizes), q.shape[1], *sizes)
        check_heads(q.shape[1], k.shape[1])
        kv.append(kv_cache, layer_id, k, v)
        k_scale, v_scale = kv.steps(kv_cache)
        result = reference.packed_attention(
            q,
            k.shape[1],
            v.shape[2],
            requests,
            kv.padded_keys(kv_cache, layer_id, requests),
            reference.expand_mask(attn_mask),
            replace(features, k_scale=k_scale, v_scale=v_scale),
            attend,
        )
        return result if return_lse else result[0]
