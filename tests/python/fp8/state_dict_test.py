"""Saving and loading the state of delayed scaling."""

import pytest
import torch

from astrai.extension.fp8 import (
    DelayedScaling,
    DynamicScaling,
    fp8_autocast,
    fp8_load_state_dict,
    fp8_state,
    fp8_state_dict,
)
from tests.python.fp8.layers import mlp, randn

RECIPE = DelayedScaling(history_len=4, margin=1, amax="most_recent")


def train(model, steps, recipe=RECIPE, **kwargs):
    losses = []
    for step in steps:
        with fp8_autocast(recipe=recipe, **kwargs):
            loss = model(randn(8, 16, seed=step) * (1 + step)).float().square().mean()
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        model.zero_grad()
    return losses


def test_training_goes_on_where_it_stopped(tmp_path):
    model = mlp(16, 32, 8)
    train(model, range(5))
    torch.save({"model": model.state_dict(), "fp8": fp8_state_dict(model)}, tmp_path / "saved.pt")
    want = train(model, range(5, 9))

    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    resumed = mlp(16, 32, 8, seed=1)
    resumed.load_state_dict(saved["model"])
    fp8_load_state_dict(resumed, saved["fp8"])
    assert train(resumed, range(5, 9)) == want

    fresh = mlp(16, 32, 8, seed=1)
    fresh.load_state_dict(saved["model"])
    assert train(fresh, range(5, 9)) != want


def test_round_trip_of_all_recipes_and_formats():
    model = mlp(16, 8)
    recipes = [(RECIPE, "hybrid"), (DelayedScaling(), "e4m3"), (DelayedScaling(), "e5m2")]
    for recipe, fp8_format in recipes:
        train(model, range(3), recipe, fp8_format=fp8_format)
    state = fp8_state_dict(model)
    assert list(state["weights"]) == ["0.weight"]
    assert len(state["weights"]["0.weight"]) == 3
    other = mlp(16, 8)
    fp8_load_state_dict(other, state)
    for recipe, fp8_format in recipes:
        got = fp8_state().rings(other[0].weight, recipe, fp8_format)
        want = fp8_state().rings(model[0].weight, recipe, fp8_format)
        assert got["gradient"]["pending"] > 0  # of the last backward pass, not entered yet
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_loading_into_a_model_with_state_replaces_it():
    model = mlp(16, 8)
    train(model, range(2))
    state = fp8_state_dict(model)
    before = fp8_state().rings(model[0].weight, RECIPE)
    train(model, range(2, 6))
    fp8_load_state_dict(model, state)
    after = fp8_state().rings(model[0].weight, RECIPE)
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_without_state_it_is_empty():
    model = mlp(16, 8)
    train(model, range(1), DynamicScaling())
    assert fp8_state_dict(model) == {"version": 1, "weights": {}}
    fp8_load_state_dict(model, fp8_state_dict(model))


def test_errors():
    model = mlp(16, 8)
    train(model, range(1))
    state = fp8_state_dict(model)
    other = torch.nn.ModuleDict({"head": torch.nn.Linear(16, 8)})
    with pytest.raises(ValueError, match=r"every weight of state_dict, got none for 1.*0\.weight"):
        fp8_load_state_dict(other, state)
    fp8_load_state_dict(other, state, strict=False)
    with pytest.raises(ValueError, match="must have version 1, got 7"):
        fp8_load_state_dict(model, {**state, "version": 7})
