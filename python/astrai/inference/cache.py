"""KV cache: the pool that owns K and V, and the view of it that one call gets.

A pool of slots holds one token's K and V per slot: ``k_buffer[layer, slot]`` is ``[kv_heads,
head_dim]``. A table ``req_to_token[row, position]`` says in which slot a token of a request lies.
In the contiguous pool, the only kind here, row ``r`` owns the slots ``r * max_seq_len`` to ``(r +
1) * max_seq_len - 1``, so that a request's cache is a plain ``[length, kv_heads, head_dim]`` view,
which dense attention kernels can read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

_INT32_MAX = 2**31 - 1


@dataclasses.dataclass
class KVCache:
    """What ``astrai.extension.attention`` needs to append to a KV cache and attend to it.

    B is the number of requests of this call. ``rows``, ``lens`` and ``q_lens`` are host copies:
    with them a backend can cut views without waiting for the device.

    Attributes:
        k_buffer: Keys of all layers, ``[n_layers, slots, kv_heads, head_dim]``.
        v_buffer: Values, same shape.
        req_to_token: int32 ``[max_batch, max_seq]``, slot of each token of each row.
        req_pool_indices: int32 ``[B]``, row of each request.
        seq_lens: int64 ``[B]``, tokens of each request, those of this call included.
        out_cache_loc: int32 ``[tokens]``, slots for the K and V of this call's tokens, in packed
            order.
        max_len: The largest of ``lens``.
        kv_indptr: int32 ``[B + 1]``, prefix sums of ``seq_lens``.
        qo_indptr: int32 ``[B + 1]``, prefix sums of the numbers of query tokens: the packed offsets
            into q and out.
        contiguous: Whether row r owns the slots from ``r * max_seq`` on.
        rows: ``req_pool_indices`` on the host.
        lens: ``seq_lens`` on the host.
        q_lens: Tokens of this call of each request, on the host; all 1 in decode.
        q_tile_to_batch: Work map of the paged prefill kernel; None in a contiguous cache and in
            decode.
        q_tile_to_index: Likewise.
        decode_o_part: Buffer of the paged decode kernel; None in a contiguous cache and in prefill.
        decode_ml_part: Likewise.
        decode_out: Likewise.
    """

    k_buffer: torch.Tensor
    v_buffer: torch.Tensor
    req_to_token: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    out_cache_loc: torch.Tensor
    max_len: int
    kv_indptr: torch.Tensor
    qo_indptr: torch.Tensor
    contiguous: bool
    rows: list[int]
    lens: list[int]
    q_lens: list[int]
    q_tile_to_batch: torch.Tensor | None = None
    q_tile_to_index: torch.Tensor | None = None
    decode_o_part: torch.Tensor | None = None
    decode_ml_part: torch.Tensor | None = None
    decode_out: torch.Tensor | None = None


class InferenceWorkspace:
    """Index buffers at fixed addresses that every call of an engine reuses.

    Args:
        max_batch_size: Requests that one call may hold.
        max_seq_len: Tokens that one request may hold.
        max_q_heads: Query heads of the model (sizes the buffers of the paged decode kernel; unused
            by dense kernels).
        head_dim: Head dimension of the model (likewise).
        device: Where the buffers live.
        dtype: Type of the model's activations (likewise).
    """

    def __init__(
        self,
        max_batch_size: int,
        max_seq_len: int,
        max_q_heads: int,
        head_dim: int,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        self.max_batch_size = max_batch_size
        self.max_seq_len = max_seq_len
        self.max_q_heads = max_q_heads
        self.head_dim = head_dim
        self.device = torch.device(device)
        self.dtype = dtype
        tokens = max_batch_size * max_seq_len

        def buffer(n: int, kind: torch.dtype) -> torch.Tensor:
            return torch.zeros(n, dtype=kind, device=self.device)

        self.input_ids = buffer(tokens, torch.int64)
        self.position_ids = buffer(tokens, torch.int64)
        self.out_cache_loc = buffer(tokens, torch.int32)
        self.req_pool_indices = buffer(max_batch_size, torch.int32)
        self.seq_lens = buffer(max_batch_size, torch.int64)
        self.kv_indptr = buffer(max_batch_size + 1, torch.int32)
        self.qo_indptr = buffer(max_batch_size + 1, torch.int32)

    def fill(self, name: str, values: Sequence[int]) -> torch.Tensor:
        """Copies ``values`` to the start of the buffer ``name``; returns that part."""
        target = getattr(self, name)
        if len(values) > target.numel():
            raise ValueError(
                f"InferenceWorkspace: {name} must have at most {target.numel()} elements, got "
                f"{len(values)}"
            )
        part = target[: len(values)]
        part.copy_(torch.tensor(values, dtype=target.dtype))
        return part

    def fill_input_ids(self, ids: Sequence[int]) -> torch.Tensor:
        """Copies a call's packed token ids into ``input_ids``; returns that part, ``[tokens]``."""
        return self.fill("input_ids", ids)


class PagePool:
    """Owner of all K and V, contiguous: request row ``i`` is the slots ``i * max_seq_len ..``.

    Args:
        n_layers: Layers of the model.
        n_kv_heads: K/V heads.
        head_dim: Head dimension.
        max_batch_size: Rows, that is, requests that can be held at a time.
        max_seq_len: Tokens a row can hold.
        device: Where the pool lives.
        dtype: Type of K and V.
        page_size: Must be 1 in a contiguous pool.
        n_tokens: Must be None (a contiguous pool). A number asks for a paged pool, which is not
            built yet.
    """

    def __init__(
        self,
        n_layers: int,
        n_kv_heads: int,
        head_dim: int,
        max_batch_size: int,
        max_seq_len: int,
        device: torch.device | str,
        dtype: torch.dtype,
        page_size: int = 1,
        n_tokens: int | None = None,
    ) -> None:
        for name, value in (
            ("n_layers", n_layers),
            ("n_kv_heads", n_kv_heads),
            ("head_dim", head_dim),
            ("max_batch_size", max_batch_size),
            ("max_seq_len", max_seq_len),
        ):
            if value < 1:
                raise ValueError(f"PagePool: {name} must be at least 1, got {value}")
        if n_tokens is not None or page_size != 1:
            raise ValueError(
                "PagePool: n_tokens must be None and page_size 1 (only the contiguous pool is "
                "built), "
                f"got n_tokens={n_tokens}, page_size={page_size}"
            )
        slots = max_batch_size * max_seq_len
        if slots > _INT32_MAX:
            raise ValueError(
                f"PagePool: max_batch_size * max_seq_len must be at most {_INT32_MAX} (slots are "
                f"int32), got {slots}"
            )
        self.max_batch_size = max_batch_size
        self.max_seq_len = max_seq_len
        self.device = torch.device(device)
        shape = (n_layers, slots, n_kv_heads, head_dim)
        self.k_buffer = torch.empty(shape, dtype=dtype, device=self.device)
        self.v_buffer = torch.empty(shape, dtype=dtype, device=self.device)
        self.req_to_token = torch.arange(slots, dtype=torch.int32, device=self.device).view(
            max_batch_size, max_seq_len
        )
        self._free_rows = list(range(max_batch_size - 1, -1, -1))

    def alloc_row(self) -> int:
        """Takes a free row. Raises RuntimeError if every row is in use."""
        if not self._free_rows:
            raise RuntimeError(
                f"PagePool: all {self.max_batch_size} rows are in use; free one or make a larger "
                "pool"
            )
        return self._free_rows.pop()

    def free_row(self, row: int) -> None:
        """Gives a row back. K and V stay: nothing past a request's length is ever read."""
        if not 0 <= row < self.max_batch_size or row in self._free_rows:
            raise ValueError(f"PagePool.free_row: row must be a row in use, got {row}")
        self._free_rows.append(row)

    @property
    def free_rows(self) -> int:
        """Number of rows that ``alloc_row`` can still give."""
        return len(self._free_rows)

    def bind_tasks(
        self,
        req_indices: Sequence[int],
        seq_lens: Sequence[int],
        workspace: InferenceWorkspace,
        device: torch.device | str | None = None,
        start_pos: int | None = None,
        incremental: bool = False,
    ) -> KVCache:
        """Describes one call over the given rows.

        Args:
            req_indices: Row of each request; no row twice (both would write the same slots).
            seq_lens: Tokens of each request, those of this call included.
            workspace: Holds the index tensors; the KVCache is valid until its next use.
            device: Must be the pool's device, or None.
            start_pos: Prefill from this position on, the same for all requests: request b brings
                ``seq_lens[b] - start_pos`` tokens. None means decode: each request brings its last
                token.
            incremental: Accepted for compatibility: the tables are always filled anew (their result
                is the same).

        Raises:
            ValueError: A row or length is out of range, a row comes twice, or a request brings no
                token.
        """
        del incremental
        rows, lens = [int(r) for r in req_indices], [int(n) for n in seq_lens]
        where = "PagePool.bind_tasks"
        if device is not None and torch.empty(0, device=device).device != self.k_buffer.device:
            raise ValueError(
                f"{where}: device must be the pool's {self.k_buffer.device}, got {device}"
            )
        if not rows or len(rows) != len(lens) or len(rows) > self.max_batch_size:
            raise ValueError(
                f"{where}: req_indices and seq_lens must have one length of 1 to "
                f"{self.max_batch_size}, "
                f"got {len(rows)} and {len(lens)}"
            )
        if len(set(rows)) != len(rows) or not all(0 <= r < self.max_batch_size for r in rows):
            raise ValueError(
                f"{where}: req_indices must be distinct rows below {self.max_batch_size}, got "
                f"{rows}"
            )
        if not all(0 < n <= self.max_seq_len for n in lens):
            raise ValueError(f"{where}: seq_lens must be 1 to {self.max_seq_len}, got {lens}")
        if start_pos is not None and (start_pos < 0 or any(n <= start_pos for n in lens)):
            raise ValueError(
                f"{where}: start_pos must be 0 or more and below every length, got {start_pos} "
                f"for {lens}"
            )

        starts = [start_pos if start_pos is not None else n - 1 for n in lens]
        q_lens = [n - s for n, s in zip(lens, starts, strict=True)]
        slots = [
            r * self.max_seq_len + p
            for r, s, n in zip(rows, starts, lens, strict=True)
            for p in range(s, n)
        ]
        return KVCache(
            k_buffer=self.k_buffer,
            v_buffer=self.v_buffer,
            req_to_token=self.req_to_token,
            req_pool_indices=workspace.fill("req_pool_indices", rows),
            seq_lens=workspace.fill("seq_lens", lens),
            out_cache_loc=workspace.fill("out_cache_loc", slots),
            max_len=max(lens),
            kv_indptr=workspace.fill("kv_indptr", _prefix_sums(lens)),
            qo_indptr=workspace.fill("qo_indptr", _prefix_sums(q_lens)),
            contiguous=True,
            rows=rows,
            lens=lens,
            q_lens=q_lens,
        )


def _prefix_sums(values: Sequence[int]) -> list[int]:
    sums = [0]
    for value in values:
        sums.append(sums[-1] + value)
    return sums
