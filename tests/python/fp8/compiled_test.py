"""torch.compile in regions: one graph with fp8 in it, guarded by the region; state as in eager."""

import functools
import shutil
import threading

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.aot_autograd import make_boxed_func
from torch.utils.checkpoint import checkpoint

from astrai.extension.fp8 import (
    BlockScaling,
    DelayedScaling,
    DynamicScaling,
    RowwiseScaling,
    fp8_autocast,
    fp8_linear_enable,
    fp8_name_weights,
    fp8_opt_in,
    fp8_opt_out,
    fp8_prepare,
    fp8_state,
)
from tests.python.fp8.layers import RECIPES, mlp, names, randn

X = randn(8, 16)
NEEDS_COMPILER = pytest.mark.skipif(
    shutil.which("g++") is None, reason="inductor compiles C++ for the CPU"
)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model, backend="aot_eager", **kwargs):
    """(compiled model, counter of its graphs)."""
    fp8_linear_enable()
    counter = CompileCounterWithBackend(backend)
    return torch.compile(model, fullgraph=True, backend=counter, **kwargs), counter


def train(function, model, recipe, steps=3):
    """Losses, last gradients, rings."""
    fp8_state().reset(model)
    losses = []
    for step in range(steps):
        model.zero_grad()
        x = (randn(8, 16, seed=step) * (step + 1)).requires_grad_()
        with fp8_autocast(recipe=recipe):
            loss = function(x).float().square().mean()
        loss.backward()
        losses.append(loss.item())
    rings = None
    if isinstance(recipe, DelayedScaling):
        rings = [fp8_state().rings(m.weight, recipe) for m in model if hasattr(m, "weight")]
    return losses, [x.grad, *(p.grad for p in model.parameters())], rings


@pytest.mark.parametrize(
    ("recipe", "backend"),
    [(recipe, "aot_eager") for recipe in RECIPES]
    + [pytest.param(recipe, "inductor", marks=NEEDS_COMPILER) for recipe in RECIPES[:2]],
)
def test_training_equals_eager(recipe, backend):
    model = mlp(16, 32, 8)
    function, counter = compiled(model, backend)
    got, want = train(function, model, recipe), train(model, model, recipe)
    assert counter.frame_count == 1
    torch.testing.assert_close(got[0], want[0], rtol=1e-2, atol=0)
    for a, b in zip(got[1], want[1], strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=1e-3 * float(b.abs().max()))
    if want[2] is not None:
        for a, b in zip(got[2], want[2], strict=True):
            for side in ("forward", "gradient"):
                assert torch.equal(a[side]["position"], b[side]["position"])
                torch.testing.assert_close(a[side], b[side], rtol=2e-2, atol=0)


@pytest.mark.parametrize("recipe", RECIPES, ids=names)
def test_graphs_contain_the_fp8_operators(recipe):
    graphs = []

    def compiler(graph, example_inputs):
        graphs.append({str(node.target) for node in graph.graph.nodes})
        return make_boxed_func(graph.forward)

    from torch._dynamo.backends.common import aot_autograd

    model = mlp(16, 8)
    function, _ = compiled(model, aot_autograd(fw_compiler=compiler, bw_compiler=compiler))
    with fp8_autocast(recipe=recipe):
        out = function(X.clone().requires_grad_())
    out.float().sum().backward()
    kind = {RowwiseScaling: "_rowwise", BlockScaling: "_block"}.get(type(recipe), "_dual")
    assert len(graphs) == 2
    for targets in graphs:
        assert "astrai.fp8_gemm.default" in targets
        assert f"astrai.fp8_quantize{kind}.default" in targets
        assert not any("aten.mm" in name or "addmm" in name for name in targets)


@torch._dynamo.config.patch(recompile_limit=32)
def test_regions_and_recipes_are_guarded():
    model = mlp(16, 32, 8)
    fp8_name_weights(model)
    function, counter = compiled(model)
    plain = model(X)
    results = {}

    def call(**kwargs):
        with fp8_autocast(**kwargs):
            return function(X)

    for count, kwargs in enumerate(
        [
            {},
            {"fp8_format": "e5m2"},
            {"recipe": DynamicScaling(margin=1)},
            {"recipe": RowwiseScaling()},
            {"recipe": BlockScaling()},
            {"recipe": DelayedScaling()},
            {"recipe": DelayedScaling(history_len=2)},
            {"bf16_weight_grad": True},
            {"filter": lambda name, m, n, k: n > 16},
        ],
        1,
    ):
        with fp8_autocast(**kwargs):
            want = model(X)
        got = call(**kwargs)
        assert torch.equal(got, want), kwargs
        assert not torch.equal(got, plain)
        assert counter.frame_count == count
        results[count] = kwargs
    assert torch.equal(function(X), plain)
    assert torch.equal(call(enabled=False), plain)
    graphs = counter.frame_count
    assert graphs in (10, 11)  # outside, and perhaps in a region that is not enabled
    with torch._dynamo.config.patch(error_on_recompile=True):
        for kwargs in results.values():
            call(**kwargs)
        assert torch.equal(function(X), plain)
    assert counter.frame_count == graphs


def test_code_compiled_before_the_first_region_sees_it():
    model = mlp(16, 8)
    function = torch.compile(model, fullgraph=True, backend="aot_eager")
    plain = function(X)
    with fp8_autocast():
        assert torch.equal(function(X), model(X)) and not torch.equal(function(X), plain)
    fp8_linear_enable(False)
    assert torch.equal(function(X), plain)


def test_state_advances_once_a_call_and_belongs_to_the_module_that_runs():
    recipe = DelayedScaling(history_len=8)
    models = [mlp(16, 8, seed=i) for i in range(3)]

    def run(module, x):
        return module(x)

    function, _ = compiled(run)
    for step in range(3):
        for i, model in enumerate(models):
            with fp8_autocast(recipe=recipe):
                out = function(model, X * (i + 1) * (step + 1))
            out.float().sum().backward()
    for i, model in enumerate(models):
        fields = fp8_state().rings(model[0].weight, recipe)
        assert fields["forward"]["position"].tolist() == [3, 3]
        want = [(X * (i + 1) * (step + 1)).abs().max().item() for step in range(3)]
        assert fields["forward"]["history"][0, :3].tolist() == want


@pytest.mark.parametrize("recipe", RECIPES, ids=names)
def test_layers_that_are_compiled_one_by_one_share_their_code(recipe):
    layers = [mlp(16, 16, seed=i) for i in range(12)]
    if isinstance(recipe, DelayedScaling):
        fp8_prepare(torch.nn.ModuleList(layers), recipe)
    fp8_linear_enable()
    counter = CompileCounterWithBackend("aot_eager")
    functions = [torch.compile(layer, fullgraph=True, backend=counter) for layer in layers]
    for _ in range(3):
        x = X.clone().requires_grad_()
        with fp8_autocast(recipe=recipe, cache_weights=True):
            for function in functions:
                x = function(x)
        x.float().sum().backward()
    assert counter.frame_count == 1
    if isinstance(recipe, DelayedScaling):
        for layer in layers:
            fields = fp8_state().rings(layer[0].weight, recipe)
            assert fields["forward"]["position"].tolist() == [3, 3]


def test_evaluation_records_nothing():
    recipe = DelayedScaling()
    model = mlp(16, 8)
    function, _ = compiled(model)
    with torch.no_grad(), fp8_autocast(recipe=recipe):
        got = function(X)
    fields = fp8_state().rings(model[0].weight, recipe)["forward"]
    assert fields["position"].tolist() == [0, 0] and fields["pending"].tolist() == [0, 0]
    with fp8_autocast(recipe=recipe):
        assert torch.equal(model(X), got)


def test_compiled_code_follows_its_threads_region():
    model = mlp(16, 8)
    function, _ = compiled(model)
    plain = model(X)
    with fp8_autocast():
        inside = function(X)
        seen = []
        thread = threading.Thread(target=lambda: seen.append(function(X)))
        thread.start()
        thread.join()
        assert torch.equal(function(X), inside)
    assert torch.equal(seen[0], plain) and not torch.equal(inside, plain)


def test_opting_out_recompiles():
    model = mlp(16, 8)
    function, _ = compiled(model)
    with fp8_autocast():
        inside = function(X)
        fp8_opt_out(model)
        assert not torch.equal(function(X), inside)
        fp8_opt_in(model)
        assert torch.equal(function(X), inside)


def test_autocast():
    model = mlp(16, 8, dtype=torch.float32)
    function, _ = compiled(model)
    with torch.autocast("cpu", torch.bfloat16), fp8_autocast():
        got, want = function(X.float()), model(X.float())
    assert got.dtype is torch.bfloat16 and torch.equal(got, want)
    assert not torch.equal(got, model(X.float()).bfloat16())


@pytest.mark.parametrize("recipe", RECIPES, ids=names)
def test_a_weight_that_is_computed_in_the_graph(recipe):
    weight = randn(8, 16, seed=1).requires_grad_()
    function, _ = compiled(lambda x: torch.nn.functional.linear(x, weight * 2))
    with fp8_autocast(recipe=recipe):
        out = function(X)
    out.float().sum().backward()
    plain = X @ weight.t() * 2
    assert 0 < (out - plain).norm() < 0.06 * plain.norm()
    assert weight.grad is not None


@pytest.mark.parametrize("recipe", [DynamicScaling(), DelayedScaling()], ids=names)
def test_dynamic_shapes(recipe):
    model = mlp(16, 8)
    function, counter = compiled(model, dynamic=True)
    for rows in (8, 5, 3):
        x = randn(rows, 16)
        with fp8_autocast(recipe=recipe):
            torch.testing.assert_close(function(x), model(x))
    assert counter.frame_count == 1


@pytest.mark.parametrize("entered_before", [False, True])
def test_a_region_that_is_opened_in_compiled_code_breaks_its_graph_and_acts(entered_before):
    model = mlp(16, 8)

    def call(x):
        with fp8_autocast():
            return model(x) * 2

    if entered_before:
        call(X)
    function = torch.compile(call, backend="aot_eager")
    for _ in range(2):
        assert torch.equal(function(X), call(X))
    assert not torch.equal(function(X), model(X) * 2)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"fp8_autocast\.__enter__"):
        torch.compile(call, backend="aot_eager", fullgraph=True)(X)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_case_f08_checkpointing_of_compiled_code(use_reentrant):
    recipe = DelayedScaling(history_len=4)

    def run(make):
        torch._dynamo.reset()
        model = mlp(16, 32, 8)
        function = make(model)
        for step in range(3):
            model.zero_grad()
            x = (randn(8, 16, seed=step) * (1 + step)).requires_grad_()
            with fp8_autocast(recipe=recipe):
                out = function(x)
            out.float().square().sum().backward()
        return model[0].weight.grad, fp8_state().rings(model[0].weight, recipe)

    def inside(model):
        compiled_model, _ = compiled(model)
        return lambda x: checkpoint(compiled_model, x, use_reentrant=use_reentrant)

    def around(model):  # dynamo leaves such a checkpoint to eager code
        call = functools.partial(checkpoint, model, use_reentrant=use_reentrant)
        return torch.compile(lambda x: call(x), backend="aot_eager")

    want = run(lambda model: model)
    for make in (inside, around):
        grad, rings = run(make)
        torch.testing.assert_close(grad, want[0], rtol=2e-2, atol=1e-3)
        for side in ("forward", "gradient"):
            torch.testing.assert_close(rings[side], want[1][side], rtol=2e-2, atol=0)


def test_checkpointing_in_one_graph():
    model = mlp(16, 8)
    function, _ = compiled(lambda x: checkpoint(model, x, use_reentrant=False))
    with fp8_autocast():
        assert torch.equal(function(X), model(X))
    with (
        fp8_autocast(recipe=DelayedScaling()),
        pytest.raises(torch._dynamo.exc.Unsupported, match="compile the function that is"),
    ):
        function(X)
