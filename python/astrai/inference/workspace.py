"""Buffers at fixed addresses that every model call of an engine reuses."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

Q_TILE_ROWS = 64
"""Query positions in one entry of the work map of paged prefill."""

_TYPE_CODES = {torch.int32: "i", torch.int64: "q"}
_ALIGNMENT = 16  # bytes


def prefix_sums(values: Sequence[int]) -> list[int]:
    """``[0, v0, v0 + v1, ...]``."""
    sums = [0]
    for value in values:
        sums.append(sums[-1] + value)
    return sums


def q_tile_map(q_lens: Sequence[int]) -> tuple[list[int], list[int]]:
    """The request and the tile within it of each tile of 64 query positions.

    Query lengths [70, 10, 130] give [0, 0, 1, 2, 2, 2] and [0, 1, 0, 0, 1, 2].
    """
    tiles = [
        (request, tile)
        for request, q_len in enumerate(q_lens)
        for tile in range(-(-q_len // Q_TILE_ROWS))
    ]
    return [request for request, _ in tiles], [tile for _, tile in tiles]


class InferenceWorkspace:
    """Index buffers of a model call.

    They are parts of one block of memory. What a call needs is written into a pinned copy of the
    block and goes to the device in one transfer.

    Args:
        max_batch_size: Requests that one call may hold.
        max_seq_len: Tokens that one request may hold.
        max_q_heads: Query heads of the model.
        head_dim: Head dimension of the model.
        device: Where the buffers live.
        dtype: Type of the model's activations.
        max_tokens: Tokens that one call may bring, over all requests; None means max_batch_size *
            max_seq_len. The smaller, the shorter the transfer.
        page_size: Page size of the pool whose calls are described; above 1 there is a block table.
        attention_bytes: Size of ``attention``; 0 means that the kernels take memory of their own.

    Attributes:
        input_ids: int64 ``[max_tokens]``, token ids.
        input_rows: int32 ``[max_batch_size]``, where the token ids are found that the device has.
        position_ids: int64 ``[max_tokens]``, position of each token in its request.
        seq_lens: int64 ``[max_batch_size]``, tokens of each request.
        table_index: int64 ``[max_tokens]``, entries of the pool's page table that change, counted
            over the flat table.
        table_page: int32 ``[max_tokens]``, their new values.
        out_cache_loc: int32 ``[max_tokens]``, slot of each token.
        req_pool_indices: int32 ``[max_batch_size]``, row of each request.
        kv_indptr: int32 ``[max_batch_size + 1]``, prefix sums of ``seq_lens``.
        qo_indptr: int32 ``[max_batch_size + 1]``, prefix sums of the tokens that requests bring.
        q_tile_to_batch: int32, request of each tile of 64 query positions.
        q_tile_to_index: int32, number of each tile within its request.
        block_table: int32 ``[max_batch_size, ceil(max_seq_len / page_size)]``, or None if page_size
            is 1: the pages of each request of the call.
        attention: uint8 ``[attention_bytes]``, what attention kernels keep partial results in, or
            None.
    """

    def __init__(
        self,
        max_batch_size: int,
        max_seq_len: int,
        max_q_heads: int,
        head_dim: int,
        device: torch.device | str,
        dtype: torch.dtype,
        *,
        max_tokens: int | None = None,
        page_size: int = 1,
        attention_bytes: int = 0,
    ) -> None:
        self.max_batch_size = max_batch_size
        self.max_seq_len = max_seq_len
        self.max_q_heads = max_q_heads
        self.head_dim = head_dim
        self.device = torch.device(device)
        self.dtype = dtype
        self.max_tokens = max_batch_size * max_seq_len if max_tokens is None else max_tokens
        self.page_size = page_size
        tokens, batch = self.max_tokens, max_batch_size
        tiles = tokens // Q_TILE_ROWS + batch
        # In the order of memory: a decode step sends all but the two work maps at the end.
        sizes = {
            "input_ids": (tokens, torch.int64),
            "position_ids": (tokens, torch.int64),
            "out_cache_loc": (tokens, torch.int32),
            "input_rows": (batch, torch.int32),
            "seq_lens": (batch, torch.int64),
            "req_pool_indices": (batch, torch.int32),
            "kv_indptr": (batch + 1, torch.int32),
            "qo_indptr": (batch + 1, torch.int32),
            "table_index": (tokens, torch.int64),
            "table_page": (tokens, torch.int32),
            "q_tile_to_batch": (tiles, torch.int32),
            "q_tile_to_index": (tiles, torch.int32),
        }
        self._spans: dict[str, tuple[int, int, torch.dtype]] = {}  # byte offset, elements, type
        end = 0
        for name, (count, kind) in sizes.items():
            self._spans[name] = (end, count, kind)
            end += -(-count * kind.itemsize // _ALIGNMENT) * _ALIGNMENT
        self._bytes = torch.zeros(end, dtype=torch.uint8, device=self.device)
        on_gpu = self.device.type == "cuda"
        self._host = torch.zeros(end, dtype=torch.uint8, pin_memory=True) if on_gpu else self._bytes
        self._sent = torch.cuda.Event() if on_gpu else None

        self.input_ids = self._part("input_ids")
        self.position_ids = self._part("position_ids")
        self.out_cache_loc = self._part("out_cache_loc")
        self.input_rows = self._part("input_rows")
        self.seq_lens = self._part("seq_lens")
        self.req_pool_indices = self._part("req_pool_indices")
        self.kv_indptr = self._part("kv_indptr")
        self.qo_indptr = self._part("qo_indptr")
        self.table_index = self._part("table_index")
        self.table_page = self._part("table_page")
        self.q_tile_to_batch = self._part("q_tile_to_batch")
        self.q_tile_to_index = self._part("q_tile_to_index")
        self.block_table = None
        if page_size > 1:
            self.block_table = torch.zeros(
                batch, -(-max_seq_len // page_size), dtype=torch.int32, device=self.device
            )
        self.attention = None
        if attention_bytes:
            self.attention = torch.empty(attention_bytes, dtype=torch.uint8, device=self.device)

    def _part(self, name: str) -> torch.Tensor:
        start, count, kind = self._spans[name]
        return self._bytes[start : start + count * kind.itemsize].view(kind)

    def upload(self, **values: Sequence[int]) -> dict[str, torch.Tensor]:
        """Copies values to the starts of the buffers of these names, in one transfer.

        Returns:
            For each name, the part of its buffer that was filled.

        Raises:
            ValueError: A buffer is too small.
        """
        for name, numbers in values.items():
            _, count, _ = self._spans[name]
            if len(numbers) > count:
                raise ValueError(
                    f"InferenceWorkspace: {name} must have at most {count} elements, got "
                    f"{len(numbers)}"
                )
        if self._sent is not None:
            self._sent.synchronize()  # the pinned copy may still be on its way
        low, high = self._bytes.numel(), 0
        for name, numbers in values.items():
            if not len(numbers):
                continue
            start, _, kind = self._spans[name]
            end = start + len(numbers) * kind.itemsize
            packed = array(_TYPE_CODES[kind], numbers)
            self._host[start:end].copy_(torch.frombuffer(packed, dtype=torch.uint8))
            low, high = min(low, start), max(high, end)
        if self._sent is not None and low < high:
            self._bytes[low:high].copy_(self._host[low:high], non_blocking=True)
            self._sent.record(torch.cuda.current_stream(self.device))
        return {name: getattr(self, name)[: len(numbers)] for name, numbers in values.items()}

    def fill_input_ids(self, ids: Sequence[int]) -> torch.Tensor:
        """Copies a call's packed token ids into ``input_ids``; returns that part, ``[tokens]``."""
        return self.upload(input_ids=ids)["input_ids"]
