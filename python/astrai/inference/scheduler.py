"""Which requests a step works on: continuous batching with chunked prefill and preemption."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from astrai.inference.cache import TaskCacheManager
from astrai.inference.request import Request


class Chunk(NamedTuple):
    """Tokens ``start`` to ``end - 1`` of a request, to be computed in this step."""

    request: Request
    start: int
    end: int

    @property
    def last(self) -> bool:
        """Whether the request's next token can be chosen after this chunk."""
        return self.end == len(self.request.tokens)


class Plan(NamedTuple):
    """The work of one step.

    Attributes:
        decode: Requests with one token left to compute.
        prefill: Chunks of others. Only the last may stop short of its request's end.
    """

    decode: list[Request]
    prefill: list[Chunk]


class Scheduler:
    """Shares steps and pages among requests, first come, first served.

    Every step decodes all running requests, and fills what is left of its budget of tokens with
    chunks of prompts (Sarathi, Agrawal et al. 2023). A request is admitted once the pool has pages
    for all its tokens and, while others run, one more. If a running one needs a page and there is
    none, the youngest is preempted: its pages are given back, its tokens kept, and it waits, before
    all that are younger, to be computed anew. The oldest is never preempted for another's sake, so
    each request ends.

    Args:
        tasks: The pool's pages, by request.
        max_batch_tokens: Budget of a step; at least the requests that the pool holds.

    Attributes:
        waiting: Requests without pages, in the order of arrival.
        running: Requests with pages, in the order of arrival; all before the waiting ones.
        preemptions: How often a request was preempted.
        cached_tokens: Tokens that admitted requests found computed.
    """

    def __init__(self, tasks: TaskCacheManager, max_batch_tokens: int) -> None:
        self._tasks = tasks
        self._max_batch_tokens = max_batch_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = 0
        self.cached_tokens = 0
        self._full = False  # whether the waiting ones must wait until a running one is removed

    def add(self, request: Request) -> None:
        """Queues a request behind all others."""
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Takes out a request that has ended or is given up; its pages are free then."""
        self._full = False
        if request in self.running:
            self.running.remove(request)
            self._tasks.task_free(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def schedule(self) -> Plan:
        """Chooses the work of the next step, and takes the pages for it.

        Raises:
            RuntimeError: Nothing runs and the first request still does not get its pages: somebody
                else holds them.
        """
        decode = self._decode()
        budget = self._max_batch_tokens - len(decode)
        prefill: list[Chunk] = []
        for request in self.running:
            if request.uncomputed > 1 and budget:
                budget -= self._add_chunk(prefill, request, budget)
        while self.waiting and budget:
            request = self.waiting[0]
            if not self._tasks.task_alloc(request, request.tokens, spare=bool(self.running)):
                break
            self.running.append(self.waiting.popleft())
            request.computed = self._tasks.task_cached(request)
            self.cached_tokens += request.computed
            if not request.samples:
                request.cached_tokens = request.computed
            if request.uncomputed == 1:
                decode.append(request)
                budget -= 1
            else:
                budget -= self._add_chunk(prefill, request, budget)
        self._full = bool(self.waiting) and not prefill
        if self.waiting and not self.running:
            raise RuntimeError(
                "Scheduler: the pool must have a row and pages for "
                f"{len(self.waiting[0].tokens)} tokens while no request runs, got fewer; rows "
                "taken from the pool by hand must be given back"
            )
        return Plan(decode, prefill)

    def ahead(self, chosen: list[Request]) -> list[Request]:
        """The requests of the step after one whose tokens are not known yet, with their pages.

        Args:
            chosen: The requests that get a token in that step, which is under way.

        Returns:
            Those that may go on, to be decoded; some may turn out to have ended. Empty if the next
            step has other work: prompts to compute, requests to let in or to preempt.
        """
        if (self.waiting and not self._full) or not set(self.running) <= set(chosen):
            return []
        requests = [request for request in self.running if request.remaining > 0]
        if all(self._tasks.task_extend(request, request.length - 1) for request in requests):
            return requests
        return []

    def _decode(self) -> list[Request]:
        """The running requests with one token to compute, each with a page for it."""
        decode: list[Request] = []
        for request in list(self.running):
            # Whoever was preempted for an older one has no tokens computed.
            if request.uncomputed == 1 and self._extend(request):
                decode.append(request)
        return decode

    def _extend(self, request: Request) -> bool:
        """Gets the page of a request's last token, at the cost of younger ones or its own."""
        while request in self.running:
            if self._tasks.task_extend(request, len(request.tokens) - 1):
                return True
            self._preempt(self.running[-1])
        return False

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._tasks.task_free(request)
        request.computed = 0
        self.waiting.appendleft(request)
        self.preemptions += 1

    @staticmethod
    def _add_chunk(chunks: list[Chunk], request: Request, budget: int) -> int:
        """Plans as much of a request as the budget allows; returns how many tokens."""
        count = min(request.uncomputed, budget)
        chunks.append(Chunk(request, request.computed, request.computed + count))
        return count
