"""mm_fp8 on the CPU: layouts, batches, scales of all kinds, output types, errors."""

import itertools

import pytest
import torch

from astrai.extension.errors import DtypeError, ShapeError
from astrai.extension.ops.fp8 import mm_fp8, quantize_block, quantize_rowwise
from tests.python.ops.fp8_codes import DTYPES

SIZES = [(16, 8, 32), (17, 9, 33), (31, 15, 64), (32, 48, 96), (19, 13, 37)]
LAYOUTS = list(itertools.product((False, True), repeat=2))
SCALE = torch.tensor([0.25])
TOLERANCE = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-6}


def codes(*shape, fmt="e4m3", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DTYPES[fmt])


def operand(rows, columns, transposed, batch=(), **kwargs):
    return codes(*batch, *((columns, rows) if transposed else (rows, columns)), **kwargs)


def exact(a, b, trans_a=False, trans_b=False):
    a, b = a.double(), b.double()
    return (a.mT if trans_a else a) @ (b.mT if trans_b else b)


def assert_rounded(got, want, dtype=torch.bfloat16):
    """Within one rounding of the result, and of float32 sums."""
    assert got.dtype is dtype and got.shape == want.shape
    error = (got.double() - want).abs()
    bound = want.abs() * TOLERANCE[dtype] + 1e-5 * want.abs().amax()
    assert (error <= bound).all(), float((error - bound).max())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_four_layouts(size, layout):
    (m, n, k), (trans_a, trans_b) = size, layout
    a, b = operand(m, k, trans_a), operand(k, n, trans_b, seed=1)
    got = mm_fp8(a, b, SCALE, trans_a, trans_b)
    assert_rounded(got, exact(a, b, trans_a, trans_b) * 0.25)
    # A view that is transposed already says the same as the flag.
    assert torch.equal(mm_fp8(a.mT, b, SCALE, not trans_a, trans_b), got)
    assert torch.equal(mm_fp8(a, b.mT, SCALE, trans_a, not trans_b), got)


@pytest.mark.parametrize("fmts", list(itertools.product(DTYPES, repeat=2)))
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("fast", [True, False])
def test_formats_and_output_types(fmts, dtype, fast):
    a, b = codes(17, 33, fmt=fmts[0]), codes(9, 33, fmt=fmts[1], seed=1)
    got = mm_fp8(a, b, SCALE, trans_b=True, out_dtype=dtype, fast_accum=fast)
    assert_rounded(got, exact(a, b, trans_b=True) * 0.25, dtype)


@pytest.mark.parametrize(
    ("batch_a", "batch_b", "batch"),
    [
        ((3,), (3,), 3),
        ((4,), (1,), 4),
        ((1,), (4,), 4),
        ((3,), (), 3),
        ((), (3,), 3),
        ((1,), (), 1),
    ],
)
def test_batches_broadcast(batch_a, batch_b, batch):
    a, b = codes(*batch_a, 5, 7), codes(*batch_b, 7, 6, seed=1)
    bias = torch.randn(6).bfloat16()
    got = mm_fp8(a, b, SCALE, bias=bias)
    assert got.shape == (batch, 5, 6)
    assert_rounded(got, exact(a, b) * 0.25 + bias.double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bias_is_added_before_the_only_rounding(dtype):
    a, b = codes(4, 8), codes(8, 5, seed=1)
    bias = torch.randn(5).to(dtype)
    assert_rounded(mm_fp8(a, b, SCALE, bias=bias), exact(a, b) * 0.25 + bias.double())
    empty = mm_fp8(a, b, SCALE, bias=bias[:0])
    assert torch.equal(empty, mm_fp8(a, b, SCALE))


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
@pytest.mark.parametrize("bias", [False, True])
def test_case_f04_empty_dimensions(shape, bias):
    m, n, k = shape
    bias = torch.arange(n).bfloat16() if bias else None
    got = mm_fp8(codes(m, k), codes(k, n), SCALE, bias=bias)
    assert got.shape == (m, n)
    assert torch.equal(got, torch.zeros(m, n).bfloat16() + (0 if bias is None else bias))


def test_two_scales_are_their_product():
    a, b = codes(4, 8), codes(8, 5, seed=1)
    step_a, step_b = torch.tensor([0.5]), torch.tensor(3.0)
    got = mm_fp8(a, b, step_a, scale_b=step_b)
    assert_rounded(got, exact(a, b) * 1.5)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rowwise_scales(size, layout):
    (m, n, k), (trans_a, trans_b) = size, layout
    torch.manual_seed(0)
    x = torch.randn(m, k, dtype=torch.float64) * torch.logspace(-3, 3, m)[:, None]
    w = torch.randn(n, k, dtype=torch.float64) * torch.logspace(3, -3, n)[:, None]
    (x8, step_x), (w8, step_w) = quantize_rowwise(x.float()), quantize_rowwise(w.float())
    a = x8.t().contiguous() if trans_a else x8
    b = w8 if trans_b else w8.t().contiguous()
    got = mm_fp8(a, b, step_x, trans_a, trans_b, scale_b=step_w, out_dtype=torch.float32)
    left, right = x8.double() * step_x[:, None], w8.double() * step_w[:, None]
    magnitude = left.abs() @ right.abs().t()
    assert ((got.double() - left @ right.t()).abs() <= 1e-6 * magnitude).all()
    # Rows of such different sizes keep their precision: half a unit of 3 bits for each factor.
    assert ((got.double() - x @ w.t()).abs() <= 0.14 * (x.abs() @ w.t().abs())).all()
    one = mm_fp8(a, b, torch.ones(1), trans_a, trans_b, scale_b=step_w, out_dtype=torch.float32)
    assert ((one * step_x[:, None] - got).abs() <= 1e-6 * magnitude).all()


@pytest.mark.parametrize("block_a", [(1, 128), (128, 128)])
@pytest.mark.parametrize("block_b", [(1, 128), (128, 128)])
@pytest.mark.parametrize("size", [(3, 5, 128), (130, 140, 300), (1, 1, 1)])
def test_block_scales(block_a, block_b, size):
    m, n, k = size
    torch.manual_seed(0)
    x, w = torch.randn(m, k) * 3, torch.randn(n, k)
    x[:, k // 2 :] *= 1000
    (x8, step_x), (w8, step_w) = quantize_block(x, block_a), quantize_block(w, block_b)
    got = mm_fp8(x8, w8, step_x, trans_b=True, scale_b=step_w, out_dtype=torch.float32)

    def held(codes, step, block):
        out = torch.empty(codes.shape, dtype=torch.float64)
        for i in range(codes.shape[0]):
            for j in range(codes.shape[1]):
                out[i, j] = float(codes[i, j]) * float(step[i // block[0], j // block[1]])
        return out

    if m * k < 1000:
        left, right = held(x8, step_x, block_a), held(w8, step_w, block_b)
        error = (got.double() - left @ right.t()).abs()
        assert (error <= 1e-5 * (left.abs() @ right.abs().t())).all()
    exact_product = x.double() @ w.double().t()
    assert (got - exact_product).norm() < 0.06 * exact_product.norm()


def test_block_scales_in_every_layout():
    torch.manual_seed(0)
    x8, step_x = quantize_block(torch.randn(130, 200), (1, 128))
    w8, step_w = quantize_block(torch.randn(140, 200), (128, 128))
    want = mm_fp8(x8, w8, step_x, trans_b=True, scale_b=step_w)
    for trans_a, trans_b in LAYOUTS:
        a = x8.t().contiguous() if trans_a else x8
        b = w8 if trans_b else w8.t().contiguous()
        got = mm_fp8(a, b, step_x, trans_a, trans_b, scale_b=step_w)
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("k", [1024, 16384])
def test_case_f06_error_of_long_sums(k):
    a, b = codes(4, k), codes(4, k, seed=1)
    got = mm_fp8(a, b, SCALE, trans_b=True, out_dtype=torch.float32, fast_accum=False)
    want = exact(a, b, trans_b=True) * 0.25
    magnitude = (a.double().abs() @ b.double().abs().t()) * 0.25
    assert ((got.double() - want).abs() <= 1e-6 * magnitude).all()


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda a, b: mm_fp8(a.float(), b, SCALE), DtypeError, "a and b must be fp8, got a of"),
        (lambda a, b: mm_fp8(a, b.bfloat16(), SCALE), RuntimeError, "a and b must be fp8"),
        (lambda a, b: mm_fp8(a[0], b, SCALE), ShapeError, "a must have rank 2 or 3"),
        (lambda a, b: mm_fp8(a, b, SCALE, trans_b=True), ShapeError, "inner dim mismatch"),
        (lambda a, b: mm_fp8(a, b, SCALE.double()), DtypeError, "scale must be a float32 scalar"),
        (lambda a, b: mm_fp8(a, b, torch.ones(4)), ShapeError, "scale must be a float32 scalar"),
        (lambda a, b: mm_fp8(a, b, SCALE, bias=torch.ones(4)), ShapeError, r"bias must be \[5\]"),
        (lambda a, b: mm_fp8(a, b, SCALE, bias=torch.ones(5).int()), DtypeError, "bias must be"),
        (lambda a, b: mm_fp8(a, b, SCALE, out_dtype=torch.int8), DtypeError, "out_dtype must be"),
        (
            lambda a, b: mm_fp8(a, b, torch.ones(3), scale_b=torch.ones(5)),
            ShapeError,
            r"scale must be one element, \[4\], \[4, 1\] or \[1, 1\]",
        ),
        (
            lambda a, b: mm_fp8(a, b, torch.ones(4, 1), scale_b=torch.ones(5)),
            ShapeError,
            "must both have steps of blocks or neither",
        ),
        (
            lambda a, b: mm_fp8(a.expand(3, 4, 8), b.expand(2, 8, 5), SCALE),
            ShapeError,
            "batch dim mismatch",
        ),
        (lambda a, b: mm_fp8(None, b, SCALE), TypeError, r"a must be a torch\.Tensor, got None"),
        (lambda a, b: mm_fp8(a, b, SCALE, bias=[1.0]), (TypeError, RuntimeError), "list|bias"),
    ],
)
def test_errors(call, error, text):
    with pytest.raises(error, match=text):
        call(codes(4, 8), codes(8, 5))
