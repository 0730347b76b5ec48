"""Rotary position embedding on CUDA: one call is one kernel launch, or an error.

A pair (x1, x2) of a head turns by the angle of its token and frequency (Su et al., "RoFormer",
2021):

    y1 = x1 * cos - x2 * sin        y2 = x1 * sin + x2 * cos

in fp32 with one rounding at the end. Pairs are (2i, 2i + 1) where interleaved (GPT-J, Meta's
Llama), or (i, i + rotary_dim / 2) (GPT-NeoX, Hugging Face).

There is no autograd and no fallback here: ``astrai.extension.apply_rotary_emb`` has the policy.
"""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

from astrai.extension.ops import reference
from astrai.extension.ops._attention import split_step
from astrai.extension.ops._kernel import Kernel, require_tensor
from astrai.extension.ops._registration import define
from astrai.extension.ops.reference import Step

__all__ = ["rope_append_kv", "rotary_emb", "rotary_embed"]

_EMB = Kernel("rotary_emb", "rotary_emb")
_EMBED = Kernel("rotary_emb", "rotary_embed")
_APPEND = Kernel("rotary_emb", "rope_append_kv")


def rotary_emb(
    x: torch.Tensor, freqs_cis: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Rotates interleaved pairs of the whole head_dim, with angles given for each token.

    Args:
        x: bf16 or fp16 CUDA tensor [tokens, heads, head_dim] or [batch, tokens, heads, head_dim],
            head_dim even. Any strides; a copy is made if the last one is not 1.
        freqs_cis: fp32, the token dimensions of x and then [head_dim / 2, 2] = (cos, sin). A copy
            is made if it is not contiguous.
        out: Written and returned instead of a new tensor; shaped like x, last stride 1. May be x
            itself.

    Returns:
        The rotated tensor, of the shape and dtype of x; contiguous unless given.

    Raises:
        ValueError: (ShapeError) a rank, size, stride or alignment that the kernel does not take.
        TypeError: An argument that is no tensor with memory, or (DtypeError) of another dtype.
        RuntimeError: No kernel for this machine; tensors that are not all on one CUDA device; an
            argument requires grad while grad mode is on.
    """
    if is_compiling() or not _EMB.direct(x, freqs_cis, out):
        operators = torch.ops.astrai
        if out is None:
            return operators.rotary_emb(x, freqs_cis)
        if out is x:
            operators.rotary_emb_(x, freqs_cis)
        else:
            operators.rotary_emb_out(x, freqs_cis, out)
        return out
    return _run_emb(x, freqs_cis, out)


def rotary_embed(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    inplace: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotates q and k in one launch, with angles from a table by position.

    Args:
        q: bf16 or fp16 CUDA tensor [tokens, q_heads, head_dim] or [batch, tokens, q_heads,
            head_dim]. Any strides, but 1 in the last dimension: slices of a fused qkv tensor are
            taken as they are.
        k: Like q with its own number of heads, or None.
        cos_sin_cache: fp32 contiguous [max_pos, rotary_dim]: rotary_dim / 2 cosines, then as many
            sines.
        positions: int32 or int64, [tokens], or [batch * tokens] or [batch, tokens] for a 4-D q. Not
            checked on the device against max_pos: a token whose position is outside reads nothing
            and becomes NaN.
        interleaved: Whether pairs are (2i, 2i + 1); else (i, i + rotary_dim / 2).
        rotary_dim: How many elements of each head turn, even, the width of cos_sin_cache; the
            others pass unchanged. The width of cos_sin_cache if None.
        inplace: Whether to write q and k themselves; otherwise they are left as they are.

    Returns:
        (q, k) rotated; k is None if it was. Contiguous unless in place.

    Raises:
        ValueError: (ShapeError) a rank, size, stride or alignment that the kernel does not take.
        TypeError: An argument that is no tensor with memory, or (DtypeError) of another dtype.
        RuntimeError: No kernel for this machine; tensors that are not all on one CUDA device; an
            argument requires grad while grad mode is on.
    """
    if is_compiling() or not _EMBED.direct(q, k, cos_sin_cache, positions):
        operators = torch.ops.astrai
        rest = (cos_sin_cache, positions, interleaved, rotary_dim)
        if inplace:
            operators.rotary_embed_(q, k, *rest)
            return q, k
        if k is None:
            return operators.rotary_embed_q(q, *rest), None
        return operators.rotary_embed(q, k, *rest)
    return _run_embed(q, k, cos_sin_cache, positions, interleaved, rotary_dim, inplace)


def rope_append_kv(
    q: torch.Tensor | None,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin_cache: torch.Tensor | None,
    positions: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    interleaved: bool,
    rotary_dim: int | None = None,
    k_scale: Step = None,
    v_scale: Step = None,
    q_out: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Rotates q and k, and writes k (rotated) and v into a paged cache, in one launch.

    q, k and v are read where they lie: slices of a fused qkv tensor are taken as they are. k and v
    themselves are not changed. Two tokens must not have the same slot.

    Args:
        q: bf16 or fp16 CUDA tensor [tokens, q_heads, head_dim], or None. Any strides, but 1 in the
            last dimension; the same goes for all but the table and the indices.
        k: Like q, [tokens, kv_heads, head_dim].
        v: Like q, [tokens, kv_heads, v_head_dim].
        cos_sin_cache: fp32 contiguous [max_pos, rotary_dim] as for ``rotary_embed``; None: nothing
            is rotated.
        positions: int32 or int64 contiguous [tokens]; a token whose position is outside the table
            becomes NaN. May be None where ``cos_sin_cache`` is.
        k_cache: [slots, kv_heads, head_dim] or [pages, page_size, kv_heads, head_dim], like k (the
            copy is exact but for the rotation) or float8_e4m3fn. page_size is a power of two, or
            pages follow each other in memory.
        v_cache: Likewise with v_head_dim.
        slots: int32 or int64 contiguous [tokens]: ``page * page_size + row`` of each token. Nothing
            is written for one that is negative, or outside the cache.
        interleaved: Whether pairs are (2i, 2i + 1); else (i, i + rotary_dim / 2).
        rotary_dim: As ``rotary_embed``.
        k_scale: Step of an e4m3 k_cache, by which k is divided before it is rounded to nearest,
            saturating; NaN stays NaN. A number or an fp32 CUDA tensor of one element; 1 if None.
        v_scale: Likewise for v_cache.
        q_out: Where the rotated q goes; q itself to rotate in place. A new tensor if None.

    Returns:
        The rotated q. Without ``cos_sin_cache`` it is q itself, or ``q_out`` holding a copy of it;
        None if q is.

    Raises:
        ValueError: (ShapeError) a rank, size, stride or alignment that the kernel does not take.
        TypeError: An argument that is no tensor with memory, or (DtypeError) of another dtype.
        RuntimeError: No kernel for this machine; tensors that are not all on one CUDA device; an
            argument requires grad while grad mode is on.
    """
    unchanged = q if cos_sin_cache is None and q_out is None else None
    if unchanged is not None:
        require_tensor("rope_append_kv", "q", q)
        q = None
    tensors = (q, k, v, cos_sin_cache, positions, k_cache, v_cache, slots)
    options = (interleaved, rotary_dim)
    if is_compiling() or not _APPEND.direct(*tensors, k_scale, v_scale, q_out):
        (k_number, k_tensor), (v_number, v_tensor) = split_step(k_scale), split_step(v_scale)
        rest = (*options, k_number, v_number, k_tensor, v_tensor)
        operators = torch.ops.astrai
        if q is None:
            operators.rope_append_kv_only(*tensors[1:], *rest)
            return unchanged
        if q_out is None:
            return operators.rope_append_kv(*tensors, *rest)
        if q_out is q:
            operators.rope_append_kv_(*tensors, *rest)
        else:
            operators.rope_append_kv_out(*tensors, *rest, q_out)
        return q_out
    if q is not None and q_out is None:
        require_tensor("rope_append_kv", "q", q)
        q_out = _new_like(q)
    _APPEND.launch(*tensors, *options, k_scale, v_scale, None if q is None else q_out)
    return unchanged if q is None else q_out


def _new_like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _run_emb(x: torch.Tensor, freqs_cis: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    require_tensor("rotary_emb", "x", x)
    require_tensor("rotary_emb", "freqs_cis", freqs_cis)
    if not freqs_cis.is_contiguous():
        freqs_cis = freqs_cis.contiguous()
    if out is None:
        out = _new_like(x)
    if out is not x and x.dim() > 0 and x.stride(-1) != 1:
        x = x.contiguous()
    _EMB.launch(x, freqs_cis, out)
    return out


def _run_embed(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    interleaved: bool,
    rotary_dim: int | None,
    inplace: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    require_tensor("rotary_embed", "q", q)
    require_tensor("rotary_embed", "positions", positions)
    if k is not None:
        require_tensor("rotary_embed", "k", k)
    if not positions.is_contiguous():  # such as a row expanded over the batch
        positions = positions.contiguous()
    q_out = q if inplace else _new_like(q)
    k_out = k if inplace or k is None else _new_like(k)
    _EMBED.launch(q, k, cos_sin_cache, positions, interleaved, rotary_dim, q_out, k_out)
    return q_out, k_out


def _register() -> None:
    table = "Tensor cos_sin_cache, Tensor positions, bool interleaved=False, int? rotary_dim=None"

    def run_emb(x, freqs_cis):
        return _run_emb(x, freqs_cis, None)

    def run_emb_out(x, freqs_cis, out):
        _run_emb(x, freqs_cis, out)

    def run_emb_inplace(x, freqs_cis):
        _run_emb(x, freqs_cis, x)

    def run_embed(q, k, cos_sin_cache, positions, interleaved=False, rotary_dim=None):
        return _run_embed(q, k, cos_sin_cache, positions, interleaved, rotary_dim, False)

    def run_embed_q(q, cos_sin_cache, positions, interleaved=False, rotary_dim=None):
        return _run_embed(q, None, cos_sin_cache, positions, interleaved, rotary_dim, False)[0]

    def run_embed_inplace(q, k, cos_sin_cache, positions, interleaved=False, rotary_dim=None):
        _run_embed(q, k, cos_sin_cache, positions, interleaved, rotary_dim, True)

    def fake_nothing(*args, **kwargs):
        return None

    def cpu_emb(x, freqs_cis):
        return reference.rotate(x, freqs_cis[..., 0], freqs_cis[..., 1], True).to(x.dtype)

    def cpu_emb_out(x, freqs_cis, out):
        out.copy_(cpu_emb(x, freqs_cis))

    def cpu_embed_q(x, cos_sin_cache, positions, interleaved=False, rotary_dim=None):
        return reference.rotate_by_table(x, cos_sin_cache, positions, interleaved).to(x.dtype)

    def cpu_embed(q, k, *rest):
        return cpu_embed_q(q, *rest), cpu_embed_q(k, *rest)

    def cpu_embed_inplace(q, k, *rest):
        for x in (q, k):
            if x is not None:
                x.copy_(cpu_embed_q(x, *rest))

    define(
        "rotary_emb(Tensor x, Tensor freqs_cis) -> Tensor",
        run_emb,
        lambda x, _: _new_like(x),
        cpu_emb,
    )
    define(
        "rotary_emb_out(Tensor x, Tensor freqs_cis, Tensor(a!) out) -> ()",
        run_emb_out,
        fake_nothing,
        cpu_emb_out,
    )
    define(
        "rotary_emb_(Tensor(a!) x, Tensor freqs_cis) -> ()",
        run_emb_inplace,
        fake_nothing,
        lambda x, freqs_cis: cpu_emb_out(x, freqs_cis, x),
    )
    define(
        f"rotary_embed(Tensor q, Tensor k, {table}) -> (Tensor, Tensor)",
        run_embed,
        lambda q, k, *args, **kwargs: (_new_like(q), _new_like(k)),
        cpu_embed,
    )
    define(
        f"rotary_embed_q(Tensor q, {table}) -> Tensor",
        run_embed_q,
        lambda q, *args, **kwargs: _new_like(q),
        cpu_embed_q,
    )
    define(
        f"rotary_embed_(Tensor(a!) q, Tensor(b!)? k, {table}) -> ()",
        run_embed_inplace,
        fake_nothing,
        cpu_embed_inplace,
    )


def _register_append() -> None:
    """Defines rope_append_kv -> q, rope_append_kv_ (q in place), _out and _only (without q)."""
    rest = (
        "Tensor k, Tensor v, Tensor? cos_sin_cache, Tensor? positions, Tensor(a!) k_cache, "
        "Tensor(b!) v_cache, Tensor slots, bool interleaved, int? rotary_dim=None, "
        "float? k_scale=None, float? v_scale=None, Tensor? k_scale_tensor=None, "
        "Tensor? v_scale_tensor=None"
    )

    def arguments(
        k,
        v,
        cos_sin_cache,
        positions,
        k_cache,
        v_cache,
        slots,
        interleaved,
        rotary_dim=None,
        k_scale=None,
        v_scale=None,
        k_scale_tensor=None,
        v_scale_tensor=None,
    ):
        tensors = (k, v, cos_sin_cache, positions, k_cache, v_cache, slots)
        steps = (
            k_scale if k_scale_tensor is None else k_scale_tensor,
            v_scale if v_scale_tensor is None else v_scale_tensor,
        )
        return tensors, interleaved, rotary_dim, steps

    def run_into(q, q_out, *args):
        tensors, interleaved, rotary_dim, steps = arguments(*args)
        _APPEND.launch(q, *tensors, interleaved, rotary_dim, *steps, q_out)

    def run(q, *args):
        q_out = _new_like(q)
        run_into(q, q_out, *args)
        return q_out

    def cpu(q, *args):
        tensors, interleaved, _, steps = arguments(*args)
        rotated = reference.rope_append(q, *tensors, interleaved, *steps)
        return None if rotated is None else rotated.clone(memory_format=torch.contiguous_format)

    def cpu_into(q, q_out, *args):
        rotated = cpu(q, *args)
        if q_out is not None:
            q_out.copy_(rotated)

    def fake_nothing(*args):
        return None

    define(f"rope_append_kv(Tensor q, {rest}) -> Tensor", run, lambda q, *_: _new_like(q), cpu)
    define(
        f"rope_append_kv_only({rest}) -> ()",
        lambda *args: run_into(None, None, *args),
        fake_nothing,
        lambda *args: cpu_into(None, None, *args),
    )
    define(
        f"rope_append_kv_(Tensor(c!) q, {rest}) -> ()",
        lambda q, *args: run_into(q, q, *args),
        fake_nothing,
        lambda q, *args: cpu_into(q, q, *args),
    )
    rest_out = rest.replace("=None", "")
    define(
        f"rope_append_kv_out(Tensor q, {rest_out}, Tensor(c!) q_out) -> ()",
        lambda q, *args: run_into(q, args[-1], *args[:-1]),
        fake_nothing,
        lambda q, *args: cpu_into(q, args[-1], *args[:-1]),
    )


_register()
_register_append()
