"""Engine with many requests: answers do not depend on company, pages, chunks or preemption."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from astrai.inference import CudaGraphContext, Engine, SamplingParams
from astrai.inference.sampling import likeliest
from tests.python.inference.tiny_engine import (
    PROMPT,
    greedy,
    is_clean,
    poisoned,
    say,
    speaking_model,
)
from tests.python.model import tiny

MODEL = tiny.loaded()
STEPS = 12
PAGE_SIZES = (1, 8, 16, 64)


def texts(*lengths: int, seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 96, (n,), generator=generator).tolist() for n in lengths]


PROMPTS = texts(1, 5, 17, 9, 30, 2, 16, 33)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Each prompt's greedy answer, by the whole text anew for each token."""
    return [greedy(MODEL.decoder, prompt, STEPS) for prompt in PROMPTS]


def answers(engine: Engine, prompts: list[list[int]], **options) -> list[list[int]]:
    options = {"max_tokens": STEPS, "stop_ids": ()} | options
    done = engine.generate_batch(prompts, **options)
    assert is_clean(engine)
    assert all(answer.finish_reason == "length" for answer in done)
    return [answer.token_ids for answer in done]


@pytest.mark.parametrize("chunk", [8, 20, 2048])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_batch_says_what_each_says_alone(expected, page_size, chunk):
    options = {"max_batch_size": 8, "page_size": page_size, "max_batch_tokens": chunk}
    engine = poisoned(Engine(MODEL, n_tokens=512, **options))
    assert answers(engine, PROMPTS) == expected
    assert engine.stats.preemptions == 0
    assert engine.stats.generated_tokens == len(PROMPTS) * STEPS
    alone = poisoned(Engine(MODEL, **options))
    assert [answers(alone, [prompt])[0] for prompt in PROMPTS] == expected


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("page_size", [1, 8])
def test_preempted_requests_lose_nothing(expected, page_size, prefix_cache):
    """48 tokens of pages for eight requests that need up to 44 each."""
    engine = poisoned(
        Engine(MODEL, max_batch_size=8, n_tokens=48, page_size=page_size, prefix_cache=prefix_cache)
    )
    assert answers(engine, PROMPTS) == expected
    assert engine.stats.preemptions > 0
    assert (engine.stats.cached_tokens > 0) == prefix_cache


def test_preemption_does_not_change_random_draws():
    sampling = [SamplingParams(1.5, seed=i) for i in range(len(PROMPTS))]
    roomy = Engine(MODEL, max_batch_size=8, n_tokens=512)
    tight = Engine(MODEL, max_batch_size=8, n_tokens=48, page_size=1)
    drawn = answers(roomy, PROMPTS, sampling=sampling)
    assert answers(tight, PROMPTS, sampling=sampling) == drawn
    assert tight.stats.preemptions > 0


def test_a_seed_says_the_same_alone_and_in_a_batch():
    sampling = SamplingParams(2.0, top_k=40, top_p=0.9, seed=4)
    alone = answers(Engine(MODEL), [PROMPT], sampling=sampling)[0]
    company = [SamplingParams(1.0, seed=9), sampling, SamplingParams(), sampling]
    prompts = [PROMPTS[2], PROMPT, PROMPTS[4], PROMPT]
    batch = answers(Engine(MODEL, n_tokens=256), prompts, sampling=company)
    assert batch[1] == batch[3] == alone
    other = SamplingParams(2.0, top_k=40, top_p=0.9, seed=5)
    assert answers(Engine(MODEL), [PROMPT], sampling=other)[0] != alone
    free = answers(Engine(MODEL, n_tokens=256), [PROMPT] * 2, sampling=SamplingParams(2.0))
    assert free[0] != free[1], "without a seed each request draws its own"


@pytest.mark.parametrize("page_size", PAGE_SIZES[1:3])
def test_a_known_beginning_is_not_computed_again(page_size):
    engine = poisoned(Engine(MODEL, n_tokens=512, page_size=page_size))
    (start,) = texts(20)
    prompts = [start + tail for tail in texts(3, 9, 1, seed=2)] + [start]
    reference = [greedy(MODEL.decoder, prompt, STEPS) for prompt in prompts]
    assert answers(engine, prompts[:1]) == reference[:1]
    computed = engine.stats.prefill_tokens
    done = engine.generate_batch(prompts[1:], max_tokens=STEPS, stop_ids=())
    assert [answer.token_ids for answer in done] == reference[1:]
    known = [(min(20, len(prompt) - 1)) // page_size * page_size for prompt in prompts[1:]]
    assert [answer.cached_tokens for answer in done] == known
    assert engine.stats.cached_tokens == sum(known)
    # Whoever has one token left to compute does so in a decode step.
    left = [len(p) - n for p, n in zip(prompts[1:], known, strict=True)]
    assert engine.stats.prefill_tokens - computed == sum(n for n in left if n > 1)


def test_a_conversation_goes_on_from_its_last_answer():
    engine = Engine(MODEL, page_size=8)
    first = engine.generate(PROMPT, max_tokens=20, stop_ids=())
    first.read()
    longer = PROMPT + first.token_ids + [3, 4]
    second = engine.generate(longer, max_tokens=5, stop_ids=())
    second.read()
    assert second.cached_tokens == (len(PROMPT) + 19) // 8 * 8
    assert second.token_ids == greedy(MODEL.decoder, longer, 5)


def test_pages_of_broken_requests_are_not_shared():
    """K and V of NaN, as after a fault, must not reach the next request with the same prompt."""
    engine = Engine(tiny.loaded(), page_size=1, max_batch_tokens=16)
    (prompt,) = texts(40)
    weight = engine.model.decoder.embed_tokens.weight
    good = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
        with pytest.raises(ValueError, match="must be finite"):
            engine.generate(prompt).read()
        weight.copy_(good)
    again = engine.generate(prompt, max_tokens=3)
    again.read()
    assert again.cached_tokens == 0 and again.finish_reason != "error"


def test_one_request_s_error_leaves_the_others_alone(expected):
    engine = Engine(MODEL, n_tokens=512)
    broken = engine.submit(PROMPTS[0], max_tokens=STEPS, stop_ids=())
    others = [engine.submit(p, max_tokens=STEPS, stop_ids=()) for p in PROMPTS[1:]]
    decode = engine._runner.decode

    def faulty(requests, newest):
        logits = decode(requests, newest).logits
        for row, request in enumerate(requests):
            if request is broken._request and request.generated == 3:
                logits[row, 5] = math.nan
        return likeliest(logits)

    engine._runner.decode = faulty
    while engine.step():
        pass
    assert [next(broken) for _ in range(3)] == [""] * 3, "what was made before comes first"
    with pytest.raises(ValueError, match="logits must be finite"):
        next(broken)
    assert broken.finish_reason == "error" and broken.token_ids == expected[0][:3]
    assert [answer.token_ids for answer in others] == expected[1:]
    assert is_clean(engine)


def test_requests_that_come_and_go_do_not_disturb_each_other(expected):
    engine = poisoned(Engine(MODEL, max_batch_size=3, n_tokens=96, page_size=8))
    under_way = [engine.submit(p, max_tokens=STEPS, stop_ids=()) for p in PROMPTS[:3]]
    for _ in range(3):
        engine.step()
    under_way.pop(1).close()
    given_up = engine.submit(PROMPTS[4], max_tokens=STEPS, stop_ids=())
    under_way += [engine.submit(p, max_tokens=STEPS, stop_ids=()) for p in PROMPTS[3:4]]
    next(given_up)
    del given_up  # ends with its handle
    assert under_way[1].read() == under_way[0].read() == under_way[2].read() == ""
    assert [a.token_ids for a in under_way] == [expected[0], expected[2], expected[3]]
    assert is_clean(engine)


@pytest.mark.parametrize("moment", ["bind", "accept"])
def test_a_request_dropped_in_the_middle_of_a_step_ends_after_it(expected, moment):
    """As when the garbage collector finds its Generation in a cycle while a step runs."""
    engine = Engine(MODEL, n_tokens=256)
    stays, dropped = (engine.submit(p, max_tokens=STEPS, stop_ids=()) for p in PROMPTS[:2])
    engine.step()
    owner, name = {
        "bind": (engine._tasks, "bind"),
        "accept": (stays._request, "accept"),
    }[moment]
    method = getattr(owner, name)

    def call(*args, **kwargs):
        dropped.close()
        return method(*args, **kwargs)

    setattr(owner, name, call)
    engine.step()
    assert dropped.finish_reason == "closed" and engine.pool.free_rows == 15
    stays.read()
    assert stays.token_ids == expected[0] and is_clean(engine)


def test_more_requests_than_rows_wait():
    engine = Engine(MODEL, max_batch_size=2, n_tokens=256)
    first = engine.submit(PROMPT, max_tokens=4, stop_ids=())
    second, third = (engine.generate(PROMPT, max_tokens=4, stop_ids=()) for _ in range(2))
    third.read()  # asked for first, so it runs before the second one
    assert first.finish_reason == "length" and second.finish_reason is None
    assert second.read() == "" and second.token_ids == third.token_ids == first.token_ids


def test_a_prompt_is_let_in_only_if_one_page_is_left_for_those_that_run():
    engine = Engine(MODEL, n_tokens=40, page_size=8, prefix_cache=False)  # 5 pages
    first = engine.submit(PROMPTS[2], max_tokens=6, stop_ids=())  # 17 tokens: 3 pages
    engine.step()
    second = engine.submit(
        PROMPTS[6][:12], max_tokens=4, stop_ids=()
    )  # 2 pages: none would be left
    engine.step()
    assert len(first.token_ids) == 2 and engine.pool.free_rows == 15
    while engine.step():
        pass
    assert engine.stats.preemptions == 0
    assert second.token_ids == greedy(MODEL.decoder, PROMPTS[6][:12], 4)


def test_chunks_keep_to_the_budget_while_others_decode():
    engine = Engine(MODEL, max_batch_size=4, max_batch_tokens=8, n_tokens=256)
    sizes = []
    decode, prefill = engine._runner.decode, engine._runner.prefill

    def counted(kind, run, size):
        def call(work, *newest):
            sizes.append((kind, size(work)))
            return run(work, *newest)

        return call

    engine._runner.decode = counted("decode", decode, len)
    engine._runner.prefill = counted(
        "prefill", prefill, lambda chunks: sum(c.end - c.start for c in chunks)
    )
    short = engine.submit(PROMPT, max_tokens=6, stop_ids=())
    engine.step()
    long = engine.submit(texts(30)[0], max_tokens=2, stop_ids=())
    while engine.step():
        pass
    # 4, then one token of the short one beside 7 of the long one, while both go on
    assert sizes[:5] == [("prefill", 4), *[("decode", 1), ("prefill", 7)] * 2]
    assert sum(n for kind, n in sizes if kind == "prefill") in (33, 34)
    assert len(short.token_ids) == 6 and len(long.token_ids) == 2


def test_what_can_never_fit_is_refused_at_once():
    engine = Engine(MODEL, n_tokens=32, page_size=8)
    message = "must fit the KV cache of 32 tokens, got a prompt of 33 tokens"
    with pytest.raises(ValueError, match=message):
        engine.submit([1] * 33)
    with pytest.raises(ValueError, match="a prompt of 30 tokens and max_tokens 4"):
        engine.generate_batch([[1, 2], [1] * 30], max_tokens=4)
    assert not engine.step() and is_clean(engine)
    exact = engine.generate([1] * 30, max_tokens=3, stop_ids=())
    exact.read()
    assert len(exact.token_ids) == 3
    full = engine.generate([1] * 30, stop_ids=())
    full.read()
    assert len(full.token_ids) == 3 and full.finish_reason == "context"


@torch.no_grad()
def test_case_e02_padded_decode_steps_say_the_same(expected):
    """Decode padded to 1, 2, 4, 8 rows, as graphs need it, run eagerly."""
    engine = poisoned(Engine(MODEL, max_batch_size=8, n_tokens=512, page_size=8))
    engine._runner.graphs = CudaGraphContext(enabled=False)
    uneven = [4, 6, 8, 12, 12, 3, 9, 11]
    done = [
        engine.submit(prompt, max_tokens=n, stop_ids=())
        for prompt, n in zip(PROMPTS, uneven, strict=True)
    ]
    while engine.step():
        pass
    assert [a.token_ids for a in done] == [t[:n] for t, n in zip(expected, uneven, strict=True)]
    assert is_clean(engine)


def test_answers_stream_while_others_run():
    engine = Engine(speaking_model(), n_tokens=256)
    plan = engine.model.tokenizer.encode("ab é€")
    say(engine, [*plan, 96], [*plan[::-1], 96])
    first, second = engine.submit("a"), engine.submit("b")
    assert [next(first) for _ in range(4)] == ["a", "b", " ", "é"]
    assert second.text == "" and len(second.token_ids) == len(plan[:5]), "made but not taken yet"
    assert first.read() == "ab é€" and second.read() == engine.model.tokenizer.decode(plan[::-1])


def test_statistics_add_up():
    engine = Engine(MODEL, n_tokens=256, prefix_cache=False)
    done = engine.generate_batch(PROMPTS[:4], max_tokens=6, stop_ids=())
    stats = engine.stats
    assert stats.steps == 6 and stats.generated_tokens == 24
    # The prompt of one token is decoded, in a step that is booked as prefill.
    assert stats.prefill_tokens == sum(map(len, PROMPTS[1:4])) and stats.decode_tokens == 20
    assert stats.prefill_seconds > 0 and stats.decode_seconds > 0
    for answer in done:
        assert answer.decode_steps == 5 and answer.tokens_per_second > 0
        assert answer.decode_seconds == pytest.approx(stats.decode_seconds)
        assert answer.prefill_seconds == pytest.approx(stats.prefill_seconds)


def test_a_wrong_number_of_sampling_params_is_refused():
    with pytest.raises(ValueError, match="one for each of the 2 prompts, got 1"):
        Engine(MODEL).generate_batch([PROMPT, PROMPT], [SamplingParams()])
    assert Engine(MODEL).generate_batch([]) == []


@settings(max_examples=40, deadline=None)
@given(
    page_size=st.sampled_from([1, 2, 8, 32]),
    n_tokens=st.integers(32, 120),
    chunk=st.integers(4, 40),
    rows=st.integers(1, 4),
    run_ahead=st.booleans(),
    events=st.lists(
        st.tuples(st.integers(0, 7), st.integers(1, STEPS), st.integers(0, 3), st.booleans()),
        min_size=1,
        max_size=8,
    ),
)
def test_any_traffic_is_answered_right_and_leaves_nothing(
    expected, page_size, n_tokens, chunk, rows, run_ahead, events
):
    """Requests (prompt, tokens) come, with some steps between; some are given up on the way."""
    engine = poisoned(
        Engine(
            MODEL,
            max_batch_size=rows,
            n_tokens=n_tokens,
            page_size=page_size,
            max_batch_tokens=chunk,
            run_ahead=run_ahead,
        )
    )
    pages = engine.pool.pages
    under_way = []

    def step() -> bool:
        more = engine.step()
        held = {}
        for row in range(rows):
            for page in engine.pool.row_pages(row):
                held[page] = held.get(page, 0) + 1
        assert all(pages.holders(p) == held.get(p, 0) for p in range(pages.n_pages))
        assert pages.available == pages.n_pages - len(held)
        return more

    for which, tokens, steps, close in events:
        if len(PROMPTS[which]) + tokens - 1 > engine.pool.capacity:
            continue
        answer = engine.submit(PROMPTS[which], max_tokens=tokens, stop_ids=())
        under_way.append((answer, expected[which][:tokens]))
        for _ in range(steps):
            step()
        if close:
            answer.close()
    while step():
        pass
    for answer, tokens in under_way:
        if answer.finish_reason == "closed":
            assert answer.token_ids == tokens[: len(answer.token_ids)]
        else:
            assert answer.token_ids == tokens
    assert is_clean(engine)
