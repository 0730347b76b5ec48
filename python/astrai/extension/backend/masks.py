"""Attention masks: one shape and one meaning for every backend.

A mask is 2-D ``[batch, kv_len]``, 3-D ``[batch, q_len | 1, kv_len]`` or 4-D ``[batch, heads | 1,
q_len | 1, kv_len]``; a batch of size 1 serves every batch element. It is bool (True = the key takes
part) or, for the torch backend, floating (added to the scaled scores). Causal is bottom-right
aligned: query i sees key j iff ``j <= i + kv_len - q_len``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from astrai.extension.errors import DtypeError, ShapeError

UNLIMITED = (-1, -1)


def mask_kind(mask: torch.Tensor | None) -> str | None:
    """``"bool"``, ``"additive"`` (floating) or ``"other"`` (no mask dtype); None without a mask."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        return "bool"
    return "additive" if mask.dtype.is_floating_point else "other"


def expand_mask(
    mask: torch.Tensor,
    batch: int,
    heads: int,
    q_len: int,
    kv_len: int,
    where: str = "attention",
    name: str = "attn_mask",
) -> torch.Tensor:
    """View a mask as 4-D ``[batch | 1, heads | 1, q_len | 1, kv_len]``.

    ``where`` and ``name`` are the function and its argument, for messages.

    Raises:
        ShapeError: Rank, or a size that neither fits the call nor broadcasts.
        DtypeError: Neither bool nor floating.
    """
    _check_dtype(mask, where, name)
    shape = tuple(mask.shape)
    if mask.dim() == 2:
        mask = mask[:, None, None, :]
    elif mask.dim() == 3:
        mask = mask[:, None, :, :]
    elif mask.dim() != 4:
        raise ShapeError(
            f"{where}: {name} must be 2D [batch, kv_len], 3D [batch, q_len | 1, kv_len] or 4D "
            f"[batch, heads | 1, q_len | 1, kv_len], got shape {shape}"
        )
    wanted = (("batch", batch), ("heads", heads), ("q_len", q_len))
    for size, (dim, expected) in zip(mask.shape, wanted, strict=False):
        if size != expected and size != 1:
            raise ShapeError(f"{where}: {name} {dim} must be {expected} or 1, got shape {shape}")
    if mask.shape[-1] != kv_len:
        raise ShapeError(f"{where}: {name} last dim must be kv_len {kv_len}, got shape {shape}")
    return mask


def check_packed_mask(
    mask: torch.Tensor,
    requests: int,
    heads: int,
    q_lens: Sequence[int] | None,
    kv_lens: Sequence[int] | None,
) -> None:
    """Check the mask of a packed call.

    In packed calls the batch dimension counts requests, columns are request-local key positions and
    rows request-local query positions; what lies past a request's own lengths is not looked at.

    Args:
        mask: As the module says.
        requests: Requests of the call.
        heads: Query heads.
        q_lens: Queries of each request; None where only the device knows: rows are not checked
            then, and queries without a row see nothing.
        kv_lens: Keys of each request; None likewise for columns.

    Raises:
        ShapeError: Rank; fewer columns than a request has keys, or fewer rows (more than one) than
            it has queries; a batch or number of heads that neither fits nor broadcasts.
        DtypeError: Neither bool nor floating.
    """
    _check_dtype(mask, "attention", "attn_mask")
    shape = tuple(mask.shape)
    if mask.dim() not in (2, 3, 4):
        raise ShapeError(
            f"attention: attn_mask must be 2D, 3D or 4D in packed calls, got shape {shape}"
        )
    wanted = [("batch", 0, requests)]
    if mask.dim() == 4:
        wanted.append(("heads", 1, heads))
    for dim, index, expected in wanted:
        if shape[index] not in (1, expected):
            raise ShapeError(
                f"attention: attn_mask {dim} must be {expected} or 1, got shape {shape}"
            )
    longest = max(kv_lens or (), default=0)
    if shape[-1] < longest:
        raise ShapeError(
            f"attention: attn_mask last dim must be at least kv_len {longest}, got shape {shape}"
        )
    longest = max(q_lens or (), default=0)
    if mask.dim() > 2 and shape[-2] != 1 and shape[-2] < longest:
        raise ShapeError(
            f"attention: attn_mask rows must be 1 or at least q_len {longest}, got shape {shape}"
        )


def _check_dtype(mask: torch.Tensor, where: str, name: str) -> None:
    if mask_kind(mask) == "other":
        raise DtypeError(
            f"{where}: {name} must be bool (True = keep) or floating, got {mask.dtype}"
        )
