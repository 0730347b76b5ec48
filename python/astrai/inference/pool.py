"""The pool that owns K and V, and the view of it that one model call gets."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from astrai.inference.pages import PageAllocator
from astrai.inference.workspace import InferenceWorkspace, prefix_sums, q_tile_map

_INT32_MAX = 2**31 - 1
MAX_PAGE_SIZE = 256


@dataclasses.dataclass
class KVCache:
    """What ``astrai.extension.attention`` needs to append to a KV cache and attend to it.

    B is the number of requests of this call. ``rows``, ``lens`` and ``q_lens`` are host copies:
    with them a backend can cut views without waiting for the device. A captured graph is replayed
    with other lengths, so a backend that supports graphs must not use them in decode.

    Attributes:
        k_buffer: Keys of all layers, ``[n_layers, slots, kv_heads, head_dim]``, or ``[n_layers,
            pages, page_size, kv_heads, head_dim]`` if page_size is above 1.
        v_buffer: Values, same shape.
        req_to_token: int32 ``[rows, max_seq]``, slot of each token of each row; None if there is a
            block table.
        req_pool_indices: int32 ``[B]``, row of each request.
        seq_lens: int64 ``[B]``, tokens of each request, those of this call included.
        out_cache_loc: int32 ``[tokens]``, slots (page * page_size + offset) for the K and V of this
            call's tokens, in packed order.
        positions: int64 ``[tokens]``, position of each of this call's tokens in its request.
        max_len: Bound of ``seq_lens``: the largest, or the most a row can hold in a padded call,
            which stands for later calls too.
        kv_indptr: int32 ``[B + 1]``, prefix sums of ``seq_lens``.
        qo_indptr: int32 ``[B + 1]``, prefix sums of the numbers of query tokens: the packed offsets
            into q and out.
        contiguous: Whether row r owns the slots from ``r * max_seq`` on.
        rows: ``req_pool_indices`` on the host.
        lens: ``seq_lens`` on the host.
        q_lens: Tokens of this call of each request, on the host; all 1 in decode.
        page_size: Tokens of a page.
        block_table: int32 ``[B, max_pages]``, the pages of each request, or None if page_size is 1.
        q_tile_to_batch: Work map of the paged prefill kernel: the request of each tile of 64 query
            positions. None in a contiguous cache and in decode.
        q_tile_to_index: Likewise: number of the tile within its request.
        k_scale: Dequantisation step of a float8 cache: keys are ``k_buffer * k_scale``. Else None.
        v_scale: Likewise for values.
        workspace: uint8 buffer for partial results of the kernels, or None: they take their own.
        complete: Whether every position below a request's length has a token. True of this pool.
    """

    k_buffer: torch.Tensor
    v_buffer: torch.Tensor
    req_to_token: torch.Tensor | None
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    out_cache_loc: torch.Tensor
    positions: torch.Tensor
    max_len: int
    kv_indptr: torch.Tensor
    qo_indptr: torch.Tensor
    contiguous: bool
    rows: list[int]
    lens: list[int]
    q_lens: list[int]
    page_size: int = 1
    block_table: torch.Tensor | None = None
    q_tile_to_batch: torch.Tensor | None = None
    q_tile_to_index: torch.Tensor | None = None
    k_scale: float | torch.Tensor | None = None
    v_scale: float | torch.Tensor | None = None
    workspace: torch.Tensor | None = None
    complete: bool = True


class PagePool:
    """Owner of all K and V.

    Contiguous (``n_tokens`` None): row ``i`` is the slots ``i * max_seq_len ..``, so that a
    request's cache is a plain ``[length, kv_heads, head_dim]`` view, which dense kernels can read.

    Paged: rows take pages as they grow, out of ``n_tokens`` tokens in all. One page more,
    ``padding_page``, and one row more, ``padding_row``, belong to no request: the padding of a
    batch points there.

    Args:
        n_layers: Layers of the model.
        n_kv_heads: K/V heads.
        head_dim: Head dimension.
        max_batch_size: Rows, that is, requests that can be held at a time.
        max_seq_len: Tokens a row can hold.
        device: Where the pool lives.
        dtype: Type of K and V; ``torch.float8_e4m3fn`` halves the cache of a 16-bit model.
        page_size: Tokens of a page: a power of two up to 256; 1 in a contiguous pool.
        n_tokens: Tokens that a paged pool can hold, rounded up to whole pages; None: contiguous.
        prefix_cache: Whether full pages are kept and shared by requests that begin alike; None:
            if page_size is above 1 (of single tokens, the index costs more than it is worth).
        k_scale: Dequantisation step of the keys of a float8 pool (None there means 1).
        v_scale: Likewise for values.

    Attributes:
        pages: The allocator of a paged pool, else None.
        table: int32, on the device. Contiguous: ``[max_batch_size, max_seq_len]``, slots. Paged:
            ``[max_batch_size + 1, ceil(max_seq_len / page_size)]``, pages.
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
        *,
        prefix_cache: bool | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
    ) -> None:
        for name, value in (
            ("n_layers", n_layers),
            ("n_kv_heads", n_kv_heads),
            ("head_dim", head_dim),
            ("max_batch_size", max_batch_size),
            ("max_seq_len", max_seq_len),
            ("n_tokens", 1 if n_tokens is None else n_tokens),
        ):
            if value < 1:
                raise ValueError(f"PagePool: {name} must be at least 1, got {value}")
        if not 1 <= page_size <= MAX_PAGE_SIZE or page_size & (page_size - 1):
            raise ValueError(
                f"PagePool: page_size must be a power of two up to {MAX_PAGE_SIZE}, got {page_size}"
            )
        if n_tokens is None and page_size != 1:
            raise ValueError(
                "PagePool: page_size must be 1 in a contiguous pool (n_tokens None), got "
                f"{page_size}"
            )
        quantized = dtype is torch.float8_e4m3fn
        if not quantized and (k_scale is not None or v_scale is not None):
            raise ValueError(
                f"PagePool: k_scale and v_scale must be None unless dtype is float8_e4m3fn, got "
                f"{k_scale} and {v_scale} with {dtype}"
            )
        self.k_scale = 1.0 if quantized and k_scale is None else k_scale
        self.v_scale = 1.0 if quantized and v_scale is None else v_scale
        self.max_batch_size = max_batch_size
        self.max_seq_len = max_seq_len
        self.page_size = page_size
        self.device = torch.device(device)
        if n_tokens is None:
            self.pages, slots = None, max_batch_size * max_seq_len
        else:
            n_pages = -(-n_tokens // page_size)
            slots = (n_pages + 1) * page_size
            wanted = page_size > 1 if prefix_cache is None else prefix_cache
        if slots > _INT32_MAX:
            raise ValueError(
                f"PagePool: the pool must have at most {_INT32_MAX} tokens (slots are int32), got "
                f"{slots}"
            )
        if n_tokens is None:
            self.table = torch.arange(slots, dtype=torch.int32, device=self.device).view(
                max_batch_size, max_seq_len
            )
        else:
            self.pages = PageAllocator(n_pages, page_size, wanted)
            self.padding_page, self.padding_row = n_pages, max_batch_size
            self.table = torch.full(
                (max_batch_size + 1, -(-max_seq_len // page_size)),
                self.padding_page,
                dtype=torch.int32,
                device=self.device,
            )
        shape = (slots,) if page_size == 1 else (slots // page_size, page_size)
        shape = (n_layers, *shape, n_kv_heads, head_dim)
        self.k_buffer = torch.empty(shape, dtype=dtype, device=self.device)
        self.v_buffer = torch.empty(shape, dtype=dtype, device=self.device)
        self._free_rows = list(range(max_batch_size - 1, -1, -1))
        self._row_pages: list[list[int]] = [[] for _ in range(max_batch_size)]
        self._changes: list[tuple[int, int]] = []  # (index in the flat table, page) not yet sent

    @property
    def capacity(self) -> int:
        """Tokens that one request can have in the pool while it is alone there."""
        if self.pages is None:
            return self.max_seq_len
        return min(self.max_seq_len, self.pages.n_pages * self.page_size)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_size)

    def alloc_row(self) -> int:
        """Takes a free row. Raises RuntimeError if every row is in use."""
        if not self._free_rows:
            raise RuntimeError(
                f"PagePool: all {self.max_batch_size} rows are in use; free one or make a larger "
                "pool"
            )
        return self._free_rows.pop()

    def free_row(self, row: int) -> None:
        """Gives a row and its pages back.

        K and V stay: nothing past a request's length is ever read, and recorded pages can be found
        again.
        """
        if not 0 <= row < self.max_batch_size or row in self._free_rows:
            raise ValueError(f"PagePool.free_row: row must be a row in use, got {row}")
        if self.pages is not None:
            self.pages.release(self._row_pages[row])
            self._row_pages[row] = []
        self._free_rows.append(row)

    @property
    def free_rows(self) -> int:
        """Number of rows that ``alloc_row`` can still give."""
        return len(self._free_rows)

    def row_pages(self, row: int) -> tuple[int, ...]:
        """The pages of a row of a paged pool, in the order of its text."""
        return tuple(self._row_pages[row])

    def set_page(self, row: int, index: int, page: int) -> None:
        """Makes a held page number ``index`` of a row (in place of one, or as its next)."""
        pages = self._row_pages[row]
        pages[index : index + 1] = [page]
        self._changes.append((row * self.table.shape[1] + index, page))

    def reserve(self, row: int, tokens: int) -> bool:
        """Gives a row the pages that it lacks for ``tokens`` tokens.

        Returns:
            Whether the row can hold them now. If not, nothing has changed.
        """
        if tokens > self.max_seq_len:
            return False
        if self.pages is None:
            return True
        pages = self._row_pages[row]
        new = self.pages.take(max(0, self.pages_for(tokens) - len(pages)))
        if new is None:
            return False
        for page in new:
            self.set_page(row, len(pages), page)
        return True

    def bind_tasks(
        self,
        req_indices: Sequence[int],
        seq_lens: Sequence[int],
        workspace: InferenceWorkspace,
        device: torch.device | str | None = None,
        start_pos: int | Sequence[int] | None = None,
        incremental: bool = False,
        *,
        input_ids: Sequence[int] | None = None,
        input_from: tuple[torch.Tensor, Sequence[int]] | None = None,
        pad_to: int | None = None,
    ) -> KVCache:
        """Describes one call over the given rows. Rows take the pages that they still lack.

        Args:
            req_indices: Row of each request; no row twice (both would write the same slots).
            seq_lens: Tokens of each request, those of this call included.
            workspace: Holds the index tensors; the KVCache is valid until its next use.
            device: Must be the pool's device, or None.
            start_pos: Prefill from this position on (one for all requests, or one for each):
                request b brings ``seq_lens[b] - start_pos`` tokens. None means decode: each request
                brings its last token.
            incremental: Accepted for compatibility: the tables are always filled anew (their result
                is the same).
            input_ids: The call's token ids, packed; they go to ``workspace.input_ids`` in the same
                transfer.
            input_from: In their place, token ids that only the device knows: int64 ``[n]``, and
                which of them each request brings.
            pad_to: Decode in a paged pool: add requests of one token on the padding page up to this
                number, as a graph captured for so many needs them. They touch no other page.

        Raises:
            ValueError: A row or length is out of range, a row comes twice, a request brings no
                token, or the workspace is of another page size.
            RuntimeError: The pool is out of pages.
        """
        del incremental
        rows, lens = [int(r) for r in req_indices], [int(n) for n in seq_lens]
        starts = self._starts(lens, start_pos)
        self._check_binding(rows, lens, starts, workspace, device, pad_to)
        for row, length in zip(rows, lens, strict=True):
            if not self.reserve(row, length):
                raise RuntimeError(
                    f"PagePool.bind_tasks: row {row} needs {self.pages_for(length)} pages and has "
                    f"{len(self._row_pages[row])}, got {self.pages.available} free ones; free a "
                    "row or make a larger pool"
                )
        slots = [
            slot
            for row, start, length in zip(rows, starts, lens, strict=True)
            for slot in self._slots(row, start, length)
        ]
        positions = [p for s, n in zip(starts, lens, strict=True) for p in range(s, n)]
        ids = None if input_ids is None else list(input_ids)
        if ids is not None and len(ids) != len(positions):
            raise ValueError(
                f"PagePool.bind_tasks: input_ids must have {len(positions)} tokens, got {len(ids)}"
            )
        if input_from is not None and (ids is not None or len(input_from[1]) != len(positions)):
            raise ValueError(
                f"PagePool.bind_tasks: input_from must have {len(positions)} rows and stand in "
                f"place of input_ids, got {len(input_from[1])} rows and "
                f"{'no' if ids is None else len(ids)} input_ids"
            )
        padding = 0 if pad_to is None else pad_to - len(rows)
        if padding:
            rows += [self.padding_row] * padding
            lens += [1] * padding
            starts += [0] * padding
            slots += [self.padding_page * self.page_size] * padding
            positions += [0] * padding
            ids = None if ids is None else ids + [0] * padding
        q_lens = [n - s for n, s in zip(lens, starts, strict=True)]
        fields = {
            "position_ids": positions,
            "out_cache_loc": slots,
            "seq_lens": lens,
            "req_pool_indices": rows,
            "kv_indptr": prefix_sums(lens),
            "qo_indptr": prefix_sums(q_lens),
        }
        if ids is not None:
            fields["input_ids"] = ids
        if input_from is not None:
            fields["input_rows"] = input_from[1]
        if self.pages is not None and start_pos is not None:
            fields["q_tile_to_batch"], fields["q_tile_to_index"] = q_tile_map(q_lens)
        parts = self._send(fields, workspace)
        if input_from is not None:
            rows_in, ids_in = parts["input_rows"], workspace.input_ids
            torch.index_select(input_from[0], 0, rows_in, out=ids_in[: rows_in.numel()])
        block_table = None
        if workspace.block_table is not None:
            block_table = workspace.block_table[: len(rows)]
            torch.index_select(self.table, 0, parts["req_pool_indices"], out=block_table)
        return KVCache(
            k_buffer=self.k_buffer,
            v_buffer=self.v_buffer,
            req_to_token=self.table if block_table is None else None,
            req_pool_indices=parts["req_pool_indices"],
            seq_lens=parts["seq_lens"],
            out_cache_loc=parts["out_cache_loc"],
            positions=parts["position_ids"],
            max_len=max(lens) if pad_to is None else self.max_seq_len,
            kv_indptr=parts["kv_indptr"],
            qo_indptr=parts["qo_indptr"],
            contiguous=self.pages is None,
            rows=rows,
            lens=lens,
            q_lens=q_lens,
            page_size=self.page_size,
            block_table=block_table,
            q_tile_to_batch=parts.get("q_tile_to_batch"),
            q_tile_to_index=parts.get("q_tile_to_index"),
            k_scale=self.k_scale,
            v_scale=self.v_scale,
            workspace=workspace.attention,
        )

    def _slots(self, row: int, start: int, end: int) -> Sequence[int]:
        """Slots of the tokens from position ``start`` to ``end - 1`` of a row."""
        if self.pages is None:
            first = row * self.max_seq_len
            return range(first + start, first + end)
        pages, size = self._row_pages[row], self.page_size
        return [pages[p // size] * size + p % size for p in range(start, end)]

    def _send(
        self, fields: dict[str, list[int]], workspace: InferenceWorkspace
    ) -> dict[str, torch.Tensor]:
        """Uploads a call's fields and, in the same transfer, the changes of the table."""
        flat, limit = self.table.view(-1), workspace.max_tokens
        while True:
            changes, self._changes = self._changes[:limit], self._changes[limit:]
            now = {} if self._changes else fields  # usually all fits into one transfer
            if changes:
                # A later change of an entry must win; scatter_ of equal indices has no order.
                index, pages = zip(*dict(changes).items(), strict=True)
                now = now | {"table_index": index, "table_page": pages}
            parts = workspace.upload(**now)
            if changes:
                flat.scatter_(0, parts["table_index"], parts["table_page"])
            if not self._changes:
                return parts

    @staticmethod
    def _starts(lens: list[int], start_pos: int | Sequence[int] | None) -> list[int]:
        """First position that each request brings."""
        if start_pos is None:
            return [n - 1 for n in lens]
        if isinstance(start_pos, int):
            return [start_pos] * len(lens)
        return [int(s) for s in start_pos]

    def _check_binding(
        self,
        rows: list[int],
        lens: list[int],
        starts: list[int],
        workspace: InferenceWorkspace,
        device: torch.device | str | None,
        pad_to: int | None,
    ) -> None:
        where = "PagePool.bind_tasks"
        if device is not None and torch.empty(0, device=device).device != self.k_buffer.device:
            raise ValueError(
                f"{where}: device must be the pool's {self.k_buffer.device}, got {device}"
            )
        if not rows or len(rows) != len(lens) or len(rows) > self.max_batch_size:
            raise ValueError(
                f"{where}: req_indices and seq_lens must have one length of 1 to "
                f"{self.max_batch_size}, got {len(rows)} and {len(lens)}"
            )
        if len(set(rows)) != len(rows) or not all(0 <= r < self.max_batch_size for r in rows):
            raise ValueError(
                f"{where}: req_indices must be distinct rows below {self.max_batch_size}, got "
                f"{rows}"
            )
        if not all(0 < n <= self.max_seq_len for n in lens):
            raise ValueError(f"{where}: seq_lens must be 1 to {self.max_seq_len}, got {lens}")
        if len(starts) != len(lens) or any(
            not 0 <= s < n for s, n in zip(starts, lens, strict=True)
        ):
            raise ValueError(
                f"{where}: start_pos must be 0 or more and below every length, got {starts} "
                f"for {lens}"
            )
        width = None if workspace.block_table is None else workspace.block_table.shape[1]
        if workspace.page_size != self.page_size or width not in (None, self.table.shape[1]):
            raise ValueError(
                f"{where}: workspace must be of the pool's page_size {self.page_size} and "
                f"max_seq_len {self.max_seq_len}, got {workspace.page_size} and "
                f"{workspace.max_seq_len}"
            )
        if pad_to is not None and (
            self.pages is None
            or any(n - s != 1 for s, n in zip(starts, lens, strict=True))
            or not len(rows) <= pad_to <= workspace.max_batch_size
        ):
            raise ValueError(
                f"{where}: pad_to must be {len(rows)} to {workspace.max_batch_size}, in a decode "
                f"of a paged pool, got {pad_to}"
            )
