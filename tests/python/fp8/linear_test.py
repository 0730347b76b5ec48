"""The fp8 layer against its definition written out in plain torch."""

import pytest
import torch
from torch.nn.functional import linear

from astrai.extension.fp8 import (
    BlockScaling,
    DelayedScaling,
    DynamicScaling,
    RowwiseScaling,
    fp8_autocast,
    fp8_linear_forward,
    schemes,
)
from tests.python.fp8.layers import (
    E4M3,
    E5M2,
    LARGEST,
    RECIPES,
    held,
    names,
    randn,
    relative,
    step_of,
)

DTYPES = {"hybrid": (E4M3, E5M2), "e4m3": (E4M3, E4M3), "e5m2": (E5M2, E5M2)}


def trained(x, w, bias, g, **kwargs):
    """(out, grad_x, grad_w, grad_bias) of a layer in a region."""
    inputs = [t.detach().clone().requires_grad_() for t in (x, w, bias)]
    with fp8_autocast(**kwargs):
        out = linear(*inputs)
    out.backward(g)
    return out.detach(), *(t.grad for t in inputs)


def layer(m=(6, 5), k=48, n=32, dtype=torch.bfloat16):
    x, w = randn(*m, k, dtype=dtype), randn(n, k, seed=1, dtype=dtype) * 0.1
    g = randn(*m, n, seed=2, dtype=dtype) * 1e-3
    return x, w, randn(n, seed=3, dtype=dtype), g


def close(got, want, dtype):
    """Within one rounding to dtype, and of float32 sums."""
    rtol, denormal = {torch.bfloat16: (2**-8, 0.0), torch.float16: (2**-11, 2**-24)}[dtype]
    atol = 1e-5 * float(want.abs().max()) + denormal
    torch.testing.assert_close(got.double(), want.double(), rtol=rtol, atol=atol)


@pytest.mark.parametrize("recipe", [DynamicScaling(), DynamicScaling(margin=2), DelayedScaling()])
@pytest.mark.parametrize("fp8_format", DTYPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_step_for_each_tensor(recipe, fp8_format, dtype):
    x, w, bias, g = layer(dtype=dtype)
    forward, backward = DTYPES[fp8_format]
    x2, g2 = x.flatten(0, 1), g.flatten(0, 1)
    x8, w8, g8 = (
        held(t, step_of(t, kind, recipe.margin), kind)
        for t, kind in ((x2, forward), (w, forward), (g2, backward))
    )
    got = trained(x, w, bias, g, recipe=recipe, fp8_format=fp8_format)
    want = (x8 @ w8.t() + bias.float(), g8 @ w8, g8.t() @ x8, g2.float().sum(0))
    for a, b, like in zip(got, want, (g, x, w, bias), strict=True):
        assert a.dtype is dtype and a.shape == like.shape
        close(a, b.view(like.shape), dtype)


def test_a_larger_margin_leaves_more_headroom():
    x, w, _, _ = layer()
    steps = [
        fp8_linear_forward(x, w, recipe=DynamicScaling(margin=margin))[1].item()
        for margin in (-1, 0, 1)
    ]
    assert steps[0] * 2 == steps[1] and steps[1] * 2 == steps[2]


def rowwise_held(t, kind):
    step = (t.abs().amax(1, keepdim=True).float() / LARGEST[kind]).clamp_min(1e-12)
    return held(t, step, kind)


def block_held(t, kind, block):
    out = torch.empty(t.shape)
    for i in range(0, t.shape[0], block[0]):
        for j in range(0, t.shape[1], block[1]):
            part = (slice(i, i + block[0]), slice(j, j + block[1]))
            out[part] = held(t[part], step_of(t[part], kind), kind)
    return out


@pytest.mark.parametrize("fp8_format", DTYPES)
def test_rowwise(fp8_format):
    x, w, bias, g = layer()
    forward, backward = DTYPES[fp8_format]
    x2, g2 = x.flatten(0, 1), g.flatten(0, 1)
    got = trained(x, w, bias, g, recipe=RowwiseScaling(), fp8_format=fp8_format)
    want = (
        rowwise_held(x2, forward) @ rowwise_held(w, forward).t() + bias.float(),
        rowwise_held(g2, backward) @ rowwise_held(w.t(), forward).t(),
        rowwise_held(g2.t(), backward) @ rowwise_held(x2.t(), forward).t(),
        g2.float().sum(0),
    )
    for a, b, like in zip(got, want, (g, x, w, bias), strict=True):
        close(a, b.view(like.shape), torch.bfloat16)


def test_blocks():
    x, w, bias, g = layer(m=(2, 70), k=200, n=150)
    x2, g2 = x.flatten(0, 1), g.flatten(0, 1)
    got = trained(x, w, bias, g, recipe=BlockScaling())
    w8 = block_held(w, E4M3, (128, 128))
    want = (
        block_held(x2, E4M3, (1, 128)) @ w8.t() + bias.float(),
        block_held(g2, E5M2, (1, 128)) @ w8,
        block_held(g2.t(), E5M2, (1, 128)) @ block_held(x2.t(), E4M3, (1, 128)).t(),
        g2.float().sum(0),
    )
    for a, b, like in zip(got, want, (g, x, w, bias), strict=True):
        close(a, b.view(like.shape), torch.bfloat16)


@pytest.mark.parametrize("recipe", RECIPES, ids=names)
def test_bf16_weight_gradient(recipe):
    x, w, bias, g = layer()
    exact = g.flatten(0, 1).t() @ x.flatten(0, 1)
    plain = trained(x, w, bias, g, recipe=recipe)
    kept = trained(x, w, bias, g, recipe=recipe, bf16_weight_grad=True)
    assert torch.equal(kept[2], exact) and not torch.equal(plain[2], exact)
    for a, b in zip((*plain[:2], plain[3]), (*kept[:2], kept[3]), strict=True):
        assert torch.equal(a, b)


class Products:
    """Notes the products that a layer asks for."""

    def __init__(self, monkeypatch):
        self.calls = []
        real = schemes.ops.mm_fp8

        def mm_fp8(a, b, *args, **kwargs):
            self.calls.append((a, b, kwargs))
            return real(a, b, *args, **kwargs)

        monkeypatch.setattr(schemes.ops, "mm_fp8", mm_fp8)


@pytest.mark.parametrize("recipe", RECIPES, ids=names)
@pytest.mark.parametrize("needs", [(True, False), (False, True), (True, True), (False, False)])
def test_only_gradients_that_are_asked_for_are_computed(recipe, needs, monkeypatch):
    products = Products(monkeypatch)
    x, w, bias, g = layer()
    x.requires_grad_(needs[0])
    w.requires_grad_(needs[1])
    bias.requires_grad_()
    with fp8_autocast(recipe=recipe):
        out = linear(x, w, bias)
    out.backward(g)
    assert len(products.calls) == 1 + sum(needs)
    assert [t.grad is not None for t in (x, w, bias)] == [*needs, True]


@pytest.mark.parametrize("recipe", RECIPES, ids=names)
def test_fast_accumulation_is_for_the_forward_pass(recipe, monkeypatch):
    products = Products(monkeypatch)
    trained(*layer(), recipe=recipe)
    assert [kwargs["fast_accum"] for _, _, kwargs in products.calls] == [True, False, False]
    kinds = [(a.dtype, b.dtype) for a, b, _ in products.calls]
    assert kinds == [(E4M3, E4M3), (E5M2, E4M3), (E5M2, E4M3)]


@pytest.mark.parametrize("recipe", RECIPES, ids=names)
def test_without_autograd_the_result_is_the_same(recipe):
    x, w, bias, g = layer()
    want = trained(x, w, bias, g, recipe=recipe)[0]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), fp8_autocast(recipe=recipe):
            got = linear(x, w, bias)
        assert torch.equal(got, want) and not got.requires_grad


@pytest.mark.parametrize("recipe", RECIPES, ids=names)
def test_activations_are_saved_in_8_bits_where_that_is_possible(recipe):
    x, w, _, _ = layer()
    saved = []
    w.requires_grad_()
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with fp8_autocast(recipe=recipe), hooks:
        linear(x, w)
    sizes = [t.numel() * t.element_size() for t in saved if t.numel() >= x.numel()]
    one_step = isinstance(recipe, (DynamicScaling, DelayedScaling))
    assert sizes == [x.numel() * (1 if one_step else 2)]


def test_double_backward_is_an_error():
    x, w, _, _ = layer()
    x.requires_grad_()
    with fp8_autocast():
        out = linear(x, w)
    (grad,) = torch.autograd.grad(out.float().square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.float().sum().backward()


@pytest.mark.parametrize("recipe", RECIPES, ids=names)
@pytest.mark.parametrize("value", [0.0, 1e-40, float("inf"), float("nan")])
def test_case_f02_strange_values_leave_other_rows_alone(recipe, value):
    x, w, bias, g = layer(m=(4, 4))
    x[0, 0, 0] = value
    out, grad_x, grad_w, _ = trained(x, w, bias, g, recipe=recipe)
    assert torch.isfinite(out[1:]).all() and torch.isfinite(grad_x).all()
    plain = linear(x[1:], w, bias)
    assert relative(out[1:], plain) < 0.06
    if value == value:  # an infinity saturates
        assert torch.isfinite(out).all() and torch.isfinite(grad_w).all()


def test_forward_alone_returns_its_steps():
    x, w, bias, _ = layer()
    out, step_x, step_w = fp8_linear_forward(x, w, bias)
    assert torch.equal(step_x, step_of(x, E4M3)[None])
    assert torch.equal(step_w, step_of(w, E4M3)[None])
    with fp8_autocast():
        assert torch.equal(out, linear(x, w, bias))
    codes = (w.float() / step_w).to(E4M3)
    out8, _, one = fp8_linear_forward(x, codes)
    assert one.item() == 1.0
    # Two roundings: of the codes' product, and of the other side.
    want = fp8_linear_forward(x, w)[0].double()
    torch.testing.assert_close((out8 * step_w).double(), want, rtol=2**-7, atol=1e-5)
    with pytest.raises(TypeError, match="fp8_linear_forward: x and w must be"):
        fp8_linear_forward(x.float(), w.float())
