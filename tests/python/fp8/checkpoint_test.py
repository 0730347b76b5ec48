"""Activation checkpointing: what is computed again has its first scales and leaves no amax."""

import threading

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch.utils.checkpoint import checkpoint

from astrai.extension.fp8 import (
    DelayedScaling,
    fp8_autocast,
    fp8_linear_enable,
    fp8_state,
)
from tests.python.fp8.layers import RECIPES, mlp, names, randn

RECIPE = DelayedScaling(history_len=4)
REENTRANT = pytest.mark.parametrize("use_reentrant", [True, False])


def run(recipe, wrap, steps=4, backward_in_region=False, micro_batches=1):
    """Trains with SGD; returns losses, the last gradients, and the rings of all weights."""
    model = mlp(16, 32, 32, 8, seed=5)
    losses = []
    for step in range(steps):
        model.zero_grad()
        for batch in range(micro_batches):
            x = (randn(8, 16, seed=10 * step + batch) * (1 + step)).requires_grad_()
            with fp8_autocast(recipe=recipe):
                loss = wrap(model, x).float().square().mean()
                if backward_in_region:
                    loss.backward()
            if not backward_in_region:
                loss.backward()
            losses.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    weights = [layer.weight for layer in model if isinstance(layer, torch.nn.Linear)]
    rings = [fp8_state().rings(w, recipe) for w in weights] if recipe == RECIPE else []
    return losses, [p.grad for p in model.parameters()], rings


def plain(model, x):
    return model(x)


def whole(use_reentrant):
    return lambda model, x: checkpoint(model, x, use_reentrant=use_reentrant)


def in_parts(use_reentrant):
    def call(model, x):
        for part in (model[:2], model[2:]):
            x = checkpoint(part, x, use_reentrant=use_reentrant)
        return x

    return call


def nested(use_reentrant):
    def inner(model, x):
        return checkpoint(model[2:], model[:2](x), use_reentrant=use_reentrant)

    return lambda model, x: checkpoint(inner, model, x, use_reentrant=use_reentrant)


def region_inside(use_reentrant):
    """The checkpointed function opens its region itself."""

    def inner(model, x):
        with fp8_autocast(recipe=RECIPE):
            return model(x)

    def call(model, x):
        with fp8_autocast(enabled=False):
            return checkpoint(inner, model, x, use_reentrant=use_reentrant)

    return call


def assert_same(got, want):
    assert got[0] == want[0]
    for a, b in zip(got[1], want[1], strict=True):
        assert torch.equal(a, b)
    for a, b in zip(got[2], want[2], strict=True):
        for side in ("forward", "gradient"):
            for name, field in b[side].items():
                assert torch.equal(a[side][name], field), (side, name)


@REENTRANT
@pytest.mark.parametrize("wrap", [whole, in_parts, nested, region_inside])
@pytest.mark.parametrize("backward_in_region", [False, True])
def test_case_f08_exactly_one_update_a_step(wrap, use_reentrant, backward_in_region):
    want = run(RECIPE, plain, backward_in_region=backward_in_region)
    got = run(RECIPE, wrap(use_reentrant), backward_in_region=backward_in_region)
    assert_same(got, want)
    assert all(r["forward"]["position"].tolist() == [0, 0] for r in got[2])  # 4 steps of 4
    assert all((r["forward"]["history"] > 0).all() for r in got[2])


@REENTRANT
def test_gradient_accumulation(use_reentrant):
    want = run(RECIPE, plain, micro_batches=3)
    assert_same(run(RECIPE, whole(use_reentrant), micro_batches=3), want)


@REENTRANT
@pytest.mark.parametrize("recipe", RECIPES, ids=names)
def test_every_recipe(recipe, use_reentrant):
    assert_same(run(recipe, in_parts(use_reentrant)), run(recipe, plain))


@REENTRANT
def test_two_forward_passes_before_their_backward_passes(use_reentrant):
    def gradients(wrap):
        model = mlp(16, 32, 8, seed=5)
        losses = []
        for step in range(3):
            x = (randn(8, 16, seed=step) * 4**step).requires_grad_()
            with fp8_autocast(recipe=RECIPE):
                losses.append(wrap(model, x).float().square().mean())
        for loss in losses:
            loss.backward()
        return [p.grad for p in model.parameters()]

    for a, b in zip(gradients(whole(use_reentrant)), gradients(plain), strict=True):
        assert torch.equal(a, b)


@REENTRANT
def test_backward_pass_on_another_thread(use_reentrant):
    def gradients(wrap):
        model = mlp(16, 32, 8, seed=5)
        x = randn(8, 16).requires_grad_()
        with fp8_autocast(recipe=RECIPE):
            loss = wrap(model, x).float().square().mean()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        return [p.grad for p in model.parameters()]

    for a, b in zip(gradients(whole(use_reentrant)), gradients(plain), strict=True):
        assert torch.equal(a, b)


class Recompute(torch.autograd.Function):
    """A checkpoint of one's own, as other libraries have them."""

    @staticmethod
    def forward(ctx, function, x):
        ctx.function = function
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.function(x)
        torch.autograd.backward(out, grad)
        return None, x.grad


def test_regions_that_are_opened_in_a_backward_pass_end_no_step():
    def histories(recompute):
        model = mlp(16, 32, 8, seed=5)

        def function(x):
            with fp8_autocast(recipe=RECIPE):
                return model(x)

        for step in range(3):
            x = (randn(8, 16, seed=step) * (1 + step)).requires_grad_()
            # The first run of a custom function is one without autograd.
            with torch.set_grad_enabled(True):
                out = function(x)
            if recompute:
                Recompute.apply(function, x).sum().backward()
            else:
                out.sum().backward()
        return fp8_state().rings(model[0].weight, RECIPE)["forward"]

    got, want = histories(True), histories(False)
    for name in ("history", "position", "pending", "nonfinite"):
        assert torch.equal(got[name], want[name]), name


@REENTRANT
def test_without_gradients_nothing_is_recorded(use_reentrant):
    model, x = mlp(16, 8), randn(4, 16)
    with torch.no_grad(), fp8_autocast(recipe=RECIPE):
        checkpoint(model, x, use_reentrant=use_reentrant)
    fields = fp8_state().rings(model[0].weight, RECIPE)["forward"]
    assert fields["position"].tolist() == [0, 0] and fields["pending"].tolist() == [0, 0]


@REENTRANT
def test_outside_of_regions_checkpointing_is_as_before(use_reentrant):
    model, x = mlp(16, 32, 8), randn(4, 16).requires_grad_()
    want = torch.autograd.grad(model(x).sum(), x)[0]
    for installed in (True, False):
        fp8_linear_enable(installed)
        x.grad = None
        checkpoint(model, x, use_reentrant=use_reentrant).sum().backward()
        assert torch.equal(x.grad, want)


def test_removal_leaves_torch_as_it_was():
    names_before = vars(torch_checkpoint.CheckpointFunction).keys() | set()
    generator = torch_checkpoint._checkpoint_without_reentrant_generator
    fp8_linear_enable(True)
    assert torch_checkpoint._checkpoint_without_reentrant_generator is not generator
    fp8_linear_enable(False)
    assert torch_checkpoint._checkpoint_without_reentrant_generator is generator
    assert vars(torch_checkpoint.CheckpointFunction).keys() == names_before


@REENTRANT
def test_an_exception_in_a_checkpointed_function(use_reentrant):
    def fails(x):
        raise ZeroDivisionError

    x = randn(4, 16).requires_grad_()
    with fp8_autocast(recipe=RECIPE), pytest.raises(ZeroDivisionError):
        checkpoint(fails, x, use_reentrant=use_reentrant)
