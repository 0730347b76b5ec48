"""Stop strings: across tokens and characters, held back until decided, first of several."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astrai.inference import Engine
from astrai.inference.request import StopStrings
from astrai.model import LoadedModel
from tests.python.inference.tiny_engine import STOP, is_clean, say, speaking_model


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return speaking_model()


def answer(model: LoadedModel, text: str, stop, *, end: bool = True, **options):
    """What comes out if the model says ``text``, a byte at a time: pieces, and the answer."""
    plan = model.tokenizer.encode(text)
    engine = say(Engine(model), [*plan, STOP] if end else plan)
    generation = engine.generate("a", stop=stop, **options)
    pieces = list(generation)
    assert is_clean(engine)
    assert "".join(pieces) == generation.text and all(pieces)
    return pieces, generation


def test_a_stop_string_ends_the_text_before_it(model):
    pieces, generation = answer(model, "ba ab é", " ab")
    assert pieces == ["b", "a"] and generation.finish_reason == "stop"
    assert generation.token_ids == model.tokenizer.encode("ba ab")


def test_text_is_held_back_only_while_it_may_be_a_stop_string(model):
    pieces, generation = answer(model, "ab ba b", "ab\n")
    assert pieces == ["ab ", "b", "a ", "b"]
    assert generation.finish_reason == "stop"


def test_what_is_held_back_at_the_end_is_given_out(model):
    for options, reason in (({}, "stop"), ({"max_tokens": 4, "end": False}, "length")):
        pieces, generation = answer(model, "b ab", "ab\n", **options)
        assert pieces == ["b", " ", "ab"] and generation.finish_reason == reason


def test_a_stop_string_of_longer_characters(model):
    pieces, _ = answer(model, "a€é€b", "é€")
    assert pieces == ["a", "€"]


def test_the_first_of_several_to_be_complete_counts(model):
    assert answer(model, "a ba b", ["b", " ba"])[0] == ["a", " "]
    assert answer(model, "aabb", ["ab", "aabb"])[0] == ["a"]


def test_a_broken_character_at_the_end_can_complete_a_stop_string(model):
    plan = [*model.tokenizer.encode("b"), model.tokenizer.encode("é")[0], STOP]
    engine = say(Engine(model), plan)
    generation = engine.generate("a", stop="\ufffd")
    assert generation.read() == "b" and generation.finish_reason == "stop"


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=12),
    strings=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
)
def test_pieces_are_what_stands_before_the_first_stop_string(pieces, strings):
    """The string that is complete first ends the text; of those complete at once, the earliest."""
    stops, shown, stopped = StopStrings(strings), "", False
    text = ""
    for piece in pieces:
        text += piece
        new, stopped = stops.put(piece)
        shown += new
        found = [text.find(s) for s in strings if s in text]
        if found:
            assert stopped and shown == text[: min(found)]
            break
        assert not stopped
        held = text[len(shown) :]
        assert text == shown + held and (not held or any(s.startswith(held) for s in strings))
    if not stopped:
        assert shown + stops.end() == text
