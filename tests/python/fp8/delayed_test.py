"""Delayed scaling against a simulation on single numbers, and the rules of its state."""

import gc
import math

import pytest
import torch
from torch.nn.functional import linear

from astrai.extension.fp8 import DelayedScaling, fp8_autocast, fp8_state, rings
from tests.python.fp8.layers import E4M3, E5M2, LARGEST, held, mlp, randn, same

INF, NAN = math.inf, math.nan
RECIPE = DelayedScaling(history_len=3)


class Simulation:
    """One ring, as its documentation says."""

    def __init__(self, dtype, history_len, margin=0.0, amax="max"):
        self.largest, self.margin, self.kind = LARGEST[dtype], margin, amax
        self.history, self.position = [0.0] * history_len, 0
        self.step, self.pending, self.nonfinite = 0.0, 0.0, 0

    def published(self, amax):
        step = torch.tensor(amax, dtype=torch.float32) / self.largest / 2.0**-self.margin
        return max(step.item(), torch.tensor(1e-12).item())

    def use(self, amax):
        """Returns the step that a tensor with this amax is quantised with."""
        if self.step == 0.0 and 0.0 < amax < INF:
            self.step = self.published(amax)
        self.pending = amax if math.isnan(amax) else max(self.pending, amax)
        return self.step or 1.0

    def fold(self):
        if not math.isfinite(self.pending):
            self.nonfinite += 1
        elif self.pending > 0:
            self.history[self.position] = self.pending
            self.position = (self.position + 1) % len(self.history)
            amax = self.pending if self.kind == "most_recent" else max(self.history)
            self.step = self.published(amax)
        self.pending = 0.0

    def check(self, fields, row):
        assert fields["history"][row].tolist() == self.history
        for name in ("position", "step", "pending", "nonfinite"):
            assert fields[name][row].item() == getattr(self, name), name


@pytest.mark.parametrize(
    "recipe",
    [
        DelayedScaling(history_len=4),
        DelayedScaling(history_len=4, margin=1.5),
        DelayedScaling(history_len=1),
        DelayedScaling(history_len=4, amax="most_recent"),
    ],
)
def test_steps_follow_the_simulation(recipe):
    weight = randn(24, 16, seed=1).requires_grad_()
    options = (recipe.history_len, recipe.margin, recipe.amax)
    x_ring, w_ring, g_ring = (Simulation(kind, *options) for kind in (E4M3, E4M3, E5M2))
    for step, size in enumerate([1.0, 3.0, 0.0, 0.25, 8.0, 0.5, 0.5, 0.5, 0.5, 0.01]):
        x = (randn(8, 16, seed=step) * size).requires_grad_()
        g = randn(8, 24, seed=100 + step) * size * 1e-3
        g_ring.fold()
        with fp8_autocast(recipe=recipe):
            out = linear(x, weight)
        out.backward(g)
        steps = [
            torch.tensor(ring.use(t.abs().max().item()))
            for ring, t in ((x_ring, x), (w_ring, weight), (g_ring, g))
        ]
        x_ring.fold()
        w_ring.fold()
        x8, w8, g8 = (
            held(t, s, kind)
            for t, s, kind in zip((x, weight, g), steps, (E4M3, E4M3, E5M2), strict=True)
        )
        torch.testing.assert_close(out, (x8 @ w8.t()).bfloat16(), rtol=2**-7, atol=1e-5)
        torch.testing.assert_close(x.grad, (g8 @ w8).bfloat16(), rtol=2**-7, atol=1e-6)
        with torch.no_grad():
            weight += weight.grad * 0.5
        weight.grad = None
        contents = fp8_state().rings(weight, recipe)
        x_ring.check(contents["forward"], 0)
        w_ring.check(contents["forward"], 1)
        g_ring.check(contents["gradient"], 0)


@pytest.mark.parametrize("bad", [INF, NAN])
def test_an_amax_that_is_not_finite_is_counted_and_never_enters_a_step(bad):
    weight = randn(24, 16, seed=1)
    x = randn(8, 16)
    with fp8_autocast(recipe=RECIPE):
        linear(x, weight)
    before = fp8_state().rings(weight, RECIPE)["forward"]
    broken = x.clone()
    broken[2, 3] = bad
    for count in (1, 2):
        with fp8_autocast(recipe=RECIPE):
            out = linear(broken, weight)
        after = fp8_state().rings(weight, RECIPE)["forward"]
        assert after["nonfinite"].tolist() == [count, 0]
        for name in ("history", "position", "step"):
            assert torch.equal(after[name][0], before[name][0])
        assert torch.isfinite(out[:2]).all() and torch.isfinite(out[3:]).all()


def test_first_tensors_that_are_zero_do_not_seed():
    weight = torch.zeros(24, 16, dtype=torch.bfloat16)
    x = randn(8, 16)
    with fp8_autocast(recipe=RECIPE):
        assert linear(x, weight).eq(0).all()
    assert fp8_state().rings(weight, RECIPE)["forward"]["step"][1] == 0
    weight.copy_(randn(24, 16) * 1e-3)
    with fp8_autocast(recipe=RECIPE):
        out = linear(x, weight)
    assert out.sub(linear(x, weight)).norm() < 0.06 * linear(x, weight).norm()


def test_evaluation_reads_steps_and_leaves_no_amax():
    model, x = mlp(16, 32, 8), randn(8, 16)

    def rings_of_all():
        return [fp8_state().rings(layer.weight, RECIPE) for layer in (model[0], model[2])]

    def train():
        with fp8_autocast(recipe=RECIPE):
            model(x).float().sum().backward()

    train()
    train()
    with fp8_autocast(enabled=False):
        before = rings_of_all()
    with torch.no_grad(), fp8_autocast(recipe=RECIPE):
        first = model(x * 100)
        again = model(x * 100)
    assert torch.equal(first, again)
    after = rings_of_all()
    for a, b in zip(after, before, strict=True):
        for name, field in b["forward"].items():
            assert torch.equal(a["forward"][name], field)


def test_inference_mode_before_training_and_in_it():
    recipe = DelayedScaling(history_len=6)
    model, x = mlp(16, 32, 8), randn(8, 16)
    with torch.inference_mode(), fp8_autocast(recipe=recipe):
        want = model(x)
    with fp8_autocast(recipe=recipe, cache_weights=True):
        with torch.inference_mode():
            assert torch.equal(model(x), want)
        out = model(x)
    assert torch.equal(out, want)
    out.float().sum().backward()
    with torch.inference_mode(), fp8_autocast(recipe=recipe):
        model(x)
    assert fp8_state().rings(model[0].weight, recipe)["gradient"]["position"].tolist() == [1]


def test_one_region_is_one_step_however_often_layers_run():
    model, x = mlp(16, 32, 8), randn(8, 16)
    with fp8_autocast(recipe=RECIPE):
        for size in (1.0, 4.0, 2.0):
            with fp8_autocast(recipe=RECIPE):  # nested: part of the same step
                model(x * size).float().sum().backward()
    contents = fp8_state().rings(model[0].weight, RECIPE)
    assert contents["forward"]["position"].tolist() == [1, 1]
    assert contents["forward"]["history"][0, 0] == (x * 4.0).abs().max()
    assert contents["gradient"]["position"].item() == 0
    assert contents["gradient"]["pending"].item() > 0
    with fp8_autocast(recipe=RECIPE):
        pass
    assert fp8_state().rings(model[0].weight, RECIPE)["gradient"]["position"].item() == 1


def test_all_tensors_of_a_step_use_the_steps_of_its_beginning():
    weight, x = randn(24, 16, seed=1), randn(8, 16)
    with fp8_autocast(recipe=RECIPE):
        want = linear(x, weight)
        linear(x * 8, weight)
        assert torch.equal(linear(x, weight), want)
    with fp8_autocast(recipe=RECIPE):
        assert not torch.equal(linear(x, weight), want)


def test_a_backward_pass_that_comes_late_uses_the_steps_of_its_forward_pass():
    weight = randn(24, 16, seed=1).requires_grad_()
    x, g = randn(8, 16), randn(8, 24, seed=2)

    def forward(size=1.0):
        with fp8_autocast(recipe=RECIPE):
            return linear(x * size, weight)

    forward().backward(g)  # seeds
    (want,) = torch.autograd.grad(forward(), weight, g)
    fp8_state().reset(torch.nn.ParameterList([torch.nn.Parameter(weight)]))
    weight = weight.detach().clone().requires_grad_()
    forward().backward(g)
    late = forward()
    forward(64.0)
    forward(64.0)
    (got,) = torch.autograd.grad(late, weight, g)
    assert torch.equal(got, want)


def test_an_exception_ends_no_step():
    weight, x = randn(24, 16, seed=1), randn(8, 16)
    with pytest.raises(ZeroDivisionError), fp8_autocast(recipe=RECIPE):
        linear(x, weight)
        raise ZeroDivisionError
    fields = fp8_state().rings(weight, RECIPE)["forward"]
    assert fields["position"].tolist() == [0, 0] and (fields["pending"] > 0).all()


def test_recipes_and_formats_have_rings_of_their_own():
    weight, x = randn(24, 16, seed=1), randn(8, 16)
    other = DelayedScaling(history_len=3, margin=1)
    with fp8_autocast(recipe=RECIPE):
        linear(x, weight)
        with fp8_autocast(recipe=other):
            linear(x * 2, weight)
        with fp8_autocast(recipe=RECIPE, fp8_format="e5m2"):
            linear(x * 3, weight)
    amax = x.abs().max()
    for recipe, fp8_format, size in (
        (RECIPE, "hybrid", 1),
        (other, "hybrid", 2),
        (RECIPE, "e5m2", 3),
    ):
        fields = fp8_state().rings(weight, recipe, fp8_format)["forward"]
        assert fields["history"][0].tolist() == [float(amax * size), 0.0, 0.0]
    assert fp8_state().rings(weight, RECIPE, "e4m3") is None


def test_state_dies_with_its_weight_and_is_never_inherited():
    recipe = DelayedScaling(history_len=7)
    x = randn(8, 16)
    rows = set()
    for _ in range(4):
        weight = randn(24, 16, seed=1)
        with fp8_autocast(recipe=recipe):
            linear(x, weight)
        found = fp8_state().rings(weight, recipe)["forward"]
        assert found["position"].tolist() == [1, 1]  # not what the last one left in this row
        rows.add(weight._astrai_fp8.rings[next(iter(weight._astrai_fp8.rings))].x.index)
        del weight
        gc.collect()
    assert len(rows) == 1
    assert len(rings.tables(recipe, ("e4m3", "e5m2"))) == 1


def test_more_weights_than_a_table_holds(monkeypatch):
    monkeypatch.setattr(rings, "CAPACITY", 2)
    recipe = DelayedScaling(history_len=5)
    model, x = mlp(16, 16, 16, 16, 16, 16), randn(8, 16)
    for _ in range(2):
        with fp8_autocast(recipe=recipe):
            model(x).float().sum().backward()
    assert len(rings.tables(recipe, ("e4m3", "e5m2"))) == 3
    for layer in model[::2]:
        fields = fp8_state().rings(layer.weight, recipe)
        assert fields["forward"]["position"].tolist() == [2, 2]
        assert fields["gradient"]["position"].tolist() == [1]


def test_copies_of_a_weight_have_no_state(tmp_path):
    import copy

    model, x = mlp(16, 8), randn(4, 16)
    with fp8_autocast(recipe=RECIPE):
        model(x)
    tensor = model[0].weight.detach()
    tensor._astrai_fp8 = model[0].weight._astrai_fp8
    torch.save(model[0].weight, tmp_path / "weight.pt")
    loaded = torch.load(tmp_path / "weight.pt", weights_only=True)
    for other in (copy.deepcopy(model)[0].weight, copy.deepcopy(tensor), loaded):
        assert same(other.detach(), model[0].weight.detach())
        assert fp8_state().rings(other, RECIPE) is None
        with fp8_autocast(recipe=RECIPE):
            linear(x * 2, other)
        assert fp8_state().rings(other, RECIPE)["forward"]["history"][0, 0] == (x * 2).abs().max()


def test_reset():
    model, x = mlp(16, 8), randn(4, 16)
    with fp8_autocast(recipe=RECIPE):
        model(x)
    fp8_state().reset(model)
    assert fp8_state().rings(model[0].weight, RECIPE) is None
