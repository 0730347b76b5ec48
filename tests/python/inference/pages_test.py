"""Page allocator: holders, prefixes found again, eviction; a model of it under random use."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from astrai.inference import PageAllocator


def chain(pages: PageAllocator, tokens: list[int]) -> list[int]:
    """Takes and records the pages of a text, as a request that has computed it does."""
    held = pages.match(tokens)
    pages.hold(held)
    size = pages.page_size
    for start in range(len(held) * size, len(tokens), size):
        (page,) = pages.take(1)
        parent = held[-1] if held else None
        held.append(pages.record(page, parent, tokens[start : start + size]))
    return held


def test_pages_are_taken_all_or_none():
    pages = PageAllocator(4, 2)
    first = pages.take(3)
    assert len(set(first)) == 3 and pages.available == 1
    assert pages.take(2) is None and pages.available == 1
    assert pages.take(0) == []
    pages.release(first)
    assert sorted(pages.take(4)) == [0, 1, 2, 3]


def test_a_known_beginning_is_found_and_shared():
    pages = PageAllocator(8, 2)
    held = chain(pages, [1, 2, 3, 4])
    assert pages.match([1, 2, 3, 4, 5]) == held
    assert pages.match([1, 2, 3]) == held[:1]  # the second page is not all there
    assert pages.match([1, 2, 9, 4]) == held[:1]
    assert pages.match([3, 4]) == [], "the same tokens behind another beginning are other pages"
    pages.hold(held[:1])
    pages.release(held)
    assert pages.holders(held[0]) == 1 and pages.idle == 1
    pages.release(held[:1])
    assert pages.idle == 2 and pages.available == 8
    assert pages.match([1, 2, 3, 4]) == held


class Colliding(int):
    """Tokens that all have one hash."""

    def __hash__(self):
        return 7


def test_equal_hashes_are_told_apart():
    pages = PageAllocator(8, 2)
    texts = [[Colliding(n), Colliding(n + 1)] for n in (1, 5, 9)]
    held = [chain(pages, text)[0] for text in texts]
    assert len(set(held)) == 3
    assert [pages.match(text) for text in texts] == [[page] for page in held]


def test_the_longest_unused_is_given_out_first_and_children_before_parents():
    pages = PageAllocator(4, 1)
    old, new = chain(pages, [1, 2]), chain(pages, [8, 9])
    pages.release(old)
    pages.release(new)
    assert pages.take(1) == old[1:]
    assert pages.match([1, 2]) == old[:1]
    pages.hold(old[:1])  # used again: now the other text is the older one
    pages.release(old[:1])
    assert pages.take(2) == [new[1], new[0]]
    assert pages.match([8, 9]) == [] and pages.match([1]) == old[:1]


def test_a_text_behind_a_forgotten_page_is_not_found_behind_its_successor():
    pages = PageAllocator(2, 1)
    pages.release(chain(pages, [1, 2]))
    taken = pages.take(2)  # both are forgotten
    pages.release(taken)
    pages.release(chain(pages, [1]))
    assert len(pages.match([1, 2])) == 1


def test_a_text_computed_twice_is_kept_once():
    pages = PageAllocator(4, 2)
    first = chain(pages, [1, 2])
    (again,) = pages.take(1)
    assert pages.record(again, None, [1, 2]) == first[0]
    assert pages.holders(first[0]) == 2 and pages.holders(again) == 0 and pages.available == 3


def test_without_a_prefix_cache_nothing_is_found():
    pages = PageAllocator(4, 2, prefix_cache=False)
    held = chain(pages, [1, 2])
    pages.release(held)
    assert pages.match([1, 2]) == [] and pages.idle == 0 and pages.available == 4


def test_wrong_use_is_refused():
    pages = PageAllocator(2, 2)
    with pytest.raises(ValueError, match="page 0 must be held"):
        pages.release([0])
    with pytest.raises(ValueError, match="page 1 must not be free"):
        pages.hold([1])


class Use(RuleBasedStateMachine):
    """Requests over few distinct tokens come, grow and go; a plain model says what must hold."""

    def __init__(self):
        super().__init__()
        self.pages = PageAllocator(9, 2)
        self.requests: list[tuple[list[int], list[int]]] = []  # (pages, tokens)
        self.contents: dict[int, tuple[int, ...]] = {}  # what a page was last recorded to hold

    def record(self, pages: list[int], tokens: list[int], first: int) -> None:
        for i in range(first, len(tokens) // 2):
            parent = pages[i - 1] if i else None
            pages[i] = self.pages.record(pages[i], parent, tokens[2 * i : 2 * i + 2])
            self.contents.setdefault(pages[i], tuple(tokens[: 2 * i + 2]))

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9), record=st.booleans())
    def admit(self, tokens, record):
        found = self.pages.match(tokens)
        for i, page in enumerate(found):
            assert self.contents[page] == tuple(tokens[: 2 * i + 2]), "another text's page"
        self.pages.hold(found)
        new = self.pages.take(-(-len(tokens) // 2) - len(found))
        if new is None:
            self.pages.release(found)
            return
        for page in new:
            self.contents.pop(page, None)
        pages = found + new
        if record:
            self.record(pages, tokens, len(found))
        self.requests.append((pages, tokens))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end(self, data):
        index = data.draw(st.integers(0, len(self.requests) - 1))
        self.pages.release(self.requests.pop(index)[0])

    @invariant()
    def every_page_is_counted_once(self):
        held: dict[int, int] = {}
        for pages, _ in self.requests:
            assert len(set(pages)) == len(pages)
            for page in pages:
                held[page] = held.get(page, 0) + 1
        assert all(self.pages.holders(p) == held.get(p, 0) for p in range(9))
        assert self.pages.available == 9 - len(held)

    @invariant()
    def shared_pages_hold_one_text(self):
        texts: dict[int, tuple[int, ...]] = {}
        for pages, tokens in self.requests:
            for i, page in enumerate(pages):
                text = tuple(tokens[: 2 * i + 2])
                assert texts.setdefault(page, text) == text

    def teardown(self):
        for pages, _ in self.requests:
            self.pages.release(pages)
        assert self.pages.available == 9 and len(self.pages.take(9)) == 9


TestUse = Use.TestCase
TestUse.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
