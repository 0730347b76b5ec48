"""Engine on a tiny model: greedy text, stops, streaming, seeds, limits, cache rows."""

from __future__ import annotations

import re

import pytest
import torch

from astrai.inference import Engine, SamplingParams
from tests.python.inference.tiny_engine import PROMPT, greedy, is_clean, say, speaking_model
from tests.python.model import tiny


@pytest.fixture(scope="module")
def plain() -> Engine:
    return Engine(tiny.loaded())


@pytest.fixture(scope="module")
def speaking() -> Engine:
    return Engine(speaking_model())


def test_greedy_equals_the_model_without_a_cache(plain):
    expected = greedy(plain.model.decoder, PROMPT, 30)
    answer = plain.generate(PROMPT, max_tokens=30, stop_ids=())
    answer.read()
    assert answer.token_ids == expected and len(set(expected)) > 3
    assert answer.finish_reason == "length"
    assert answer.decode_steps == 29 and answer.prefill_seconds > 0
    assert answer.tokens_per_second > 0


def test_a_stop_token_ends_the_answer_and_is_not_part_of_it(plain):
    tokens = greedy(plain.model.decoder, PROMPT, 30)
    stop = next(t for i, t in enumerate(tokens) if i >= 3 and t not in tokens[:i])
    answer = plain.generate(PROMPT, max_tokens=30, stop_ids=[stop])
    answer.read()
    assert answer.token_ids == tokens[: tokens.index(stop)]
    assert answer.finish_reason == "stop"
    first = plain.generate(PROMPT, max_tokens=30, stop_ids=[tokens[0]])
    assert first.read() == "" and first.token_ids == [] and first.finish_reason == "stop"


def test_the_models_own_stop_token_is_the_default(plain):
    model = plain.model.decoder
    with torch.no_grad():
        saved = model.lm_head.weight.clone()
        model.lm_head.weight[96] = model.lm_head.weight[greedy(model, PROMPT, 1)[0]] * 1.5
        try:
            answer = plain.generate(PROMPT, max_tokens=5)
            answer.read()
        finally:
            model.lm_head.weight.copy_(saved)
    assert answer.finish_reason == "stop" and answer.token_ids == []


def test_generation_without_limit_fills_the_context_exactly(plain):
    answer = plain.generate(PROMPT, stop_ids=())
    answer.read()
    # 48 cache slots, and the last token needs none
    assert len(PROMPT) + len(answer.token_ids) == 48 + 1
    assert answer.finish_reason == "context"
    longest = plain.generate([1] * 48, max_tokens=1)
    longest.read()
    assert len(longest.token_ids) <= 1


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([1] * 49, {}, r"context of 48 tokens, got a prompt of 49 tokens; shorten"),
        ([1] * 40, {"max_tokens": 10}, "got a prompt of 40 tokens and max_tokens 10"),
        ([], {}, "at least one token, got none"),
        ([1, 97], {}, "token ids below 97, got 97"),
        ([-1], {}, "token ids below 97, got -1"),
        ([1], {"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ("text", {}, "must have a tokenizer"),
        ([1], {"stop": "x"}, "must have a tokenizer"),
        ([1], {"stop": ["x", ""]}, r"stop must be strings that are not empty, got \['x', ''\]"),
    ],
)
def test_wrong_requests_are_refused_at_once(plain, prompt, options, message):
    with pytest.raises(ValueError, match=message):
        plain.generate(prompt, **options)
    assert is_clean(plain)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([1, 1.7], {}, "prompt must be of integers, got 1.7"),
        (["1"], {}, "prompt must be of integers, got '1'"),
        ([1], {"max_tokens": 1.5}, "max_tokens must be of integers, got 1.5"),
        ([1], {"stop_ids": ["x"]}, "stop_ids must be of integers, got 'x'"),
    ],
)
def test_only_integers_are_taken_as_such(plain, prompt, options, message):
    with pytest.raises(TypeError, match=re.escape(f"Engine.generate: {message}")):
        plain.generate(prompt, **options)


def test_integers_of_other_kinds_are_taken(plain):
    ids = torch.tensor([3, 1, 2])
    expected = plain.generate([3, 1, 2], max_tokens=4)
    answer = plain.generate(list(ids), max_tokens=4)
    assert list(expected) == list(answer) and expected.token_ids == answer.token_ids


def test_engine_checks_its_context():
    with pytest.raises(ValueError, match=r"max_seq_len must be 1 to 48 .* got 49"):
        Engine(tiny.loaded(), max_seq_len=49)
    with pytest.raises(ValueError, match="max_batch_tokens must be at least max_batch_size 16"):
        Engine(tiny.loaded(), max_batch_tokens=15)
    with pytest.raises(ValueError, match="must have a chat template"):
        Engine(tiny.loaded()).chat([{"role": "user", "content": "x"}])


def test_pieces_are_whole_characters_and_nothing_is_lost(speaking):
    seen = set()
    for seed in range(25):
        sampling = SamplingParams(temperature=3.0, seed=seed)
        answer = speaking.generate("aé€ b", sampling, max_tokens=35)
        pieces = list(answer)
        assert "".join(pieces) == answer.text
        assert answer.text == speaking.model.tokenizer.decode(answer.token_ids)
        assert all(pieces), "an empty piece was given out"
        seen.update(answer.text)
    assert "a" in seen and "\ufffd" in seen, "the test must meet whole and broken characters"


def test_a_character_comes_in_one_piece(speaking):
    tokenizer = speaking.model.tokenizer
    wanted = tokenizer.encode("é€a")
    assert len(wanted) == 6
    engine = say(Engine(speaking.model), [*wanted, 96])
    answer = engine.generate("a")
    assert list(answer) == ["é", "€", "a"] and answer.finish_reason == "stop"


def test_seeded_sampling_is_reproducible(plain):
    def tokens(seed):
        sampling = SamplingParams(temperature=2.0, seed=seed)
        answer = plain.generate(PROMPT, sampling, max_tokens=20, stop_ids=())
        answer.read()
        return answer.token_ids

    assert tokens(4) == tokens(4) != tokens(5)


def test_cache_comes_back_after_end_close_drop_and_error():
    engine = Engine(tiny.loaded(), max_batch_size=1)
    under_way = engine.generate(PROMPT, max_tokens=5, stop_ids=())
    assert is_clean(engine), "nothing is taken before the first iteration"
    next(under_way)
    assert engine.pool.free_rows == 0
    under_way.close()
    assert under_way.finish_reason == "closed" and len(under_way.token_ids) == 1
    assert is_clean(engine) and list(under_way) == []
    under_way.close()
    for _ in engine.generate(PROMPT, max_tokens=5, stop_ids=()):
        break
    assert is_clean(engine), "a loop that is broken off drops its answer"
    never = engine.generate(PROMPT)
    never.close()
    assert never.finish_reason == "closed" and never.read() == ""
    with torch.no_grad():
        engine.model.decoder.norm.weight.fill_(float("nan"))
    broken = engine.generate(PROMPT)
    with pytest.raises(ValueError, match="logits must be finite, got a largest logit of nan"):
        broken.read()
    assert broken.finish_reason == "error" and list(broken) == []
    assert is_clean(engine)


def test_an_error_of_the_model_leaves_the_request_to_be_continued(plain, monkeypatch):
    answer = plain.generate(PROMPT, max_tokens=6, stop_ids=())
    next(answer)
    with monkeypatch.context() as patch:
        patch.setattr(plain._runner, "_decoder", lambda **_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            next(answer)
    answer.read()
    assert answer.token_ids == greedy(plain.model.decoder, PROMPT, 6) and is_clean(plain)


def test_rows_taken_by_hand_are_not_waited_for():
    engine = Engine(tiny.loaded(), max_batch_size=1)
    row = engine.pool.alloc_row()
    answer = engine.generate(PROMPT, max_tokens=2)
    with pytest.raises(RuntimeError, match="rows taken from the pool by hand must be given back"):
        next(answer)
    engine.pool.free_row(row)
    answer.read()
    assert len(answer.token_ids) == 2


def test_logprobs_are_those_of_the_chosen_tokens(plain):
    sampling = SamplingParams(1.0, seed=3, logprobs=True)
    answer = plain.generate(PROMPT, sampling, max_tokens=8, stop_ids=())
    assert answer.logprobs == []
    answer.read()
    text = torch.tensor([PROMPT + answer.token_ids])
    with torch.no_grad():
        logits = plain.model.decoder(text)[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    expected = [row[token].item() for row, token in zip(logits, answer.token_ids, strict=True)]
    assert answer.logprobs == pytest.approx(expected, abs=1e-4)
    assert plain.generate(PROMPT).logprobs is None


def test_chat_uses_the_template(speaking):
    messages = [{"role": "user", "content": "ab"}, {"role": "user", "content": "é"}]
    answer = speaking.chat(messages, max_tokens=3)
    assert answer.prompt_ids == speaking.model.tokenizer.encode("ab\né\n")
    assert answer.read() == speaking.generate("ab\né\n", max_tokens=3).read()
