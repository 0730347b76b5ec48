"""What the functions hand to the kernels: stand-ins take the arguments as the bindings do."""

import itertools

import pytest
import torch

from astrai.extension.ops import _fp8, fp8
from astrai.extension.ops._fp8_arguments import FP8_DTYPES
from astrai.extension.ops.reference import fp8 as reference

ONE = torch.ones(1)
FORMATS = {dtype: name for name, dtype in FP8_DTYPES.items()}


def stand_in_quantize(x, scale, x8, x8_t, amax, ring_state, hist_idx, fp8_max, pow2_margin):
    assert x.is_contiguous()
    outputs = [out for out in (x8, x8_t) if out is not None]
    assert outputs and all(out.is_contiguous() for out in outputs)
    codes, codes_t, largest = reference.quantize(x, scale, FORMATS[outputs[0].dtype])
    if x8 is not None:
        x8.copy_(codes)
    if x8_t is not None:
        x8_t.copy_(codes_t)
    amax.copy_(torch.maximum(amax, largest))
    if ring_state is not None:
        assert amax.data_ptr() == ring_state[-2:].data_ptr()
        reference.fold_ring(ring_state, largest, hist_idx, fp8_max, pow2_margin)


def stand_in_step(x, fp8_max, pow2_margin, step):
    assert x.is_contiguous()
    step.copy_(reference.step_of(reference.finite_amax(x), fp8_max, pow2_margin))


def stand_in_rowwise(x, x8, step):
    assert x.is_contiguous()
    codes, steps = reference.quantize_rowwise(x, FORMATS[x8.dtype])
    x8.copy_(codes)
    step.copy_(steps)


def stand_in_block(x, block_rows, x8, step):
    assert x.is_contiguous() and block_rows in (1, 128)
    codes, steps = reference.quantize_block(x, (block_rows, 128), FORMATS[x8.dtype])
    x8.copy_(codes)
    step.copy_(steps)


class Gemm:
    """Notes where its operands lie."""

    def __init__(self):
        self.seen = []

    def __call__(self, a, b, scale, scale_b, trans_a, trans_b, bias, fast_accum, out):
        for x in (a, b):
            assert x.stride(-1) == 1 or x.shape[-1] <= 1
            assert x.stride(-2) >= x.shape[-1] or x.shape[-2] <= 1
        assert out.is_contiguous() and isinstance(fast_accum, bool)
        self.seen.append((a.data_ptr(), b.data_ptr(), trans_a, trans_b))
        left, right = (a.mT if trans_a else a), (b.mT if trans_b else b)
        out.copy_(reference.gemm(left, right, scale, scale_b, bias, out.dtype))


@pytest.fixture
def gemm(monkeypatch):
    """CPU tensors go where those on a GPU would."""
    stand_in = Gemm()
    monkeypatch.setattr(fp8, "_by_operator", lambda kernel, *tensors: False)
    for kernel, launch in (
        (_fp8.QUANTIZE, stand_in_quantize),
        (_fp8.STEP, stand_in_step),
        (_fp8.ROWWISE, stand_in_rowwise),
        (_fp8.BLOCKWISE, stand_in_block),
        (_fp8.GEMM, stand_in),
    ):
        monkeypatch.setattr(kernel, "launch", launch)
    return stand_in


def randn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).bfloat16()


def same(got, want):
    assert got.shape == want.shape and got.dtype is want.dtype
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("fmt", FP8_DTYPES)
@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.t(), lambda x: x[:, ::3]])
def test_quantisation(gemm, fmt, view):
    x = view(randn(12, 18))
    operators = torch.ops.astrai
    scale = torch.tensor([5.0])
    slot, ring, want_ring = torch.tensor([0.5]), torch.zeros(7), torch.zeros(7)
    for transposed in (False, True):
        want, amax = operators.fp8_quantize(x, scale, fmt, transposed)
        got = fp8.quantize(x, scale, fmt, transposed, amax_out=slot)
        same(got[0], want)
        assert got[1] is slot and torch.equal(slot, torch.maximum(amax, torch.tensor([0.5])))
        same(fp8.quantize(x, scale, fmt, transposed, ring, 1, 100.0, 0.5)[0], want)
        operators.fp8_quantize_ring(x, scale, want_ring, fmt, transposed, 1, 100.0, 0.5)
    assert torch.equal(ring, want_ring) and ring[3] > 0
    dual, want = fp8.quantize_dual(x, scale, fmt), operators.fp8_quantize_dual(x, scale, fmt)
    ringed = fp8.quantize_dual(x, scale, fmt, ring, 2, 100.0)
    for i in range(2):
        same(dual[i], want[i])
        same(ringed[i], want[i])
    assert torch.equal(dual[2], want[2]) and ringed[2].item() == 0.0
    assert torch.equal(fp8.dynamic_step(x, fmt, 0.5), operators.fp8_dynamic_step(x, fmt, 0.5))
    for got, want in (
        (fp8.quantize_rowwise(x, fmt), operators.fp8_quantize_rowwise(x, fmt)),
        (fp8.quantize_block(x, (1, 128), fmt), operators.fp8_quantize_block(x, [1, 128], fmt)),
        (fp8.quantize_block(x, (128, 128), fmt), operators.fp8_quantize_block(x, [128] * 2, fmt)),
    ):
        same(got[0], want[0])
        assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("layout", list(itertools.product((False, True), repeat=2)))
@pytest.mark.parametrize("batch", [(), (3,)])
def test_operands_are_read_where_they_lie(gemm, layout, batch):
    a = randn(*batch, 5, 8).to(torch.float8_e4m3fn)
    b = randn(*batch, 8, 6, seed=1).to(torch.float8_e5m2)
    bias = randn(6, seed=2)
    want = torch.ops.astrai.fp8_gemm(a, b, ONE, False, False, bias, None, torch.float16, False)
    flip_a, flip_b = layout
    stored_a = a.mT.contiguous() if flip_a else a
    stored_b = b.mT.contiguous() if flip_b else b
    by_flag = fp8.mm_fp8(
        stored_a, stored_b, ONE, flip_a, flip_b, bias, out_dtype=torch.float16, fast_accum=False
    )
    by_view = fp8.mm_fp8(
        stored_a.mT if flip_a else a,
        stored_b.mT if flip_b else b,
        ONE,
        bias=bias,
        out_dtype=torch.float16,
        fast_accum=False,
    )
    assert torch.equal(by_flag, want) and torch.equal(by_view, want)
    expected = (stored_a.data_ptr(), stored_b.data_ptr(), flip_a, flip_b)
    assert gemm.seen == [expected, expected]


def test_operands_of_other_strides_are_copied(gemm):
    wide = randn(5, 16).to(torch.float8_e4m3fn)
    b = randn(8, 6, seed=1).to(torch.float8_e4m3fn)
    a = wide[:, ::2]
    got = fp8.mm_fp8(a, b, ONE)
    assert torch.equal(
        got, torch.ops.astrai.fp8_gemm(a, b, ONE, False, False, None, None, torch.bfloat16, True)
    )
    assert gemm.seen[0][0] != a.data_ptr()
    rows = wide[:, :8]  # rows further apart than they are long need no copy
    fp8.mm_fp8(rows, b, ONE)
    assert gemm.seen[1][0] == rows.data_ptr()
    fp8.mm_fp8(rows[:1].expand(5, 8), b, ONE)  # rows that lie on each other do
    assert gemm.seen[2][0] != rows.data_ptr()


def test_arguments_are_checked_before_a_launch(gemm):
    a = randn(5, 8).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="inner dim mismatch"):
        fp8.mm_fp8(a, a, ONE)
    with pytest.raises(ValueError, match="hist_idx must be"):
        fp8.quantize(randn(2, 2), ONE, ring_state=torch.zeros(6), hist_idx=-1)
    with pytest.raises(ValueError, match="amax_out must be a float32 scalar"):
        fp8.quantize(randn(2, 2), ONE, amax_out=torch.zeros(2))
    with pytest.raises(TypeError, match="x must be"):
        fp8.quantize_block(randn(2, 2).double())
    assert gemm.seen == []
