"""Choice of tokens: greedy, temperature, top-k, top-p, batches, seeds, broken logits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from astrai.inference import SamplingParams, sample
from astrai.inference.sampling import uniform


def draws(logits: torch.Tensor, params: SamplingParams, count: int) -> torch.Tensor:
    """``count`` draws from one row, as that many rows of a batch."""
    numbers = [uniform(params.seed, i) for i in range(count)]
    results = sample(logits.expand(count, -1), [params] * count, numbers)
    return torch.tensor([result.token for result in results])


def one(logits: torch.Tensor, params: SamplingParams, number: float = 0.5):
    return sample(logits[None], [params], [number])[0]


def chi_square(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """Pearson's statistic over the tokens that can be drawn."""
    assert counts[probs == 0].sum() == 0, "a token without probability was drawn"
    expected = probs[probs > 0] * counts.sum()
    return ((counts[probs > 0] - expected) ** 2 / expected).sum().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_first_of_the_largest(dtype):
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[777] = logits[800] = 9.0
    assert one(logits, SamplingParams()).token == 777


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(0.5, 0, 1.0), (1.0, 0, 1.0), (2.0, 0, 1.0), (1.0, 5, 1.0), (1.0, 0, 0.8), (1.5, 12, 0.7)],
)
def test_frequencies_follow_the_distribution(temperature, top_k, top_p):
    """Chi-square against probabilities worked out one by one; the bound is p < 1e-6 for 19."""
    logits = torch.randn(20, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    order = sorted(range(20), key=lambda t: -logits[t])
    kept = order[: top_k or 20]
    weights = {t: math.exp(logits[t] / temperature) for t in kept}
    whole, mass, nucleus = sum(weights.values()), 0.0, []
    for t in kept:
        if mass >= top_p * whole:
            break
        nucleus.append(t)
        mass += weights[t]
    probs = torch.zeros(20, dtype=torch.float64)
    for t in nucleus:
        probs[t] = weights[t] / mass
    params = SamplingParams(temperature, top_k, top_p, seed=1)
    counts = draws(logits, params, 20000).bincount(minlength=20).double()
    assert chi_square(counts, probs) < 65.4


def test_the_chi_square_bound_tells_distributions_apart():
    probs = torch.full((20,), 0.05, dtype=torch.float64)
    counts = draws(torch.zeros(20), SamplingParams(1.0, seed=1), 20000).bincount(minlength=20)
    assert chi_square(counts.double(), probs) < 65.4
    probs[0], probs[1] = 0.06, 0.04
    assert chi_square(counts.double(), probs) > 65.4


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


def test_top_k_keeps_k_tokens_also_of_equal_ones():
    logits = torch.zeros(6)
    assert set(draws(logits, SamplingParams(1.0, top_k=2, seed=0), 300).tolist()) == {0, 1}
    many = torch.arange(5000).remainder(2).float()
    assert set(draws(many, SamplingParams(1.0, top_k=3, seed=0), 100).tolist()) == {1, 3, 5}


def test_every_token_of_a_large_vocabulary_can_be_drawn():
    """The number picks the token whose share of the distribution it falls into."""
    vocab = 50000
    for token in (0, 1, 17, 25000, vocab - 1):
        number = (token + 0.5) / vocab
        assert one(torch.zeros(vocab), SamplingParams(1.0), number).token == token
    assert one(torch.zeros(vocab), SamplingParams(1.0), 1 - 2**-48).token == vocab - 1
    tail = torch.zeros(vocab)
    tail[1:] = -math.inf
    assert one(tail, SamplingParams(1.0), 1 - 2**-48).token == 0


def test_a_row_depends_on_nothing_but_itself():
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(6, 300, generator=generator)
    params = [
        SamplingParams(),
        SamplingParams(1.0),
        SamplingParams(0.7, top_k=9),
        SamplingParams(1.3, top_p=0.5, logprobs=True),
        SamplingParams(0.0, logprobs=True),
        SamplingParams(2.0, 50, 0.9),
    ]
    numbers = [uniform(i, 0) for i in range(6)]
    together = sample(logits, params, numbers)
    for row in range(6):
        alone = sample(logits[row : row + 1], params[row : row + 1], numbers[row : row + 1])[0]
        assert alone.token == together[row].token
        assert math.isnan(alone.logprob) != params[row].logprobs


def test_logprob_is_the_models_own():
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(2))
    params = [SamplingParams(logprobs=True), SamplingParams(0.3, top_k=3, seed=1, logprobs=True)]
    for row, result in enumerate(sample(logits, params, [0.0, 0.6])):
        expected = logits[row].double().log_softmax(0)[result.token].item()
        assert result.logprob == pytest.approx(expected, abs=1e-5)


def test_random_numbers():
    numbers = torch.tensor([uniform(11, i) for i in range(20000)], dtype=torch.float64)
    assert numbers.min() >= 0 and numbers.max() < 1
    counts = torch.histc(numbers, 20, 0, 1)
    assert chi_square(counts, torch.full((20,), 0.05, dtype=torch.float64)) < 65.4
    steps = (numbers[1:] - numbers[:-1]).abs().mean().item()
    assert steps == pytest.approx(1 / 3, abs=0.01), "neighbours are not independent"
    assert uniform(11, 5) == numbers[5]
    assert len({uniform(seed, 0) for seed in (-1, 0, 1, 2, 2**63, 2**64 - 2)}) == 6
    # SplitMix64 from state 0 gives 0xE220A8397B1DCDAF, then this.
    assert uniform(0, 1) == (0x6E789E6AA1B965F4 >> 16) / 2**48


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_broken_logits_are_told_of_their_row_alone(temperature, bad):
    logits = torch.zeros(4, 10)
    logits[:, 4] = 5.0
    logits[1, 3] = bad
    logits[2] = -math.inf
    params = [SamplingParams(temperature, top_k=1, logprobs=True)] * 4
    results = sample(logits, params, [0.9] * 4)
    assert [math.isfinite(result.top) for result in results] == [True, False, False, True]
    assert results[0].token == results[3].token == 4


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match=r"must be \[1, vocab\], got shape \(2, 5\)"):
        sample(torch.zeros(2, 5), [SamplingParams()], [0.0])
    with pytest.raises(ValueError, match=r"must be \[1, vocab\], got shape \(1, 0\)"):
        sample(torch.zeros(1, 0), [SamplingParams()], [0.0])
    with pytest.raises(ValueError, match="uniforms must have 1 numbers, got 0"):
        sample(torch.zeros(1, 5), [SamplingParams()], [])


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
    number=st.integers(0, 2**48 - 1),
)
def test_any_draw_is_a_token_within_the_limits(values, temperature, top_k, top_p, number):
    logits = torch.tensor(values)
    token = one(logits, SamplingParams(temperature, top_k, top_p), number / 2**48).token
    assert 0 <= token < len(values)
    if top_k:
        larger = int((logits > logits[token]).sum()) + int((logits[:token] == logits[token]).sum())
        assert larger < top_k
