"""fp8_autocast as a region: where it acts, how it nests, and that it leaves nothing behind."""

import threading

import pytest
import torch
from torch.nn.functional import linear

from astrai.extension.fp8 import (
    DelayedScaling,
    DynamicScaling,
    FP8Format,
    RowwiseScaling,
    fp8_autocast,
    fp8_enabled,
    fp8_linear_enable,
    fp8_linear_enabled,
    fp8_name_weights,
    fp8_opt_in,
    fp8_opt_out,
    fp8_state,
)
from tests.python.fp8.layers import mlp, randn

X, W = randn(8, 32), randn(16, 32, seed=1)


def takes_fp8(x=X, w=W, bias=None):
    """Whether a layer that is called now takes fp8, by its results."""
    plain = (x.float() @ w.float().t()).to(x.dtype)
    return not torch.allclose(linear(x, w, bias).float(), plain.float(), rtol=1e-2, atol=1e-2)


def test_a_process_without_regions_has_no_override():
    assert not fp8_linear_enabled()
    assert not takes_fp8()
    with fp8_autocast():
        assert fp8_linear_enabled() and takes_fp8()
    assert fp8_linear_enabled() and not takes_fp8()
    fp8_linear_enable(False)
    assert not fp8_linear_enabled()
    with fp8_autocast(enabled=False):
        assert not fp8_linear_enabled()


def test_override_can_be_removed_in_a_region_and_comes_back_with_the_next():
    with fp8_autocast():
        fp8_linear_enable(False)
        assert not takes_fp8()
        with fp8_autocast():
            assert takes_fp8()


def test_outside_of_regions_results_and_graphs_are_torchs_own():
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    want = linear(x, w)
    with fp8_autocast():
        pass
    got = linear(x, w)
    assert torch.equal(got, want)
    assert got.grad_fn.name() == want.grad_fn.name()
    with torch.inference_mode():
        assert torch.equal(linear(X, W), want)


def test_nesting():
    assert not fp8_enabled()
    with fp8_autocast(recipe=DelayedScaling(margin=1)):
        assert fp8_enabled() and fp8_state().recipe == DelayedScaling(margin=1)
        with fp8_autocast(enabled=False):
            assert not fp8_enabled() and not takes_fp8()
            with fp8_autocast(fp8_format="e5m2"):
                assert takes_fp8() and fp8_state().fp8_format is FP8Format.E5M2
            assert not takes_fp8()
        assert takes_fp8() and fp8_state().recipe == DelayedScaling(margin=1)
    assert not fp8_state().enabled and fp8_state().recipe == DynamicScaling()


def test_decorator_and_reentry():
    region = fp8_autocast(recipe=RowwiseScaling())

    @region
    def call():
        return takes_fp8(), fp8_state().recipe

    assert call() == (True, RowwiseScaling())
    with region, region:
        assert call()[0]
    assert not fp8_enabled()


def test_an_exception_leaves_the_region():
    with pytest.raises(ZeroDivisionError), fp8_autocast():
        raise ZeroDivisionError
    assert not fp8_enabled()


def test_regions_belong_to_their_thread():
    seen = {}

    def other():
        seen["enabled"] = fp8_enabled()
        with fp8_autocast(recipe=RowwiseScaling()):
            seen["recipe"] = fp8_state().recipe
            barrier.wait()
            barrier.wait()
        seen["after"] = fp8_enabled()

    barrier = threading.Barrier(2)
    thread = threading.Thread(target=other)
    with fp8_autocast(recipe=DynamicScaling()):
        thread.start()
        barrier.wait()
        assert fp8_state().recipe == DynamicScaling()
        barrier.wait()
        thread.join()
        assert fp8_enabled()
    assert seen == {"enabled": False, "recipe": RowwiseScaling(), "after": False}


@pytest.mark.parametrize(
    ("x", "w"),
    [
        (X.float(), W.float()),
        (X[0], W),
        (X[:0], W),
        (X.bfloat16(), W[:0]),
    ],
)
def test_what_fp8_does_not_take_is_torchs_own(x, w):
    want = linear(x, w)
    with fp8_autocast():
        assert torch.equal(linear(x, w), want)


def test_what_fp8_takes():
    with fp8_autocast():
        assert takes_fp8(X.half(), W.half())
        assert linear(X.view(2, 4, 32), W).shape == (2, 4, 16)
        module = torch.nn.Linear(32, 16, dtype=torch.bfloat16)
        out = module(X)
    assert out.grad_fn.name() == "_LinearFp8Backward"
    assert out.dtype is torch.bfloat16


def test_transforms_see_torchs_own_layer():
    with fp8_autocast():
        got = torch.vmap(lambda x: linear(x, W))(X.view(2, 4, 32))
        grad = torch.func.grad(lambda w: linear(X, w).float().sum())(W)
    torch.testing.assert_close(got, linear(X.view(2, 4, 32), W))
    assert grad.shape == W.shape


def test_autocast_reaches_fp8_and_keeps_the_state_of_the_parameter():
    module = torch.nn.Linear(32, 16)
    recipe = DelayedScaling()
    for step in range(3):
        with torch.autocast("cpu", torch.bfloat16), fp8_autocast(recipe=recipe):
            out = module(X.float())
        assert out.dtype is torch.bfloat16
        out.sum().backward()
        rings = fp8_state().rings(module.weight, recipe)
        assert rings["forward"]["position"].tolist() == [step + 1] * 2
    assert module.weight.grad.dtype is torch.float32


def test_autocast_does_not_reach_the_products_of_the_definition():
    with fp8_autocast():
        want = linear(X, W)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(linear(X, W), want)


def test_filter_by_shape_and_name():
    model = mlp(32, 64, 16)
    fp8_name_weights(model)
    seen = []

    def only_wide(name, m, n, k):
        seen.append((name, m, n, k))
        return n >= 64

    with fp8_autocast(filter=only_wide):
        out = model(X)
        takes_fp8()
    assert seen == [("0.weight", 8, 64, 32), ("2.weight", 8, 16, 64), ("", 8, 16, 32)]
    assert out.grad_fn.name() != "_LinearFp8Backward"
    with fp8_autocast(filter=lambda name, m, n, k: name.startswith("2")):
        out = model(X)
    assert out.grad_fn.name() == "_LinearFp8Backward"


def test_opt_out():
    model = mlp(32, 64, 16)
    assert fp8_opt_out(model, "2.*") == ["2.weight", "2.bias"]
    with fp8_autocast():
        assert model(X).grad_fn.name() != "_LinearFp8Backward"
        assert model[0](X).grad_fn.name() == "_LinearFp8Backward"
        assert fp8_opt_in(model[2]) == ["weight", "bias"]
        assert model(X).grad_fn.name() == "_LinearFp8Backward"
        fp8_opt_out(model)
        assert model[0](X).grad_fn.name() != "_LinearFp8Backward"
    with pytest.raises(ValueError, match="patterns must match a weight, got 'head'"):
        fp8_opt_out(model, "head")


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        ({"fp8_format": "e3m4"}, ValueError, "e3m4"),
        ({"recipe": "delayed"}, TypeError, "recipe must be DynamicScaling.*got 'delayed'"),
    ],
)
def test_bad_arguments(kwargs, error, text):
    with pytest.raises(error, match=text):
        fp8_autocast(**kwargs)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: DelayedScaling(history_len=0), "history_len must be an integer of at least 1"),
        (lambda: DelayedScaling(amax="mean"), "amax must be 'max' or 'most_recent', got 'mean'"),
        (lambda: DynamicScaling(margin=1000), "margin must be a number"),
    ],
)
def test_bad_recipes(make, text):
    with pytest.raises(ValueError, match=text):
        make()
