"""Engine on a tiny model: greedy text, stops, streaming, seeds, limits, cache rows."""

from __future__ import annotations

import re

import pytest
import torch
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers

from astrai.inference import Engine, SamplingParams
from astrai.model import ChatTemplate, LoadedModel, Tokenizer
from tests.python.model import tiny

PROMPT = [5, 17, 80, 2]


def byte_tokenizer() -> Tokenizer:
    """97 tokens: bytes that make two- and three-byte characters likely, and a stop token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    chosen = [pre_tokenizers.ByteLevel(False, False).pre_tokenize_str(c)[0][0] for c in "ab é€\n"]
    first = list(dict.fromkeys("".join(chosen)))
    tokens = first + [c for c in alphabet if c not in first][: 96 - len(first)]
    vocab = {token: i for i, token in enumerate(tokens)} | {"<stop>": 96}
    rust = RustTokenizer(models.BPE(vocab=vocab, merges=[]))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens(["<stop>"])
    return Tokenizer(rust, special_tokens={"eos_token": "<stop>"})


@torch.no_grad()
def greedy(model, prompt: list[int], steps: int) -> list[int]:
    """The same without any cache: the whole text again for each token."""
    text = list(prompt)
    for _ in range(steps):
        text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
    return text[len(prompt) :]


@pytest.fixture(scope="module")
def plain() -> Engine:
    return Engine(tiny.loaded())


@pytest.fixture(scope="module")
def speaking() -> Engine:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    return Engine(LoadedModel(tiny.decoder(), byte_tokenizer(), template))


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
    ],
)
def test_wrong_requests_are_refused_at_once(plain, prompt, options, message):
    with pytest.raises(ValueError, match=message):
        plain.generate(prompt, **options)
    assert plain.pool.free_rows == 1


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
    plan = iter([*wanted, 96])

    def step(row, ids, position):
        logits = torch.zeros(97)
        logits[next(plan)] = 1.0
        return logits

    engine = Engine(speaking.model)
    engine._step = step
    answer = engine.generate("a")
    assert list(answer) == ["é", "€", "a"] and answer.finish_reason == "stop"


def test_seeded_sampling_is_reproducible(plain):
    def tokens(seed):
        sampling = SamplingParams(temperature=2.0, seed=seed)
        answer = plain.generate(PROMPT, sampling, max_tokens=20, stop_ids=())
        answer.read()
        return answer.token_ids

    assert tokens(4) == tokens(4) != tokens(5)


def test_requests_under_way_do_not_disturb_each_other():
    engine = Engine(LoadedModel(tiny.decoder(), None, None), max_batch_size=2)
    prompts = [PROMPT, [60, 61, 62, 63, 64, 65]]
    expected = [greedy(engine.model.decoder, prompt, 12) for prompt in prompts]
    a, b = (engine.generate(prompt, max_tokens=12, stop_ids=()) for prompt in prompts)
    for _ in range(12):
        next(a), next(b)
    assert [a.token_ids, b.token_ids] == expected


def test_rows_come_back_after_end_close_and_error():
    engine = Engine(tiny.loaded())
    under_way = engine.generate(PROMPT, max_tokens=5, stop_ids=())
    next(under_way)
    with pytest.raises(RuntimeError, match="all 1 rows are in use"):
        engine.generate(PROMPT).read()
    under_way.close()
    assert under_way.finish_reason == "closed" and len(under_way.token_ids) == 1
    assert engine.pool.free_rows == 1
    under_way.close()
    with torch.no_grad():
        engine.model.decoder.norm.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="logits must be finite"):
        engine.generate(PROMPT).read()
    assert engine.pool.free_rows == 1


def test_chat_uses_the_template(speaking):
    messages = [{"role": "user", "content": "ab"}, {"role": "user", "content": "é"}]
    answer = speaking.chat(messages, max_tokens=3)
    assert answer.prompt_ids == speaking.model.tokenizer.encode("ab\né\n")
    assert answer.read() == speaking.generate("ab\né\n", max_tokens=3).read()
