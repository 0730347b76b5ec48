"""Steps that start before the last one's tokens are read: the same answers, and no wait between."""

from __future__ import annotations

import math

import pytest
import torch

from astrai.inference import Engine, SamplingParams
from astrai.inference.sampling import Choice, likeliest
from tests.python.inference.tiny_engine import greedy, is_clean, poisoned
from tests.python.model import tiny

MODEL = tiny.loaded()
STEPS = 12
GENERATOR = torch.Generator().manual_seed(4)
PROMPTS = [torch.randint(0, 96, (n,), generator=GENERATOR).tolist() for n in (1, 5, 17, 9, 30, 2)]


def engine(**options) -> Engine:
    options = {"n_tokens": 512, "page_size": 8, "run_ahead": True} | options
    return poisoned(Engine(MODEL, **options))


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return [greedy(MODEL.decoder, prompt, STEPS) for prompt in PROMPTS]


@pytest.fixture
def log(monkeypatch) -> list[str]:
    """What happens, in order: "start" of a decode step, "read" of a step's tokens."""
    events: list[str] = []
    read = Choice.read

    def noted(choice):
        events.append("read")
        return read(choice)

    monkeypatch.setattr(Choice, "read", noted)
    return events


def noting(engine: Engine, log: list[str]) -> Engine:
    decode = engine._runner.decode

    def noted(requests, newest):
        log.append("start")
        return decode(requests, newest)

    engine._runner.decode = noted
    return engine


@pytest.mark.parametrize("page_size", [1, 8, 64])
def test_answers_are_the_same(expected, page_size):
    ahead = engine(page_size=page_size)
    lengths = [STEPS - i for i in range(len(PROMPTS))]  # the batch shrinks on the way
    done = [
        ahead.submit(prompt, max_tokens=n, stop_ids=())
        for prompt, n in zip(PROMPTS, lengths, strict=True)
    ]
    while ahead.step():
        pass
    assert [a.token_ids for a in done] == [t[:n] for t, n in zip(expected, lengths, strict=True)]
    assert ahead.stats.generated_tokens == sum(lengths) and ahead.stats.steps == STEPS
    assert is_clean(ahead)


def test_a_step_starts_before_the_last_ones_tokens_are_read(log):
    ahead = noting(engine(), log)
    ahead.generate(PROMPTS[1], max_tokens=5, stop_ids=()).read()
    # The prompt's step gives the first token; after the fifth there is nothing to start.
    assert log == ["start", "read"] * 4 + ["read"]
    log.clear()
    behind = noting(engine(run_ahead=False), log)
    behind.generate(PROMPTS[1], max_tokens=5, stop_ids=()).read()
    assert log == ["read"] + ["start", "read"] * 4


def test_a_stop_token_is_seen_one_step_late_and_nothing_follows_it(expected, log):
    tokens = expected[2]
    stop = next(t for i, t in enumerate(tokens) if i >= 3 and t not in tokens[:i])
    ahead = noting(engine(max_batch_size=2), log)
    answer = ahead.generate(PROMPTS[2], max_tokens=STEPS, stop_ids=[stop])
    answer.read()
    assert answer.token_ids == tokens[: tokens.index(stop)] and answer.finish_reason == "stop"
    assert log.count("start") == tokens.index(stop) + 1, "one step more than was needed"
    assert is_clean(ahead)
    # The step in flight belongs to nobody; the next request does not get its tokens.
    later = ahead.generate(PROMPTS[3], max_tokens=STEPS, stop_ids=())
    later.read()
    assert later.token_ids == expected[3] and is_clean(ahead)


def test_random_choices_are_the_same():
    sampling = [SamplingParams(1.5, seed=i, logprobs=True) for i in range(len(PROMPTS))]
    options = {"max_tokens": STEPS, "stop_ids": ()}
    both = [
        engine(run_ahead=flag).generate_batch(PROMPTS, sampling, **options)
        for flag in (False, True)
    ]
    for behind, ahead in zip(*both, strict=True):
        assert behind.token_ids == ahead.token_ids
        assert behind.logprobs == pytest.approx(ahead.logprobs, abs=1e-4)


def test_requests_that_come_and_go(expected):
    ahead = engine(max_batch_size=3)
    first = [ahead.submit(p, max_tokens=STEPS, stop_ids=()) for p in PROMPTS[:2]]
    for _ in range(3):
        ahead.step()
    late = [ahead.submit(p, max_tokens=STEPS, stop_ids=()) for p in PROMPTS[2:]]
    ahead.step()
    first[1].close()  # with a token in flight
    while ahead.step():
        pass
    assert first[0].token_ids == expected[0] and first[1].token_ids == expected[1][:4]
    assert [answer.token_ids for answer in late] == expected[2:]
    assert is_clean(ahead)


def test_those_that_cannot_be_let_in_do_not_hold_the_others_up(log):
    ahead = noting(engine(max_batch_size=1), log)
    under_way = [ahead.submit(prompt, max_tokens=5, stop_ids=()) for prompt in PROMPTS[1:3]]
    for _ in range(3):
        ahead.step()
    assert [len(answer.token_ids) for answer in under_way] == [3, 0]
    # The first step does not know yet that the second request must wait.
    assert log == ["read", "start", "start", "read", "start", "read"]


def test_a_full_pool_is_left_to_the_scheduler(expected):
    tight = engine(max_batch_size=4, n_tokens=64)
    done = tight.generate_batch(PROMPTS[:4], max_tokens=STEPS, stop_ids=())
    assert [answer.token_ids for answer in done] == expected[:4]
    assert tight.stats.preemptions > 0 and is_clean(tight)


def test_broken_logits_end_their_request_alone(expected):
    ahead = engine()
    decode = ahead._runner.decode

    def faulty(requests, newest):
        logits = decode(requests, newest).logits
        for row, request in enumerate(requests):
            if request is broken._request and request.generated + request.in_flight == 3:
                logits[row] = math.nan
        return likeliest(logits)

    ahead._runner.decode = faulty
    broken = ahead.submit(PROMPTS[0], max_tokens=STEPS, stop_ids=())
    other = ahead.submit(PROMPTS[1], max_tokens=STEPS, stop_ids=())
    other.read()
    with pytest.raises(ValueError, match="logits must be finite"):
        broken.read()
    assert broken.token_ids == expected[0][:3] and other.token_ids == expected[1]
    assert is_clean(ahead)


def test_an_error_of_the_model_leaves_the_answer_to_be_continued(expected, monkeypatch):
    ahead = engine()
    answer = ahead.generate(PROMPTS[1], max_tokens=STEPS, stop_ids=())
    next(answer)
    with monkeypatch.context() as patch:
        patch.setattr(ahead._runner, "_decoder", lambda **_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            next(answer)
    answer.read()
    assert answer.token_ids == expected[1] and is_clean(ahead)
