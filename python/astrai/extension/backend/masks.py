"""Attention masks: one shape and one meaning for every backend.

A mask is 2-D ``[batch, kv_len]``, 3-D ``[batch, q_len | 1, kv_len]`` or 4-D ``[batch, heads | 1,
q_len | 1, kv_len]``; a batch of size 1 serves every batch element. It is bool (True = the key takes
part) or, for the torch backend, floating (added to the scaled scores). Causal is bottom-right
aligned: query i sees key j iff ``j <= i + kv_len - q_len``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from astrai.extension.backend.kv import Segment
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
    mask: torch.Tensor, batch: int, heads: int, q_len: int, kv_len: int, where: str = "attention"
) -> torch.Tensor:
    """View a mask as 4-D ``[batch | 1, heads | 1, q_len | 1, kv_len]``.

    Raises:
        ShapeError: Rank, or a size that neither fits the call nor broadcasts.
        DtypeError: Neither bool nor floating.
    """
    if mask_kind(mask) == "other":
        raise DtypeError(f"{where}: mask must be bool (True = keep) or floating, got {mask.dtype}")
    shape = tuple(mask.shape)
    if mask.dim() == 2:
        mask = mask[:, None, None, :]
    elif mask.dim() == 3:
        mask = mask[:, None, :, :]
    elif mask.dim() != 4:
        raise ShapeError(
            f"{where}: mask must be 2D [batch, kv_len], 3D [batch, q_len | 1, kv_len] or 4D "
            f"[batch, heads | 1, q_len | 1, kv_len], got shape {shape}"
        )
    wanted = (("batch", batch), ("heads", heads), ("q_len", q_len))
    for size, (name, expected) in zip(mask.shape, wanted, strict=False):
        if size != expected and size != 1:
            raise ShapeError(f"{where}: mask {name} must be {expected} or 1, got shape {shape}")
    if mask.shape[-1] != kv_len:
        raise ShapeError(f"{where}: mask last dim must be kv_len {kv_len}, got shape {shape}")
    return mask


def packed_masks(
    mask: torch.Tensor | None, runs: Sequence[Segment], heads: int
) -> list[torch.Tensor | None]:
    """The parts of a packed call's mask that belong to each of its runs, as ``expand_mask`` views.

    In packed calls the batch dimension counts requests, columns are request-local key positions and
    rows request-local query positions; what lies past a request's own lengths is cut off.

    Raises:
        ShapeError: The mask has fewer columns than a request has keys, too few rows, or does not
            fit the number of requests or heads.
        DtypeError: Neither bool nor floating.
    """
    if mask is None:
        return [None] * len(runs)
    shape = tuple(mask.shape)
    requests = sum(run.count for run in runs)
    if mask.dim() not in (2, 3, 4):
        raise ShapeError(f"attention: mask must be 2D, 3D or 4D in packed calls, got shape {shape}")
    if shape[0] not in (1, requests):
        raise ShapeError(f"attention: mask batch must be {requests} or 1, got shape {shape}")
    parts = []
    for run in runs:
        if shape[-1] < run.kv_len:
            raise ShapeError(
                f"attention: mask last dim must be at least kv_len {run.kv_len}, got shape {shape}"
            )
        part = mask[..., : run.kv_len]
        if shape[0] != 1:
            part = part[run.first : run.first + run.count]
        if mask.dim() > 2 and shape[-2] != 1:
            if shape[-2] < run.q_len:
                raise ShapeError(
                    f"attention: mask rows must be 1 or at least q_len {run.q_len}, "
                    f"got shape {shape}"
                )
            part = part[..., : run.q_len, :]
        parts.append(expand_mask(part, run.count, heads, run.q_len, run.kv_len))
    return parts


def diagonal_keep(
    q_len: int, kv_len: int, is_causal: bool, window: tuple[int, int], device: torch.device
) -> torch.Tensor:
    """Bool ``[q_len, kv_len]``, True for the keys inside the causal diagonal and the window."""
    left, right = window
    if is_causal:
        right = 0
    keep = torch.ones(q_len, kv_len, dtype=torch.bool, device=device)
    # A side wider than every sequence is the same as no bound; torch takes no larger diagonal.
    if 0 <= right < kv_len + q_len:
        keep = keep.tril(kv_len - q_len + right)
    if 0 <= left < kv_len + q_len:
        keep = keep.triu(kv_len - q_len - left)
    return keep


def combine(
    mask: torch.Tensor | None,
    is_causal: bool,
    q_len: int,
    kv_len: int,
    device: torch.device,
    window: tuple[int, int] = UNLIMITED,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Split a 4-D mask and the causal flag into (keep, bias).

    Args:
        mask: As ``expand_mask`` returns it, or None.
        is_causal: Combine with the causal mask; both must allow a key.
        q_len: Queries.
        kv_len: Keys.
        device: Where the causal mask goes.
        window: Keys left and right of the bottom-right diagonal that are seen, -1 = all.

    Returns:
        ``keep``: bool, broadcastable to ``[batch, heads, q_len, kv_len]``; None = every key.
        ``bias``: floating and finite, to add to the scaled scores where ``keep`` holds; None =
        nothing to add. A bias of -inf becomes a False in ``keep``, so that a row of nothing but
        -inf counts as a row without keys.
    """
    keep = bias = None
    if mask is not None:
        if mask.dtype is torch.bool:
            keep = mask
        else:
            barred = mask == float("-inf")
            keep = ~barred
            bias = mask.masked_fill(barred, 0.0)
    if is_causal or window != UNLIMITED:
        inside = diagonal_keep(q_len, kv_len, is_causal, window, device)
        keep = inside if keep is None else keep & inside
    return keep, bias
