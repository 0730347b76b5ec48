"""Quantisation on the CPU: every code, every 16-bit input, steps, rings, layouts, errors."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from astrai.extension.errors import DtypeError, ShapeError
from astrai.extension.ops.fp8 import (
    dynamic_step,
    quantize,
    quantize_block,
    quantize_dual,
    quantize_rowwise,
)
from tests.python.ops.fp8_codes import DTYPES, LARGEST, assert_same_codes, nearest, value

FORMATS = ("e4m3", "e5m2")
ONE = torch.ones(1)
INF, NAN = math.inf, math.nan


def scalar(x):
    return torch.tensor([x], dtype=torch.float32)


def randn(*shape, dtype=torch.bfloat16, seed=0, spread=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * spread).to(dtype)


@pytest.mark.parametrize("fmt", FORMATS)
def test_case_f01_all_256_codes_round_trip(fmt):
    values = [value(code, fmt) for code in range(256)]
    x = torch.tensor(values, dtype=torch.float32)
    codes = torch.arange(256, dtype=torch.uint8).view(DTYPES[fmt])
    torch.testing.assert_close(codes.float(), x, rtol=0, atol=0, equal_nan=True)
    x8, _ = quantize(x, ONE, fmt)
    finite = torch.isfinite(x)
    assert torch.equal(x8.view(torch.uint8)[finite], codes.view(torch.uint8)[finite])
    assert torch.isnan(x8.float())[torch.isnan(x)].all()
    infinite = torch.isinf(x)
    assert torch.equal(x8.float()[infinite], torch.sign(x[infinite]) * LARGEST[fmt])


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 0.37, 3e4])
def test_every_16_bit_input_rounds_to_the_nearest_code(fmt, dtype, scale):
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    x8, amax = quantize(x, scalar(scale), fmt)
    product = (x.float() * scalar(scale)).double()  # one rounding to float32
    assert_same_codes(x8, nearest(product, fmt))
    assert torch.isnan(amax).item()  # the inputs hold NaN


@pytest.mark.parametrize("fmt", FORMATS)
def test_float32_between_codes(fmt):
    values = torch.tensor([value(code, fmt) for code in range(128)], dtype=torch.float64)
    values = values[torch.isfinite(values)]
    middle = ((values[1:] + values[:-1]) / 2).float()
    around = torch.cat(
        [middle, torch.nextafter(middle, scalar(0.0)), torch.nextafter(middle, scalar(INF))]
    )
    for x in (around, -around):
        assert_same_codes(quantize(x, ONE, fmt)[0], nearest(x.double(), fmt))


@pytest.mark.parametrize(
    ("x", "fmt", "want"),
    [
        (448.0, "e4m3", 448.0),
        (464.0, "e4m3", 448.0),
        (465.0, "e4m3", 448.0),
        (1e4, "e4m3", 448.0),
        (INF, "e4m3", 448.0),
        (-INF, "e4m3", -448.0),
        (57344.0, "e5m2", 57344.0),
        (61440.0, "e5m2", 57344.0),
        (1e6, "e5m2", 57344.0),
        (INF, "e5m2", 57344.0),
        (-INF, "e5m2", -57344.0),
        (NAN, "e4m3", NAN),
        (NAN, "e5m2", NAN),
        (2.0**-9, "e4m3", 2.0**-9),
        (2.0**-10, "e4m3", 0.0),
        (1.5 * 2.0**-9, "e4m3", 2.0**-8),
        (2.0**-16, "e5m2", 2.0**-16),
        (2.0**-17, "e5m2", 0.0),
        (-0.0, "e4m3", -0.0),
    ],
)
def test_case_f01_boundaries(x, fmt, want):
    got = quantize(scalar(x), ONE, fmt)[0].float()
    torch.testing.assert_close(got, scalar(want), rtol=0, atol=0, equal_nan=True)
    if want == 0:
        assert torch.signbit(got).item() == (math.copysign(1.0, x) < 0)


@pytest.mark.parametrize("amax", [0.0, 1e-45, 1e-38, 1e-40, 3.0, INF, NAN])
@pytest.mark.parametrize("fmt", FORMATS)
def test_case_f02_steps_are_finite(amax, fmt):
    x = torch.tensor([[0.0, amax], [-amax, 0.0]])
    finite = amax if math.isfinite(amax) else 0.0
    want = max(torch.tensor(finite).item() / LARGEST[fmt], 1e-12)
    for step in (
        dynamic_step(x, fmt),
        quantize_rowwise(x, fmt)[1],
        quantize_block(x, (1, 128), fmt)[1],
        quantize_block(x, (128, 128), fmt)[1],
    ):
        assert torch.isfinite(step).all() and torch.isfinite(step.reciprocal()).all()
        torch.testing.assert_close(step, torch.full_like(step, want), rtol=1e-6, atol=0)


def test_amax_is_of_the_raw_input_and_nan_wins():
    x = torch.tensor([1.0, -7.0, 3.0])
    assert quantize(x, scalar(0.01))[1].item() == 7.0
    assert quantize(torch.tensor([1.0, -INF]), ONE)[1].item() == INF
    assert math.isnan(quantize(torch.tensor([INF, NAN]), ONE)[1].item())
    assert quantize(torch.empty(0), ONE)[1].item() == 0.0


def test_dynamic_step_takes_the_largest_finite_value():
    x = torch.tensor([1.0, -8.0, INF, NAN])
    assert dynamic_step(x).item() == torch.tensor(8.0 / 448.0).item()
    assert dynamic_step(x, pow2_margin=0.25).item() == torch.tensor(32.0 / 448.0).item()


def test_amax_goes_to_a_slot():
    slot = scalar(5.0)
    assert quantize(torch.tensor([2.0]), ONE, amax_out=slot)[1] is slot
    assert slot.item() == 5.0
    quantize_dual(torch.tensor([[-9.0]]), ONE, amax_out=slot)
    assert slot.item() == 9.0
    quantize(torch.tensor([NAN]), ONE, amax_out=slot)
    quantize(torch.tensor([10.0]), ONE, amax_out=slot)
    assert math.isnan(slot.item())


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape", [(5, 7), (1, 9), (64, 48), (2, 3, 8), (3, 0), (0, 4)])
def test_layouts_have_the_same_bytes(fmt, shape):
    x = randn(*shape)
    scale = scalar(37.0)
    x8, amax = quantize(x, scale, fmt)
    x8_t, amax_t = quantize(x, scale, fmt, transposed=True)
    both, both_t, amax_both = quantize_dual(x, scale, fmt)
    rows = math.prod(shape[:-1])
    assert x8.shape == x.shape and x8_t.shape == (shape[-1], rows)
    assert x8_t.is_contiguous() and x8.dtype is x8_t.dtype is DTYPES[fmt]
    codes = x8.view(torch.uint8)
    assert torch.equal(codes.reshape(rows, shape[-1]).t(), x8_t.view(torch.uint8))
    assert torch.equal(both.view(torch.uint8), codes)
    assert torch.equal(both_t.view(torch.uint8), x8_t.view(torch.uint8))
    assert torch.equal(amax, amax_t) and torch.equal(amax, amax_both)


def test_views_need_no_contiguous_input():
    x = randn(6, 10)
    for view in (x.t(), x[:, ::2], x[1:, 3:], x.expand(3, 6, 10)):
        got, want = quantize(view, ONE)[0], quantize(view.contiguous(), ONE)[0]
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
        assert got.is_contiguous()


# ---- the ring of one call ----


def ring(history, step=0.0):
    return torch.tensor([*history, step, 0.0, 0.0, 0.0])


def test_ring_takes_the_amax_and_publishes_a_step():
    state = ring([1.0, 6.0, 2.0])
    x = torch.tensor([[4.0, -3.0]])
    x8, amax = quantize(x, ONE, "e4m3", False, state, 1, 448.0, 0.5)
    assert amax.item() == 0.0 and amax.data_ptr() == state[5:].data_ptr()
    assert_same_codes(x8, nearest(x.double(), "e4m3"))
    step = (torch.tensor(4.0) / 448.0 / 0.5).item()
    assert state.tolist() == [1.0, 4.0, 2.0, step, 0.0, 0.0, 0.0]
    quantize_dual(torch.tensor([[9.0]]), ONE, "e5m2", state, 0, 57344.0)
    assert state[:4].tolist() == [9.0, 4.0, 2.0, (torch.tensor(9.0) / 57344.0).item()]


@pytest.mark.parametrize("bad", [INF, NAN])
def test_ring_counts_an_amax_that_is_not_finite_and_keeps_its_step(bad):
    state = ring([1.0, 6.0], 0.25)
    quantize(torch.tensor([1.0, bad]), ONE, ring_state=state, hist_idx=0)
    assert state.tolist() == [1.0, 6.0, 0.25, 1.0, 0.0, 0.0]
    quantize(torch.tensor([1.0, bad]), ONE, ring_state=state, hist_idx=1)
    assert state.tolist() == [1.0, 6.0, 0.25, 2.0, 0.0, 0.0]


@pytest.mark.parametrize("amax", [0.0, 1e-45, 1e-38])
def test_case_f02_ring_step_has_a_floor(amax):
    state = ring([0.0])
    quantize(scalar(amax), ONE, ring_state=state)
    assert state[1].item() == torch.tensor(1e-12).item()


# ---- several steps ----


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 40),
    fmt=st.sampled_from(FORMATS),
    seed=st.integers(0, 1000),
)
def test_rowwise_is_quantize_of_each_row(rows, columns, fmt, seed):
    x = randn(rows, columns, seed=seed, spread=10.0 ** (seed % 7 - 3))
    x8, step = quantize_rowwise(x, fmt)
    assert x8.shape == x.shape and step.shape == (rows,) and step.dtype is torch.float32
    for i in range(rows):
        want = dynamic_step(x[i], fmt)
        assert step[i] == want[0]
        row = quantize(x[i], want.reciprocal(), fmt)[0]
        assert torch.equal(x8[i].view(torch.uint8), row.view(torch.uint8))


@pytest.mark.parametrize("block", [(1, 128), (128, 128)])
@pytest.mark.parametrize("shape", [(3, 128), (1, 1), (130, 257), (2, 129, 300)])
def test_block_is_quantize_of_each_block(block, shape):
    x = randn(*shape, spread=3.0)
    x8, step = quantize_block(x, block)
    rows, columns = shape[-2:]
    tall, wide = -(-rows // block[0]), -(-columns // block[1])
    assert step.shape == (*shape[:-2], tall, wide) and x8.shape == x.shape
    flat, flat8, steps = (
        x.view(-1, *shape[-2:]),
        x8.view(-1, *shape[-2:]),
        step.view(-1, tall, wide),
    )
    for index in range(len(flat)):
        for i in range(tall) if block[0] == 128 else (0, tall - 1):
            for j in range(wide):
                part = (
                    slice(i * block[0], (i + 1) * block[0]),
                    slice(j * block[1], (j + 1) * block[1]),
                )
                want = dynamic_step(flat[index][part])
                assert steps[index, i, j] == want[0]
                codes = quantize(flat[index][part], want.reciprocal())[0]
                got = flat8[index][part].contiguous()
                assert torch.equal(got.view(torch.uint8), codes.view(torch.uint8))


def test_nan_and_infinity_in_one_row_leave_the_others_alone():
    x = torch.tensor([[1.0, 2.0], [NAN, 4.0], [INF, 8.0]])
    x8, step = quantize_rowwise(x)
    assert torch.equal(step, torch.tensor([2.0, 4.0, 8.0]) / 448.0)
    assert torch.isnan(x8.float())[1].tolist() == [True, False]
    assert x8.float()[2].tolist() == [448.0, 448.0]


# ---- errors ----


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x: quantize(x, ONE, "e3m4"), ValueError, "unsupported fp8 format.*got 'e3m4'"),
        (
            lambda x: quantize(x.double(), ONE),
            DtypeError,
            r"bf16/fp16/fp32 .*, got torch\.float64",
        ),
        (lambda x: quantize(x.double(), ONE), TypeError, "requires bf16/fp16/fp32 input"),
        (lambda x: quantize(x, ONE.double()), DtypeError, "scale must be a float32 scalar"),
        (lambda x: quantize(x, torch.ones(2)), ShapeError, "scale must be .* got .* 2 elements"),
        (lambda x: quantize(x[0], ONE, transposed=True), ShapeError, "layouts need a 2D. tensor"),
        (lambda x: quantize_dual(x[0], ONE), RuntimeError, "layouts need a 2D. tensor"),
        (lambda x: quantize(x, ONE, ring_state=torch.zeros(4)), ShapeError, "ring_state must be"),
        (lambda x: quantize(x, ONE, ring_state=torch.zeros(6), hist_idx=2), ShapeError, "hist_idx"),
        (lambda x: quantize(x, ONE, ring_state=torch.zeros(6).int()), DtypeError, "ring_state"),
        (lambda x: quantize_block(x, (128, 1)), ValueError, "block must be one of"),
        (lambda x: quantize_block(x[0]), ShapeError, r"x must be \[..., rows, columns\]"),
        (lambda x: quantize_rowwise(x[0, 0]), ShapeError, r"x must be \[..., columns\]"),
        (lambda x: dynamic_step(x, "fp8"), ValueError, "unsupported fp8 format"),
    ],
)
def test_errors(call, error, text):
    with pytest.raises(error, match=text):
        call(randn(3, 4))


@pytest.mark.parametrize("bad", [None, [1.0]])
def test_no_tensor(bad):
    for call in (lambda: quantize(bad, ONE), lambda: quantize_rowwise(bad)):
        with pytest.raises(TypeError, match=r"x must be a torch\.Tensor"):
            call()
