"""How much workspace the attention kernels need."""

from __future__ import annotations

import torch

from astrai.extension import loader
from astrai.extension.errors import ShapeError

Device = torch.device | str | int | None


def _device_index(function: str, device: Device) -> int:
    if isinstance(device, int):
        return device
    if device is not None:
        device = torch.device(device)
        if device.type != "cuda":
            raise ShapeError(f"{function}: device must be a CUDA device, got {device}")
        if device.index is not None:
            return device.index
    return torch.cuda.current_device()


def _size(
    function: str,
    batch: int,
    max_q_len: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    v_head_dim: int | None,
    deterministic: bool,
    device: Device,
) -> int:
    module = loader.get_module(function.removesuffix("_workspace_size"))
    index = _device_index(function, device)
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    sizes = (batch, max_q_len, q_heads, kv_heads, head_dim, v_head_dim)
    return getattr(module, function)(*sizes, deterministic, index)


def attn_decode_workspace_size(
    batch: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    v_head_dim: int | None = None,
    deterministic: bool = False,
    device: Device = None,
) -> int:
    """Bytes of workspace for ``attn_decode`` calls of these sizes, and of smaller batches.

    For any kv_len and dtype. Bounded by the number of SMs, not by batch, unless ``deterministic``.

    Args:
        batch: Number of sequences.
        q_heads: Number of heads of q.
        kv_heads: Number of heads of k and v.
        head_dim: Of q and k.
        v_head_dim: Of v; head_dim if None.
        deterministic: As in the call.
        device: A CUDA device, the current one if None.

    Raises:
        ValueError: (ShapeError) Sizes that the kernel does not take.
        RuntimeError: No kernel for this machine.
    """
    name = "attn_decode_workspace_size"
    return _size(name, batch, 1, q_heads, kv_heads, head_dim, v_head_dim, deterministic, device)


def attn_prefill_workspace_size(
    batch: int,
    max_q_len: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    v_head_dim: int | None = None,
    device: Device = None,
) -> int:
    """Bytes of workspace for ``attn_prefill`` and ``attn_varlen`` calls up to these sizes.

    Args:
        batch: Number of sequences.
        max_q_len: Queries of a sequence.
        q_heads: Number of heads of q.
        kv_heads: Number of heads of k and v.
        head_dim: Of q and k.
        v_head_dim: Of v; head_dim if None.
        device: A CUDA device, the current one if None.

    Raises:
        ValueError, RuntimeError: As ``attn_decode_workspace_size``.
    """
    name = "attn_prefill_workspace_size"
    return _size(name, batch, max_q_len, q_heads, kv_heads, head_dim, v_head_dim, False, device)


def attn_paged_decode_workspace_size(
    batch: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    v_head_dim: int | None = None,
    max_q_len: int = 1,
    deterministic: bool = False,
    device: Device = None,
) -> int:
    """Bytes of workspace for ``attn_paged_decode`` calls up to these sizes.

    For any lengths, page size and dtype. Bounded by the number of SMs, not by batch, unless
    ``deterministic``.

    Args:
        batch: Number of requests.
        q_heads: Number of heads of q.
        kv_heads: Number of heads of k and v.
        head_dim: Of q and k.
        v_head_dim: Of v; head_dim if None.
        max_q_len: Queries of a request, up to 16.
        deterministic: As in the call.
        device: A CUDA device, the current one if None.

    Raises:
        ValueError, RuntimeError: As ``attn_decode_workspace_size``.
    """
    name = "attn_paged_decode_workspace_size"
    sizes = (batch, max_q_len, q_heads, kv_heads, head_dim, v_head_dim)
    return _size(name, *sizes, deterministic, device)


def attn_paged_prefill_workspace_size(
    batch: int,
    max_q_len: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    v_head_dim: int | None = None,
    device: Device = None,
) -> int:
    """Bytes of workspace for ``attn_paged_prefill`` calls up to these sizes.

    Args:
        batch: Number of requests.
        max_q_len: Queries of a request.
        q_heads: Number of heads of q.
        kv_heads: Number of heads of k and v.
        head_dim: Of q and k.
        v_head_dim: Of v; head_dim if None.
        device: A CUDA device, the current one if None.

    Raises:
        ValueError, RuntimeError: As ``attn_decode_workspace_size``.
    """
    name = "attn_paged_prefill_workspace_size"
    return _size(name, batch, max_q_len, q_heads, kv_heads, head_dim, v_head_dim, False, device)
