"""Dense attention on CUDA: one call is one kernel launch, or an error.

For query head h of batch b, with g = h // (q_heads // kv_heads):

    out[b, i, h] = softmax_j(scale * q[b, i, h] . k[b, j, g]) v[b, j, g]

over the keys j that both the causal diagonal and the mask allow. The diagonal is aligned to the
bottom right: query i sees key j iff ``j <= i + kv_len - q_len``. A query that sees no key has
``out`` 0 and ``lse`` -inf. Products accumulate in fp32. Method: online softmax (Milakov and
Gimelshein, 2018) in tiles (FlashAttention-2, Dao, 2023); decode splits the keys over thread blocks
(Flash-Decoding, Dao et al., 2023).

There is no autograd and no fallback here: ``astrai.extension.attention`` has the policy.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch.compiler import is_compiling

from astrai.extension.ops._kernel import Kernel, require_tensor
from astrai.extension.ops._registration import define

__all__ = ["TensorLayout", "attn_decode", "attn_prefill"]

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

_DECODE = Kernel("attn_decode", "attn_decode")
_PREFILL = Kernel("attn_prefill", "attn_prefill")


class TensorLayout(IntEnum):
    """Order of the dimensions of q, k and v. The functions here take BLHD."""

    BHLD = 0  # [batch, heads, seq, head_dim]
    BLHD = 1  # [batch, seq, heads, head_dim]


def attn_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
) -> Result:
    """Attention of one query per sequence.

    Args:
        q: bf16 or fp16 CUDA tensor [batch, 1, q_heads, head_dim], head_dim 64, 128 or 256. Any
            strides, but 1 in the last dimension; k, v and out likewise.
        k: [batch, kv_len, kv_heads, head_dim]; q_heads is a multiple of kv_heads, at most 64 times
            as many.
        v: Like k.
        mask: bool, True = may attend: [batch, kv_len], [batch, 1, kv_len] or
            [batch, q_heads, 1, kv_len]. Sizes of 1 broadcast, but for kv_len. Any strides, but 1
            in the last dimension.
        is_causal: No effect on the result: the one query is the last position.
        scale: Factor of the scores; 1 / sqrt(head_dim) if None.
        return_lse: Whether to return the logarithm of the sum of exponentials too.
        out: Written and returned instead of a new tensor; shaped like q.

    Returns:
        out [batch, 1, q_heads, head_dim], contiguous unless given; with ``return_lse`` also lse,
        fp32 [batch, 1, q_heads], natural logarithm.

    Raises:
        ValueError: (ShapeError) a rank, size, stride, alignment or head_dim that the kernel does
            not take.
        TypeError: An argument that is no tensor with memory, or (DtypeError) of another dtype.
        RuntimeError: No kernel for this machine; tensors that are not all on one CUDA device; an
            argument requires grad while grad mode is on.
    """
    if is_compiling() or not _DECODE.direct(q, k, v, mask, out):
        return _dispatch("attn_decode", q, k, v, mask, is_causal, scale, return_lse, out)
    return _run(_DECODE, "attn_decode", q, k, v, mask, is_causal, scale, return_lse, out)


def attn_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
) -> Result:
    """Attention of any number of queries per sequence.

    Args:
        q: bf16 or fp16 CUDA tensor [batch, q_len, q_heads, head_dim], head_dim 64, 128 or 256. Any
            strides, but 1 in the last dimension; k, v and out likewise.
        k: [batch, kv_len, kv_heads, head_dim]; q_heads is a multiple of kv_heads, at most 64 times
            as many.
        v: Like k.
        mask: bool, True = may attend: [batch, kv_len], [batch, q_len, kv_len] or
            [batch, q_heads, q_len, kv_len]. Sizes of 1 broadcast, but for kv_len. Any strides, but
            1 in the last dimension.
        is_causal: Whether query i sees only keys up to ``i + kv_len - q_len``. Combines with
            ``mask``.
        scale: Factor of the scores; 1 / sqrt(head_dim) if None.
        return_lse: Whether to return the logarithm of the sum of exponentials too.
        out: Written and returned instead of a new tensor; shaped like q.

    Returns:
        out [batch, q_len, q_heads, head_dim], contiguous unless given; with ``return_lse`` also
        lse, fp32 [batch, q_len, q_heads], natural logarithm.

    Raises:
        ValueError: (ShapeError) a rank, size, stride, alignment or head_dim that the kernel does
            not take.
        TypeError: An argument that is no tensor with memory, or (DtypeError) of another dtype.
        RuntimeError: No kernel for this machine; tensors that are not all on one CUDA device; an
            argument requires grad while grad mode is on.
    """
    if is_compiling() or not _PREFILL.direct(q, k, v, mask, out):
        return _dispatch("attn_prefill", q, k, v, mask, is_causal, scale, return_lse, out)
    return _run(_PREFILL, "attn_prefill", q, k, v, mask, is_causal, scale, return_lse, out)


def _new_out(q: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def _new_lse(q: torch.Tensor) -> torch.Tensor:
    return torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)


def _run(
    kernel: Kernel,
    name: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    return_lse: bool,
    out: torch.Tensor | None,
) -> Result:
    """The launch itself, with outputs from torch's allocator."""
    if out is None or return_lse:
        require_tensor(name, "q", q)
    if out is None:
        out = _new_out(q)
    lse = _new_lse(q) if return_lse else None
    kernel.launch(q, k, v, mask, is_causal, scale, out, lse)
    return (out, lse) if return_lse else out


def _dispatch(
    name: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    return_lse: bool,
    out: torch.Tensor | None,
) -> Result:
    """The same through torch's dispatcher."""
    operators = torch.ops.astrai
    if out is not None:
        lse = _new_lse(q) if return_lse else None
        getattr(operators, name + "_out")(q, k, v, mask, is_causal, scale, out, lse)
        return (out, lse) if return_lse else out
    if return_lse:
        return getattr(operators, name + "_lse")(q, k, v, mask, is_causal, scale)
    return getattr(operators, name)(q, k, v, mask, is_causal, scale)


def _register(kernel: Kernel, name: str) -> None:
    """Defines astrai::<name> -> out, <name>_lse -> (out, lse) and <name>_out, which writes both."""
    inputs = (
        "Tensor q, Tensor k, Tensor v, Tensor? mask=None, bool is_causal=False, float? scale=None"
    )

    def run(q, k, v, mask=None, is_causal=False, scale=None):
        return _run(kernel, name, q, k, v, mask, is_causal, scale, False, None)

    def run_lse(q, k, v, mask=None, is_causal=False, scale=None):
        return _run(kernel, name, q, k, v, mask, is_causal, scale, True, None)

    def run_out(q, k, v, mask, is_causal, scale, out, lse):
        kernel.launch(q, k, v, mask, is_causal, scale, out, lse)

    def fake(q, k, v, mask=None, is_causal=False, scale=None):
        return _new_out(q)

    def fake_lse(q, k, v, mask=None, is_causal=False, scale=None):
        return _new_out(q), _new_lse(q)

    def fake_out(q, k, v, mask, is_causal, scale, out, lse):
        return None

    inputs_out = inputs.replace("=None", "").replace("=False", "")
    define(f"{name}({inputs}) -> Tensor", run, fake)
    define(f"{name}_lse({inputs}) -> (Tensor, Tensor)", run_lse, fake_lse)
    define(f"{name}_out({inputs_out}, Tensor(a!) out, Tensor(b!)? lse) -> ()", run_out, fake_out)


_register(_DECODE, "attn_decode")
_register(_PREFILL, "attn_prefill")
