"""Engine on the GPU: decode steps replayed as graphs equal eager ones, whatever has changed."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from astrai.extension import attn_paged_decode_workspace_size, attn_paged_prefill_workspace_size
from astrai.inference import Engine, SamplingParams
from astrai.model import LoadedModel
from tests.python.inference.tiny_engine import is_clean, poisoned
from tests.python.model import tiny

CONFIG = dataclasses.replace(tiny.CONFIG, head_dim=64, max_position=4096)
PAGE_SIZES = (1, 16, 64)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return LoadedModel(tiny.decoder(CONFIG).to("cuda", torch.bfloat16), None, None)


def texts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 96, (n,), generator=generator).tolist() for n in lengths]


def answers(engine: Engine, prompts: list[list[int]], steps, **options) -> list[list[int]]:
    """Uneven lengths, so that the batch shrinks through several padded sizes."""
    done = [
        engine.submit(prompt, max_tokens=n, stop_ids=(), **options)
        for prompt, n in zip(prompts, steps, strict=True)
    ]
    while engine.step():
        pass
    assert is_clean(engine) and all(answer.finish_reason == "length" for answer in done)
    return [answer.token_ids for answer in done]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_graph_decode_equals_eager_decode(model, page_size):
    """Case E2 as well: 7 requests run padded to 8, then 5 to 8, 3 to 4."""
    prompts, steps = texts(1, 5, 70, 9, 300, 2, 16), [20, 18, 16, 12, 24, 30, 9]
    options = {"max_batch_size": 8, "n_tokens": 2048, "page_size": page_size}
    graphs = poisoned(Engine(model, **options))
    eager = poisoned(Engine(model, cuda_graphs=False, **options))
    replayed = answers(graphs, prompts, steps)
    assert replayed == answers(eager, prompts, steps)
    for size in (8, 4, 2, 1):
        assert graphs._runner.graphs.has_graph((size, "cuda")), size
    sampling = SamplingParams(1.0, top_k=50, top_p=0.9, seed=3)
    assert answers(graphs, prompts, steps, sampling=sampling) == answers(
        eager, prompts, steps, sampling=sampling
    )


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_case_e01_a_graph_captured_at_a_short_length_is_right_at_a_long_one(model, page_size):
    options = {"max_batch_size": 2, "n_tokens": 8192, "page_size": page_size}
    graphs = poisoned(Engine(model, **options))
    # No prefix of the prompts below: tokens taken from the cache round in another order.
    answers(graphs, [[1] * 20, [2] * 8], [4, 4])
    assert graphs._runner.graphs.has_graph((2, "cuda"))
    eager = poisoned(Engine(model, cuda_graphs=False, **options))
    for lengths in ((4000, 3), (700, 2500)):
        prompts = texts(*lengths)
        assert answers(graphs, prompts, [40, 40]) == answers(eager, prompts, [40, 40])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_steps_wait_for_the_device_only_to_read_tokens(model, temperature):
    """Prompts, in chunks, as well as decode: nothing but the wait for a step's copy blocks."""
    engine = Engine(model, max_batch_size=4, n_tokens=1024, max_batch_tokens=32)
    options = {"sampling": SamplingParams(temperature, seed=1), "stop_ids": ()}
    under_way = [engine.submit(prompt, **options) for prompt in texts(9, 40, 3)]
    for _ in range(8):
        engine.step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        under_way.append(engine.submit(texts(100)[0], **options))
        for _ in range(8):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(len(answer.token_ids) >= 2 for answer in under_way)


def test_attention_has_a_workspace_that_every_call_fits(model):
    engine = Engine(model, max_batch_size=4, n_tokens=1024, max_batch_tokens=256)
    config = model.decoder.config
    heads = (config.num_heads, config.num_kv_heads, config.head_dim)
    size = engine.workspace.attention.numel()
    assert size >= attn_paged_decode_workspace_size(4, *heads) > 0
    assert size >= attn_paged_prefill_workspace_size(4, 256, *heads)


def test_run_ahead_says_the_same(model):
    prompts, steps = texts(1, 5, 70, 9, 300, 2, 16), [20, 18, 16, 12, 24, 30, 9]
    options = {"max_batch_size": 8, "n_tokens": 2048}
    ahead, behind = (poisoned(Engine(model, run_ahead=flag, **options)) for flag in (True, False))
    for sampling in (None, SamplingParams(1.0, top_k=50, top_p=0.9, seed=3)):
        replayed = answers(ahead, prompts, steps, sampling=sampling)
        assert replayed == answers(behind, prompts, steps, sampling=sampling)


@torch.no_grad()
def test_preempted_requests_lose_nothing(model):
    """Against the fp32 model: the tokens are equal, or differ first where its logits nearly tie."""
    prompts, steps = texts(30, 50, 41, 20), [30] * 4
    engine = poisoned(Engine(model, max_batch_size=4, n_tokens=128, page_size=8))
    done = answers(engine, prompts, steps)
    assert engine.stats.preemptions > 0
    exact = copy.deepcopy(model.decoder).float()
    for prompt, tokens in zip(prompts, done, strict=True):
        text = torch.tensor([prompt + tokens], device="cuda")
        logits = exact(text)[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, text[0, len(prompt) :, None])[:, 0]
        gap = (logits.amax(-1) - chosen) / logits.std(-1)
        assert gap.max().item() < 0.1


def test_one_errors_leave_graph_replays_alone(model):
    engine = Engine(model, max_batch_size=4, n_tokens=512)
    expected = answers(engine, texts(9, 9), [10, 10])
    with torch.no_grad():
        weight = model.decoder.norm.weight
        good = weight.clone()
        weight.fill_(float("nan"))
        broken = engine.generate(texts(9)[0])
        with pytest.raises(ValueError, match="logits must be finite"):
            broken.read()
        weight.copy_(good)
    assert answers(engine, texts(9, 9), [10, 10]) == expected
