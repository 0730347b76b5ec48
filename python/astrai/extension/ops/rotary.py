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

from astrai.extension.ops._kernel import Kernel, require_tensor
from astrai.extension.ops._registration import define

__all__ = ["rotary_emb", "rotary_embed"]

_EMB = Kernel("rotary_emb", "rotary_emb")
_EMBED = Kernel("rotary_emb", "rotary_embed")


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

    define("rotary_emb(Tensor x, Tensor freqs_cis) -> Tensor", run_emb, lambda x, _: _new_like(x))
    define(
        "rotary_emb_out(Tensor x, Tensor freqs_cis, Tensor(a!) out) -> ()",
        run_emb_out,
        fake_nothing,
    )
    define("rotary_emb_(Tensor(a!) x, Tensor freqs_cis) -> ()", run_emb_inplace, fake_nothing)
    define(
        f"rotary_embed(Tensor q, Tensor k, {table}) -> (Tensor, Tensor)",
        run_embed,
        lambda q, k, *args, **kwargs: (_new_like(q), _new_like(k)),
    )
    define(
        f"rotary_embed_q(Tensor q, {table}) -> Tensor",
        run_embed_q,
        lambda q, *args, **kwargs: _new_like(q),
    )
    define(
        f"rotary_embed_(Tensor(a!) q, Tensor(b!)? k, {table}) -> ()",
        run_embed_inplace,
        fake_nothing,
    )


_register()
