"""Pages of a KV cache: who holds them, and which of them hold a known beginning of a text.

Everything here is bookkeeping on the host; no page's contents are touched.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

_ROOT = 0


class _Node(NamedTuple):
    """A full page in the prefix index."""

    number: int  # never used twice, so that a key with a forgotten parent matches nothing
    key: tuple[int, tuple[int, ...]]  # number of the page before it, and this page's tokens


class PageAllocator:
    """Hands out pages, counts their holders, and finds pages of known prefixes again.

    A page is free, held (by one request, or by several that begin alike), or idle: held by nobody,
    but with contents that a later request may want. Idle pages are given out, the longest unused
    first, only when no page is free.

    Only full pages are shared, so no page that somebody may still write to has two holders. The
    index is a tree over pages, as the radix tree of SGLang (Zheng et al. 2024) with whole pages as
    edges: a page is looked up by its parent and its own tokens, which the dict compares
    one by one; equal hashes alone never match.

    Args:
        n_pages: Pages 0 to n_pages - 1.
        page_size: Tokens of a page.
        prefix_cache: Whether full pages may be recorded and found again.
    """

    def __init__(self, n_pages: int, page_size: int, prefix_cache: bool = True) -> None:
        self.n_pages = n_pages
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self._free = list(range(n_pages - 1, -1, -1))
        self._holders = [0] * n_pages
        self._idle: OrderedDict[int, None] = OrderedDict()  # longest unused first
        self._nodes: dict[int, _Node] = {}  # of recorded pages
        self._page_of: dict[tuple[int, tuple[int, ...]], int] = {}
        self._next_number = _ROOT + 1

    @property
    def available(self) -> int:
        """Pages that ``take`` can give: free and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def idle(self) -> int:
        """Pages that nobody holds and whose contents may still be found."""
        return len(self._idle)

    def holders(self, page: int) -> int:
        """How many times a page is held."""
        return self._holders[page]

    def take(self, count: int) -> list[int] | None:
        """Gives ``count`` pages, each with one holder, or None (and none) if there are too few."""
        if count > self.available:
            return None
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._idle.popitem(last=False)
                del self._page_of[self._nodes.pop(page).key]
            self._holders[page] = 1
            pages.append(page)
        return pages

    def hold(self, pages: Sequence[int]) -> None:
        """Adds a holder to pages that are held, or that ``match`` found."""
        for page in pages:
            if not self._holders[page]:
                if page not in self._idle:
                    raise ValueError(f"PageAllocator.hold: page {page} must not be free")
                del self._idle[page]
            self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Takes a holder from each page. ``pages`` is in the order of the text.

        The last page is released first. As whoever holds a recorded page holds its parent too, an
        idle page always comes before its parent in the order in which they are given out: no page
        is lost from its index before those behind it.
        """
        for page in reversed(pages):
            if not self._holders[page]:
                raise ValueError(f"PageAllocator.release: page {page} must be held")
            self._holders[page] -= 1
            if not self._holders[page]:
                if page in self._nodes:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def match(self, tokens: Sequence[int]) -> list[int]:
        """The recorded pages of the longest known beginning of ``tokens``; they are not held."""
        pages: list[int] = []
        number, size = _ROOT, self.page_size
        for start in range(0, len(tokens) - size + 1, size):
            page = self._page_of.get((number, tuple(tokens[start : start + size])))
            if page is None:
                break
            pages.append(page)
            number = self._nodes[page].number
        return pages

    def record(self, page: int, parent: int | None, tokens: Sequence[int]) -> int:
        """Makes a held, full page known, so that ``match`` finds it.

        Args:
            page: The page.
            parent: The recorded page before it, or None for a text's first page.
            tokens: The page's tokens.

        Returns:
            The page that now stands for this text: ``page``, or the one that another request had
            recorded with the same text; then that one is held instead, and ``page`` released.
        """
        if not self.prefix_cache:
            return page
        key = (_ROOT if parent is None else self._nodes[parent].number, tuple(tokens))
        known = self._page_of.setdefault(key, page)
        if known != page:
            self.hold([known])
            self.release([page])
        elif page not in self._nodes:
            self._nodes[page] = _Node(self._next_number, key)
            self._next_number += 1
        return known
