"""Regions on a GPU: results of the CPU, no waiting for the device, CUDA graphs, checkpointing."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from astrai.extension.fp8 import DelayedScaling, DynamicScaling, fp8_autocast, fp8_state
from tests.python.fp8.layers import RECIPES, mlp, names, randn, relative

RECIPE = DelayedScaling(history_len=4)
ALL_RECIPES = pytest.mark.parametrize("recipe", RECIPES, ids=names)


def train(device, recipe, steps=4, wrap=lambda model, x: model(x), **kwargs):
    model = mlp(64, 128, 96, 32).to(device)
    losses = []
    for step in range(steps):
        model.zero_grad()
        x = (randn(48, 64, seed=step) * (1 + step)).to(device).requires_grad_()
        with fp8_autocast(recipe=recipe, **kwargs):
            loss = wrap(model, x).float().square().mean()
        loss.backward()
        losses.append(loss.detach())
    rings = [fp8_state().rings(m.weight, recipe) for m in model if hasattr(m, "weight")]
    return losses, [x.grad, *(p.grad for p in model.parameters())], rings


@ALL_RECIPES
@pytest.mark.parametrize("bf16_weight_grad", [False, True])
def test_training_equals_the_cpu(recipe, bf16_weight_grad):
    want = train("cpu", recipe, bf16_weight_grad=bf16_weight_grad)
    got = train("cuda", recipe, bf16_weight_grad=bf16_weight_grad)
    if isinstance(recipe, DelayedScaling):
        for a, b in zip(got[2], want[2], strict=True):
            for side in ("forward", "gradient"):
                assert torch.equal(a[side]["position"], b[side]["position"])
                torch.testing.assert_close(a[side], b[side], rtol=5e-2, atol=1e-7)
    for a, b in zip(got[0], want[0], strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-2, atol=0)
    for a, b in zip(got[1], want[1], strict=True):
        assert relative(a.cpu(), b) < 0.05


@ALL_RECIPES
def test_a_step_never_waits_for_the_device(recipe):
    model = mlp(64, 128, 32).cuda()
    x = randn(48, 64).cuda().requires_grad_()

    def step():
        with fp8_autocast(recipe=recipe):
            out = model(x)
        out.backward(torch.ones_like(out))

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@ALL_RECIPES
def test_a_captured_step_is_the_eager_one(recipe):
    """Forward, backward and optimizer in one graph; replays follow x and advance the state."""

    def run(captured):
        model = mlp(64, 128, 32).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        x = torch.zeros(48, 64, device="cuda", dtype=torch.bfloat16)
        loss = torch.zeros((), device="cuda")

        def step():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()
            with fp8_autocast(recipe=recipe, cache_weights=True):
                out = model(x).float().square().mean()
            out.backward()
            optimizer.step()
            loss.copy_(out.detach())

        losses = []
        graph = torch.cuda.CUDAGraph()
        for i in range(8):
            x.copy_(randn(48, 64, seed=i))
            if i < 3 or not captured:
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    step()
                torch.cuda.current_stream().wait_stream(side)
            else:
                if i == 3:
                    with torch.cuda.graph(graph):
                        step()
                graph.replay()
            losses.append(loss.item())
        state = fp8_state().rings(model[0].weight, recipe) if recipe == DelayedScaling() else None
        return losses, state

    got, want = run(True), run(False)
    assert got[0] == pytest.approx(want[0], rel=1e-2)
    if want[1] is not None:
        for side in ("forward", "gradient"):
            assert torch.equal(got[1][side]["position"], want[1][side]["position"])
            torch.testing.assert_close(got[1][side], want[1][side], rtol=5e-2, atol=1e-6)


@ALL_RECIPES
def test_replay_after_an_optimizer_step_uses_the_new_weights(recipe):
    model = mlp(64, 32).cuda()
    x = randn(48, 64).cuda()

    def forward():
        with torch.no_grad(), fp8_autocast(recipe=recipe, cache_weights=True):
            return model(x)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        forward()  # fills the cache
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = forward()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) * 0.01
    torch.optim.AdamW(model.parameters(), lr=0.05, fused=True).step()
    graph.replay()
    assert torch.equal(out, forward())


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_case_f08_checkpointing_on_the_backward_thread(use_reentrant):
    def wrap(model, x):
        return checkpoint(model, x, use_reentrant=use_reentrant)

    got, want = train("cuda", RECIPE, wrap=wrap), train("cuda", RECIPE)
    for a, b in zip(got[0] + got[1], want[0] + want[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-4)
    for a, b in zip(got[2], want[2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-9)


@ALL_RECIPES
def test_compiled(recipe):
    torch._dynamo.reset()
    want = train("cuda", recipe)
    compiled = {}

    def wrap(model, x):
        if model not in compiled:
            compiled[model] = torch.compile(model, fullgraph=True)
        return compiled[model](x)

    got = train("cuda", recipe, wrap=wrap)
    for a, b in zip(got[0], want[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=0)
    torch._dynamo.reset()


def test_memory_of_activations_is_half():
    """Of a stack of layers: what is kept between the passes."""

    def kept(enabled):
        model = mlp(*[1024] * 5).cuda()[::2]  # without ReLU, which keeps its own
        x = randn(4096, 1024).cuda().requires_grad_()
        with fp8_autocast(enabled, DynamicScaling()):
            model(x)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        with fp8_autocast(enabled, DynamicScaling()):
            out = model(x)
        size = torch.cuda.memory_allocated() - before - out.numel() * 2
        return size

    # In bf16 the layers keep their inputs: three that nobody else has. In fp8 all four at a byte.
    assert kept(True) < 0.75 * kept(False)
