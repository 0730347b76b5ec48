"""KV cache: which request has which rows and pages of the pool, and what was computed before."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

import torch

from astrai.inference.pool import KVCache, PagePool
from astrai.inference.workspace import InferenceWorkspace

__all__ = ["InferenceWorkspace", "KVCache", "PagePool", "TaskCacheManager"]


@dataclasses.dataclass
class _Task:
    row: int
    length: int  # tokens that the task's pages are asked to hold
    cached: int  # tokens of the prompt that were found in the pool
    recorded: int  # full pages known to the prefix index


class TaskCacheManager:
    """Gives tasks (requests, under ids of the caller's choice) their part of a pool.

    Args:
        pool: The pool, contiguous or paged. Nothing else should take rows or pages of it.
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self._tasks: dict[Hashable, _Task] = {}
        self._last_bound: tuple[list[Hashable], list[int]] | None = None
        self._steady = False

    def task_alloc(self, task_id: Hashable, prompt_ids: Sequence[int], spare: int = 0) -> bool:
        """Gives a new task a row and the pages of its prompt.

        Full pages that hold the same beginning of a text are shared instead of taken; at least the
        prompt's last token is left to be computed.

        Args:
            task_id: The task.
            prompt_ids: Tokens of the prompt.
            spare: Pages that must stay available for others.

        Returns:
            Whether there was room. If not, nothing has changed.
        """
        if task_id in self._tasks:
            raise ValueError(f"TaskCacheManager.task_alloc: task must be new, got {task_id!r}")
        pool = self.pool
        if not pool.free_rows or len(prompt_ids) > pool.max_seq_len:
            return False
        shared: list[int] = []
        if pool.pages is not None:
            reusable = (len(prompt_ids) - 1) // pool.page_size * pool.page_size
            if pool.pages.prefix_cache:
                shared = pool.pages.match(prompt_ids[:reusable])
            pool.pages.hold(shared)
            missing = pool.pages_for(len(prompt_ids)) - len(shared)
            if missing + spare > pool.pages.available:
                pool.pages.release(shared)
                return False
        row = pool.alloc_row()
        for index, page in enumerate(shared):
            pool.set_page(row, index, page)
        pool.reserve(row, len(prompt_ids))
        cached = len(shared) * pool.page_size
        self._tasks[task_id] = _Task(row, len(prompt_ids), cached, len(shared))
        return True

    def task_extend(self, task_id: Hashable, pos: int) -> bool:
        """Makes room for the token at position ``pos``.

        Returns:
            Whether there was a page. If not, nothing has changed.
        """
        task = self._task(task_id)
        if not self.pool.reserve(task.row, pos + 1):
            return False
        task.length = max(task.length, pos + 1)
        return True

    def task_free(self, task_id: Hashable) -> None:
        """Gives a task's row and pages back; recorded pages can be found again."""
        self.pool.free_row(self._task(task_id).row)
        del self._tasks[task_id]

    def task_cached(self, task_id: Hashable) -> int:
        """Tokens of the prompt whose K and V were in the pool already."""
        return self._task(task_id).cached

    def task_record_hashes(
        self, task_id: Hashable, token_ids: Sequence[int], length: int | None = None
    ) -> None:
        """Lets other tasks find this task's full pages.

        Args:
            task_id: The task.
            token_ids: Its tokens, from the first one on.
            length: How many of them have their K and V in the pool; None: all.
        """
        task, pages = self._task(task_id), self.pool.pages
        if pages is None or not pages.prefix_cache:
            return
        size = self.pool.page_size
        full = (len(token_ids) if length is None else length) // size
        for index in range(task.recorded, full):
            held = self.pool.row_pages(task.row)
            parent = held[index - 1] if index else None
            known = pages.record(held[index], parent, token_ids[index * size : (index + 1) * size])
            if known != held[index]:
                self.pool.set_page(task.row, index, known)
            task.recorded = index + 1

    def bind(
        self,
        ids: Sequence[Hashable],
        workspace: InferenceWorkspace,
        device: torch.device | str | None = None,
        start_pos: int | Sequence[int] | None = None,
        *,
        lens: Sequence[int] | None = None,
        input_ids: Sequence[int] | None = None,
        input_from: tuple[torch.Tensor, Sequence[int]] | None = None,
        pad_to: int | None = None,
    ) -> KVCache:
        """Describes one call over tasks; see ``PagePool.bind_tasks``.

        Args:
            ids: The tasks.
            workspace: Holds the index tensors.
            device: Must be the pool's device, or None.
            start_pos: As in ``bind_tasks``; None is decode.
            lens: Tokens of each task, those of this call included; None: all that it has room for.
            input_ids: As in ``bind_tasks``.
            input_from: As in ``bind_tasks``.
            pad_to: As in ``bind_tasks``.
        """
        tasks = [self._task(task_id) for task_id in ids]
        lens = [task.length for task in tasks] if lens is None else list(lens)
        cache = self.pool.bind_tasks(
            [task.row for task in tasks],
            lens,
            workspace,
            device,
            start_pos,
            input_ids=input_ids,
            input_from=input_from,
            pad_to=pad_to,
        )
        now = (list(ids), lens) if start_pos is None else None
        last, self._last_bound = self._last_bound, now
        self._steady = (
            now is not None
            and last is not None
            and now[0] == last[0]
            and now[1] == [n + 1 for n in last[1]]
        )
        return cache

    @property
    def bind_was_steady(self) -> bool:
        """Whether the last ``bind`` was the same tasks' next decode step after the one before."""
        return self._steady

    def _task(self, task_id: Hashable) -> _Task:
        try:
            return self._tasks[task_id]
        except KeyError:
            raise ValueError(
                f"TaskCacheManager: task must be a known one, got {task_id!r}"
            ) from None
