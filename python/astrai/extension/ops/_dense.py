"""Attention over dense and packed keys and values; see ``ops.attention``."""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

from astrai.extension.ops import reference
from astrai.extension.ops._attention import (
    FEATURE_SCHEMA,
    FEATURES,
    UNLIMITED,
    AttentionOperators,
    Result,
    Window,
    kernel_arguments,
    outputs,
    pack_features,
    schema_arguments,
)
from astrai.extension.ops._kernel import Kernel
from astrai.extension.ops.reference import Step

_DECODE = Kernel("attn_decode", "attn_decode")
_PREFILL = Kernel("attn_prefill", "attn_prefill")
_VARLEN = Kernel("attn_prefill", "attn_varlen")


def attn_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    window: Window = UNLIMITED,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: Step = None,
    v_scale: Step = None,
    deterministic: bool = False,
    workspace: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> Result:
    """Attention of one query per sequence.

    Args:
        q: bf16 or fp16 CUDA tensor [batch, 1, q_heads, head_dim], head_dim a multiple of 8 up to
            256. Any strides, but 1 in the last dimension; k, v and out likewise.
        k: [batch, kv_len, kv_heads, head_dim] like q, or float8_e4m3fn; q_heads is a multiple of
            kv_heads, at most 64 times as many.
        v: [batch, kv_len, kv_heads, v_head_dim] like k; v_head_dim is head_dim, or 128 where
            head_dim is 192.
        mask: bool, True = may attend: [batch, kv_len], [batch, 1, kv_len] or
            [batch, q_heads, 1, kv_len]. Sizes of 1 broadcast, but for kv_len. Any strides, but 1
            in the last dimension.
        is_causal: No effect on the result: the one query is the last position.
        scale: Factor of the scores; 1 / sqrt(head_dim) if None.
        return_lse: Whether to return the logarithm of the sum of exponentials too.
        window: Keys left and right of the diagonal that are seen, -1 = all.
        softcap: Scores s become ``softcap * tanh(s / softcap)``; 0 = none.
        sinks: fp32 [q_heads], natural-log logits that stand in the denominator only.
        k_scale: Dequantisation step of k, a number or an fp32 CUDA tensor of one element; 1 if
            None.
        v_scale: Likewise for v.
        deterministic: Whether a row's result must not depend on the other rows of the call.
        workspace: Contiguous CUDA memory of at least ``attn_decode_workspace_size(...)`` bytes, of
            any dtype and contents, 16-byte aligned. Taken from torch's allocator if None.
        out: Written and returned instead of a new tensor; [batch, 1, q_heads, v_head_dim].

    Returns:
        out [batch, 1, q_heads, v_head_dim], contiguous unless given; with ``return_lse`` also lse,
        fp32 [batch, 1, q_heads], natural logarithm.

    Raises:
        ValueError: (ShapeError) a rank, size, stride, alignment or head_dim that the kernel does
            not take; a number out of range; a workspace that is too small.
        TypeError: An argument that is no tensor with memory, or (DtypeError) of another dtype.
        RuntimeError: No kernel for this machine; tensors that are not all on one CUDA device; an
            argument requires grad while grad mode is on.
    """
    if is_compiling() or not _DECODE.direct(q, k, v, mask, sinks, k_scale, v_scale, workspace, out):
        features = schema_arguments(is_causal, scale, window, softcap, sinks, k_scale, v_scale)
        inputs = (q, k, v, mask, *features, deterministic)
        return _DECODE_OPERATORS.call(inputs, (), out, return_lse, workspace)
    out, lse = outputs("attn_decode", q, v, "v", out, return_lse)
    features = (is_causal, scale, window, softcap, sinks, k_scale, v_scale)
    _DECODE.launch(q, k, v, mask, *features, out, lse, deterministic, workspace)
    return out if lse is None else (out, lse)


def attn_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    window: Window = UNLIMITED,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: Step = None,
    v_scale: Step = None,
    workspace: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> Result:
    """Attention of any number of queries per sequence.

    Args:
        q: bf16 or fp16 CUDA tensor [batch, q_len, q_heads, head_dim]; otherwise as ``attn_decode``.
        k: [batch, kv_len, kv_heads, head_dim], as ``attn_decode``.
        v: [batch, kv_len, kv_heads, v_head_dim], as ``attn_decode``.
        mask: bool, True = may attend: [batch, kv_len], [batch, q_len, kv_len] or
            [batch, q_heads, q_len, kv_len]. Sizes of 1 broadcast, but for kv_len. Any strides, but
            1 in the last dimension.
        is_causal: Whether query i sees only keys up to ``i + kv_len - q_len``. Combines with
            ``mask`` and ``window``.
        scale: Factor of the scores; 1 / sqrt(head_dim) if None.
        return_lse: Whether to return the logarithm of the sum of exponentials too.
        window: Keys left and right of the diagonal ``i + kv_len - q_len`` that are seen, -1 = all.
        softcap: As ``attn_decode``, and so are the following.
        sinks: fp32 [q_heads].
        k_scale: Dequantisation step of k.
        v_scale: Dequantisation step of v.
        workspace: At least ``attn_prefill_workspace_size(...)`` bytes.
        out: [batch, q_len, q_heads, v_head_dim].

    Returns:
        out [batch, q_len, q_heads, v_head_dim], contiguous unless given; with ``return_lse`` also
        lse, fp32 [batch, q_len, q_heads], natural logarithm.

    Raises:
        ValueError, TypeError, RuntimeError: As ``attn_decode``.
    """
    if is_compiling() or not _PREFILL.direct(
        q, k, v, mask, sinks, k_scale, v_scale, workspace, out
    ):
        features = schema_arguments(is_causal, scale, window, softcap, sinks, k_scale, v_scale)
        inputs = (q, k, v, mask, *features)
        return _PREFILL_OPERATORS.call(inputs, (), out, return_lse, workspace)
    out, lse = outputs("attn_prefill", q, v, "v", out, return_lse)
    features = (is_causal, scale, window, softcap, sinks, k_scale, v_scale)
    _PREFILL.launch(q, k, v, mask, *features, out, lse, workspace)
    return out if lse is None else (out, lse)


def attn_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    window: Window = UNLIMITED,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: Step = None,
    v_scale: Step = None,
    workspace: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> Result:
    """Attention over sequences of different lengths, packed one behind the other.

    Sequence b has queries ``cu_seqlens_q[b] .. cu_seqlens_q[b + 1] - 1`` and keys likewise; either
    may be none. Lengths are read on the device. Rows of q that belong to no sequence are not
    written.

    Args:
        q: bf16 or fp16 CUDA tensor [tokens, q_heads, head_dim]; otherwise as ``attn_decode``.
        k: [key tokens, kv_heads, head_dim].
        v: [key tokens, kv_heads, v_head_dim].
        cu_seqlens_q: int32 contiguous [batch + 1], prefix sums that begin with 0.
        cu_seqlens_k: Likewise.
        max_seqlen_q: No sequence has more queries; the number of tokens if None.
        max_seqlen_k: No sequence has more keys; the number of key tokens if None.
        is_causal: As ``attn_prefill`` with each sequence's own lengths, and so are the following.
        scale: Factor of the scores.
        return_lse: Whether to return lse too.
        window: Keys left and right of the diagonal.
        softcap: Bound of the scores.
        sinks: fp32 [q_heads].
        k_scale: Dequantisation step of k.
        v_scale: Dequantisation step of v.
        workspace: At least ``attn_prefill_workspace_size(...)`` bytes.
        out: [tokens, q_heads, v_head_dim].

    Returns:
        out [tokens, q_heads, v_head_dim], contiguous unless given; with ``return_lse`` also lse,
        fp32 [tokens, q_heads], natural logarithm.

    Raises:
        ValueError, TypeError, RuntimeError: As ``attn_decode``.
    """
    tensors = (q, k, v, cu_seqlens_q, cu_seqlens_k, sinks, k_scale, v_scale, workspace, out)
    packed = (q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if is_compiling() or not _VARLEN.direct(*tensors):
        features = schema_arguments(is_causal, scale, window, softcap, sinks, k_scale, v_scale)
        return _VARLEN_OPERATORS.call((*packed, *features), (), out, return_lse, workspace)
    out, lse = outputs("attn_varlen", q, v, "v", out, return_lse)
    features = (is_causal, scale, window, softcap, sinks, k_scale, v_scale)
    _VARLEN.launch(*packed, *features, out, lse, workspace)
    return out if lse is None else (out, lse)


# ---- Operators ----------------------------------------------------------------------------------

_DENSE_SCHEMA = f"Tensor q, Tensor k, Tensor v, Tensor? mask=None, {FEATURE_SCHEMA}"


def _reference_dense(inputs, extra):
    q, k, v, mask, *features = inputs
    keep = reference.expand_mask(mask)
    return reference.attention(q, k, v, keep, pack_features(*features[:FEATURES]))


def _reference_varlen(inputs, extra):
    q, k, v, cu_seqlens_q, cu_seqlens_k, _, _, *features = inputs
    return reference.varlen_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, pack_features(*features))


def _launch_decode(inputs, extra, out, lse, workspace):
    *tensors, deterministic = inputs
    features = kernel_arguments(tensors[4:])
    _DECODE.launch(*tensors[:4], *features, out, lse, deterministic, workspace)


def _launch_prefill(inputs, extra, out, lse, workspace):
    _PREFILL.launch(*inputs[:4], *kernel_arguments(inputs[4:]), out, lse, workspace)


def _launch_varlen(inputs, extra, out, lse, workspace):
    _VARLEN.launch(*inputs[:7], *kernel_arguments(inputs[7:]), out, lse, workspace)


_DECODE_OPERATORS = AttentionOperators(
    name="attn_decode",
    schema=f"{_DENSE_SCHEMA}, bool deterministic=False",
    v=2,
    launch=_launch_decode,
    reference=_reference_dense,
)
_PREFILL_OPERATORS = AttentionOperators(
    name="attn_prefill",
    schema=_DENSE_SCHEMA,
    v=2,
    launch=_launch_prefill,
    reference=_reference_dense,
)
_VARLEN_OPERATORS = AttentionOperators(
    name="attn_varlen",
    schema="Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    f"SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, {FEATURE_SCHEMA}",
    v=2,
    launch=_launch_varlen,
    reference=_reference_varlen,
)
for _operators in (_DECODE_OPERATORS, _PREFILL_OPERATORS, _VARLEN_OPERATORS):
    _operators.register()
