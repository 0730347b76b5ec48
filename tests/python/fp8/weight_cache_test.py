"""Casts of weights that are kept between two optimizer steps, and everything that ends them."""

import pytest
import torch
from torch.nn.functional import linear

from astrai.extension.fp8 import (
    BlockScaling,
    DelayedScaling,
    cache,
    fp8_autocast,
    fp8_weights_changed,
)
from tests.python.fp8.layers import RECIPES, mlp, names, randn

X = randn(8, 16)
ALL_RECIPES = pytest.mark.parametrize("recipe", RECIPES, ids=names)


@pytest.fixture
def made(monkeypatch):
    """How often a weight was cast although it might have come from the cache."""
    made = []
    real = cache.cast

    def cast(state, weight, key, make):
        return real(state, weight, key, lambda: made.append(key[0]) or make())

    monkeypatch.setattr(cache, "cast", cast)
    return made


def step(model, recipe, x=X, cache_weights=True):
    with fp8_autocast(recipe=recipe, cache_weights=cache_weights):
        out = model(x)
    out.float().square().mean().backward()
    return out.detach()


@ALL_RECIPES
def test_it_is_off_unless_asked_for(recipe, made):
    model = mlp(16, 8)
    for count in (1, 2, 3):
        step(model, recipe, X.clone().requires_grad_(), cache_weights=False)
        assert len(made) == 2 * count


@ALL_RECIPES
def test_case_f09_micro_batches_share_casts_until_the_optimizer_steps(recipe, made):
    model, x = mlp(16, 8), X.clone().requires_grad_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    casts = 1 if isinstance(recipe, BlockScaling) else 2
    for round_ in (1, 2):
        outs = [step(model, recipe, x) for _ in range(2)]
        assert len(made) == casts * round_
        if not isinstance(recipe, DelayedScaling):  # its x has another step each time
            with fp8_autocast(recipe=recipe):
                assert torch.equal(outs[0], outs[1]) and torch.equal(outs[1], model(X))
        made[:] = made[: casts * round_]
        optimizer.step()


def losses(recipe, make_optimizer, cache_weights):
    model = mlp(16, 32, 8, seed=3)
    optimizer = make_optimizer(model.parameters())
    out = []
    for _ in range(3):
        optimizer.zero_grad()
        # A cast that is kept has the step of the first micro-batch: delayed scaling gives the next
        # one another.
        batches = 1 if isinstance(recipe, DelayedScaling) else 2
        out += [step(model, recipe, randn(8, 16, seed=i), cache_weights) for i in range(batches)]
        optimizer.step()
    return out, [p.detach() for p in model.parameters()]


class Overwriting(torch.optim.Optimizer):
    """Steps through ``p.data``, which no version counter sees."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(p.grad, alpha=0.3)


OPTIMIZERS = {
    "single": lambda p: torch.optim.AdamW(p, lr=0.05, foreach=False, fused=False),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.05, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.05, fused=True),
    "p.data": Overwriting,
}


@ALL_RECIPES
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_is_the_same_with_and_without(recipe, optimizer):
    got = losses(recipe, OPTIMIZERS[optimizer], True)
    want = losses(recipe, OPTIMIZERS[optimizer], False)
    for a, b in zip(got[0] + got[1], want[0] + want[1], strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(got[0][0], got[0][-1])


@ALL_RECIPES
@pytest.mark.parametrize("how", ["in place", "new data", "told", "another dtype"])
def test_edits_between_steps(recipe, how):
    model = mlp(16, 8)
    step(model, recipe)
    weight = model[0].weight
    with torch.no_grad():
        if how == "in place":
            weight.mul_(-0.5)  # no more than the step of delayed scaling allows
        elif how == "new data":
            weight.data = weight.data * -0.5
        elif how == "told":
            weight.data.mul_(-0.5)
            fp8_weights_changed()
        else:
            model.half()
            weight = model[0].weight
    x = X.to(weight.dtype)
    got = step(model, recipe, x)
    plain = linear(x, weight, model[0].bias)
    assert (got - plain).norm() < 0.06 * plain.norm()


def test_an_edit_that_nobody_is_told_of_is_not_seen():
    """What fp8_weights_changed is for."""
    model = mlp(16, 8)
    first = step(model, RECIPES[0])
    model[0].weight.data.mul_(2)
    assert torch.equal(step(model, RECIPES[0]), first)
    fp8_weights_changed()
    assert not torch.equal(step(model, RECIPES[0]), first)


def test_nothing_is_read_or_kept_while_a_graph_is_captured(made, monkeypatch):
    model = mlp(16, 8)
    step(model, RECIPES[0])
    assert len(made) == 1
    monkeypatch.setattr(cache, "is_capturing", lambda: True)
    step(model, RECIPES[0])
    step(model, RECIPES[0])
    assert len(made) == 3
    monkeypatch.setattr(cache, "is_capturing", lambda: False)
    step(model, RECIPES[0])
    assert len(made) == 3


def test_a_captured_optimizer_step_ends_the_cache_for_good(made, monkeypatch):
    monkeypatch.setattr(cache, "_blocked", False)
    model = mlp(16, 8)
    step(model, RECIPES[0])
    monkeypatch.setattr(cache, "is_capturing", lambda: True)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    monkeypatch.setattr(cache, "is_capturing", lambda: False)
    made.clear()
    step(model, RECIPES[0])
    step(model, RECIPES[0])
    assert len(made) == 2


def test_weights_of_a_flat_parameter_are_not_kept(made):
    model = mlp(16, 8)
    model[0].weight._fsdp_flattened = True  # as FSDP1 marks them
    step(model, RECIPES[0])
    step(model, RECIPES[0])
    assert len(made) == 2
