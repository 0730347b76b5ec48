"""Choice of tokens: greedy, temperature, top-k, top-p, seeds, broken logits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from astrai.inference import SamplingParams, sample


def draws(logits: torch.Tensor, params: SamplingParams, count: int) -> torch.Tensor:
    generator = params.generator()
    return torch.tensor([sample(logits, params, generator) for _ in range(count)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_largest(dtype):
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[777] = 9.0
    params = SamplingParams()
    assert sample(logits, params, params.generator()) == 777


def test_frequencies_follow_the_softmax():
    logits = torch.tensor([0.0, 1.0, 2.0, -50.0])
    count = 20000
    for temperature in (0.5, 1.0, 2.0):
        got = (
            draws(logits, SamplingParams(temperature, seed=1), count).bincount(minlength=4) / count
        )
        expected = torch.softmax(logits / temperature, 0)
        # four standard deviations of a frequency over `count` draws
        assert (
            (got - expected).abs() <= 4 * (expected * (1 - expected) / count).sqrt() + 1e-9
        ).all()


def test_a_tiny_temperature_is_greedy():
    logits = torch.tensor([1e30, 3e30, 2e30])
    for temperature in (1e-30, 1e-300):  # the second is 0 in fp32
        assert set(draws(logits, SamplingParams(temperature, seed=0), 20).tolist()) == {1}


def test_top_k_and_top_p_keep_the_likeliest():
    logits = torch.tensor([0.4, 0.1, 0.3, 0.2]).log()
    assert set(draws(logits, SamplingParams(1.0, top_k=2, seed=0), 300).tolist()) == {0, 2}
    assert set(draws(logits, SamplingParams(1.0, top_p=0.69, seed=0), 300).tolist()) == {0, 2}
    assert set(draws(logits, SamplingParams(1.0, top_p=0.75, seed=0), 300).tolist()) == {0, 2, 3}
    assert set(draws(logits, SamplingParams(1.0, top_p=1e-9, seed=0), 300).tolist()) == {0}
    # top_p counts within what top_k left: 0.4 / 0.7 and 0.3 / 0.7
    params = SamplingParams(1.0, top_k=2, top_p=0.5, seed=0)
    assert set(draws(logits, params, 300).tolist()) == {0}


def test_seeds():
    logits = torch.randn(500, generator=torch.Generator().manual_seed(2))
    one, again = (draws(logits, SamplingParams(1.0, seed=11), 50) for _ in range(2))
    assert torch.equal(one, again)
    assert not torch.equal(one, draws(logits, SamplingParams(1.0, seed=12), 50))
    free, other = (draws(logits, SamplingParams(1.0), 50) for _ in range(2))
    assert not torch.equal(free, other), "without a seed every answer is its own"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_broken_logits_are_refused(temperature, bad):
    params = SamplingParams(temperature, seed=0)
    logits = torch.zeros(10)
    logits[3] = bad
    with pytest.raises(ValueError, match="logits must be finite"):
        sample(logits, params, params.generator())
    with pytest.raises(ValueError, match="logits must be finite"):
        sample(torch.full((10,), -float("inf")), params, params.generator())
    with pytest.raises(ValueError, match=r"must be \[vocab\], got shape \(2, 5\)"):
        sample(torch.zeros(2, 5), params, params.generator())


def test_a_token_ruled_out_is_never_drawn():
    logits = torch.zeros(4)
    logits[1] = -float("inf")
    assert set(draws(logits, SamplingParams(5.0, seed=0), 400).tolist()) == {0, 2, 3}


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
    ],
)
def test_wrong_parameters_are_refused(wrong):
    with pytest.raises(ValueError, match=f"SamplingParams: {next(iter(wrong))} must be"):
        SamplingParams(**wrong)


@settings(max_examples=100, deadline=None)
@given(
    values=st.lists(st.floats(-80, 80, width=32), min_size=1, max_size=20),
    temperature=st.floats(1e-3, 100),
    top_k=st.integers(0, 25),
    top_p=st.floats(0.01, 1),
    seed=st.integers(0, 2**40),
)
def test_any_draw_is_a_token_within_the_limits(values, temperature, top_k, top_p, seed):
    logits = torch.tensor(values)
    params = SamplingParams(temperature, top_k, top_p, seed)
    token = sample(logits, params, params.generator())
    assert 0 <= token < len(values)
    if top_k:
        assert int((logits > logits[token]).sum()) < top_k
