"""The fp8 kernels against the definition on the CPU: bits of quantisation, products, capture."""

import itertools

import pytest
import torch

from astrai.extension.ops import (
    dynamic_step,
    mm_fp8,
    quantize,
    quantize_block,
    quantize_dual,
    quantize_rowwise,
)
from tests.python.ops.fp8_codes import DTYPES, assert_same_codes

FORMATS = tuple(DTYPES)
INPUTS = (torch.bfloat16, torch.float16, torch.float32)
SIZES = [(16, 8, 32), (17, 9, 33), (31, 15, 64), (32, 48, 96), (19, 13, 37), (130, 260, 384)]
SHAPES = [(1, 1), (5, 7), (64, 64), (33, 129), (3, 40, 56), (512, 768), (0, 8), (8, 0)]
LAYOUTS = list(itertools.product((False, True), repeat=2))
TOLERANCE = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-5}


def randn(*shape, dtype=torch.bfloat16, seed=0, spread=3.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * spread).to(dtype)


def scalar(x, device="cpu"):
    return torch.tensor([x], dtype=torch.float32, device=device)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_input(fmt, dtype):
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    for scale in (1.0, 0.37, 3e4):
        got, amax = quantize(x.cuda(), scalar(scale, "cuda"), fmt)
        assert_same_codes(got.cpu(), quantize(x, scalar(scale), fmt)[0])
        assert torch.isnan(amax).item()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", INPUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_quantize(fmt, dtype, shape):
    x = randn(*shape, dtype=dtype)
    scale = scalar(17.0)
    want, want_t, want_amax = quantize_dual(x, scale, fmt)
    on_gpu, gpu_scale = x.cuda(), scale.cuda()
    x8, amax = quantize(on_gpu, gpu_scale, fmt)
    x8_t, amax_t = quantize(on_gpu, gpu_scale, fmt, transposed=True)
    both = quantize_dual(on_gpu, gpu_scale, fmt)
    for got, expected in ((x8, want), (x8_t, want_t), (both[0], want), (both[1], want_t)):
        assert got.shape == expected.shape and got.is_contiguous()
        assert_same_codes(got.cpu(), expected)
    for got in (amax, amax_t, both[2]):
        assert torch.equal(got.cpu(), want_amax)
    slot = scalar(4.0, "cuda")
    assert quantize(on_gpu, gpu_scale, fmt, amax_out=slot)[1] is slot
    assert slot.item() == max(4.0, want_amax.item())


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_values_that_are_not_finite(bad):
    x = randn(40, 300)
    x[3, 5] = bad
    for fmt in FORMATS:
        got, amax = quantize(x.cuda(), scalar(2.0, "cuda"), fmt)
        assert_same_codes(got.cpu(), quantize(x, scalar(2.0), fmt)[0])
        torch.testing.assert_close(amax.cpu(), scalar(bad), equal_nan=True)
        assert torch.equal(dynamic_step(x.cuda(), fmt).cpu(), dynamic_step(x, fmt))


def test_ring_follows_the_definition():
    rings = [torch.zeros(8), torch.zeros(8, device="cuda")]
    for step, size in enumerate([1.0, 5.0, float("nan"), 0.1, float("inf"), 0.0, 2.0]):
        x = randn(70, 90, seed=step) * size
        for ring in rings:
            scale = scalar(1.0, ring.device)
            arguments = (x.to(ring.device), scale, "e4m3")
            if step % 2:
                x8, _, amax = quantize_dual(*arguments, ring, step % 4, 448.0, 0.5)
            else:
                x8, amax = quantize(*arguments, False, ring, step % 4, 448.0, 0.5)
            assert amax.item() == 0.0
            assert x8.shape == x.shape
        assert torch.equal(rings[1].cpu(), rings[0])


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", INPUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_and_blocks(fmt, dtype, shape):
    x = randn(*shape, dtype=dtype)
    calls = [
        lambda x: quantize_rowwise(x, fmt),
        lambda x: quantize_block(x, (1, 128), fmt),
        lambda x: quantize_block(x, (128, 128), fmt),
    ]
    for call in calls:
        (got, step), (want, want_step) = call(x.cuda()), call(x)
        assert torch.equal(step.cpu(), want_step)
        assert_same_codes(got.cpu(), want)


def assert_product(got, a, b, factor, bias=None):
    """Against float64, within a rounding of the output and of long sums in tensor cores."""
    want = (a.double() @ b.double()) * factor
    magnitude = (a.double().abs() @ b.double().abs()) * abs(factor)
    if bias is not None:
        want = want + bias.double()
    error = (got.cpu().double() - want).abs()
    assert (error <= want.abs() * TOLERANCE[got.dtype] + 2e-3 * magnitude).all()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fast", [True, False])
def test_four_layouts(size, layout, fast):
    (m, n, k), (trans_a, trans_b) = size, layout
    a, b = randn(m, k).to(DTYPES["e4m3"]), randn(k, n, seed=1).to(DTYPES["e4m3"])
    bias = randn(n, seed=2)
    stored_a = a.t().contiguous() if trans_a else a
    stored_b = b.t().contiguous() if trans_b else b
    arguments = (stored_a.cuda(), stored_b.cuda(), scalar(0.25, "cuda"))
    got = mm_fp8(*arguments, trans_a, trans_b, bias.cuda(), fast_accum=fast)
    assert got.shape == (m, n)
    assert_product(got, a, b, 0.25, bias)
    views = mm_fp8(
        arguments[0].t(), arguments[1], arguments[2], not trans_a, trans_b, fast_accum=fast
    )
    assert torch.equal(views, mm_fp8(*arguments, trans_a, trans_b, fast_accum=fast))


@pytest.mark.parametrize("fmts", list(itertools.product(FORMATS, repeat=2)))
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_formats_and_output_types(fmts, dtype):
    a, b = randn(33, 160).to(DTYPES[fmts[0]]), randn(72, 160, seed=1).to(DTYPES[fmts[1]])
    got = mm_fp8(a.cuda(), b.cuda(), scalar(0.5, "cuda"), trans_b=True, out_dtype=dtype)
    assert got.dtype is dtype
    assert_product(got, a, b.t(), 0.5)


@pytest.mark.parametrize(
    ("batch_a", "batch_b"), [((3,), (3,)), ((4,), (1,)), ((1,), (4,)), ((3,), ()), ((), (3,))]
)
def test_batches(batch_a, batch_b):
    a, b = randn(*batch_a, 20, 48).to(DTYPES["e4m3"]), randn(*batch_b, 48, 24, seed=1)
    b = b.to(DTYPES["e4m3"])
    got = mm_fp8(a.cuda(), b.cuda(), scalar(1.0, "cuda"))
    assert_product(got, a, b, 1.0)


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_case_f04_empty_dimensions(shape):
    m, n, k = shape
    a = torch.zeros(m, k, device="cuda").to(DTYPES["e4m3"])
    b = torch.zeros(k, n, device="cuda").to(DTYPES["e4m3"])
    bias = torch.arange(n, device="cuda").bfloat16()
    got = mm_fp8(a, b, scalar(1.0, "cuda"), bias=bias)
    assert torch.equal(got, bias.expand(m, n))


@pytest.mark.parametrize("size", [(17, 24, 64), (130, 140, 300), (256, 384, 512)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_row_and_block_scales(size, layout):
    (m, n, k), (trans_a, trans_b) = size, layout
    x, w = randn(m, k), randn(n, k, seed=1)
    kinds = [
        (quantize_rowwise, quantize_rowwise),
        (quantize_block, quantize_block),
        (quantize_block, lambda w: quantize_block(w, (128, 128))),
    ]
    for quantize_a, quantize_b in kinds:
        (x8, step_x), (w8, step_w) = quantize_a(x), quantize_b(w)
        a = x8.t().contiguous() if trans_a else x8
        b = w8 if trans_b else w8.t().contiguous()
        results = [
            mm_fp8(
                *(t.to(device) for t in (a, b, step_x)),
                trans_a,
                trans_b,
                scale_b=step_w.to(device),
                out_dtype=torch.float32,
                fast_accum=False,
            ).cpu()
            for device in ("cuda", "cpu")
        ]
        error = (results[0] - results[1]).norm() / results[1].norm()
        assert error < 1e-3


def test_against_torch_scaled_mm():
    a = randn(512, 4096, spread=1.0).to(DTYPES["e4m3"]).cuda()
    b = randn(4096, 4096, seed=1, spread=1.0).to(DTYPES["e4m3"]).cuda()
    one = scalar(1.0, "cuda")
    for fast in (True, False):
        got = mm_fp8(a, b, one, trans_b=True, fast_accum=fast).double()
        want = torch._scaled_mm(
            a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=fast
        ).double()
        assert (got - want).abs().max() <= 0.02 * want.abs().max()
        assert (got - want).norm() <= 0.01 * want.norm()


@pytest.mark.parametrize("k", [1024, 16384, 65536])
def test_case_f06_error_of_long_sums(k, record_property):
    a, b = randn(64, k).to(DTYPES["e4m3"]), randn(64, k, seed=1).to(DTYPES["e4m3"])
    want = a.double() @ b.double().t()
    for fast, limit in ((True, 2e-2), (False, 1e-4)):
        got = mm_fp8(
            a.cuda(),
            b.cuda(),
            scalar(1.0, "cuda"),
            trans_b=True,
            out_dtype=torch.float32,
            fast_accum=fast,
        )
        error = ((got.cpu().double() - want).norm() / want.norm()).item()
        record_property(f"error_k{k}_{'fast' if fast else 'split'}", error)
        assert error < limit


def test_transposed_views_are_not_copied():
    a = torch.zeros(4096, 8192, dtype=torch.uint8, device="cuda").view(DTYPES["e4m3"])
    one = scalar(1.0, "cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = mm_fp8(a.t(), a, one)
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= out.numel() * 2 + (1 << 20)


def test_graph_capture_and_streams():
    x, w = randn(128, 256).cuda(), randn(64, 256, seed=1).cuda()

    def run():
        step_x, step_w = dynamic_step(x), dynamic_step(w)
        x8, x8_t, _ = quantize_dual(x, step_x.reciprocal())
        w8, _ = quantize(w, step_w.reciprocal())
        return mm_fp8(x8, w8, step_x, trans_b=True, scale_b=step_w), x8_t

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, x8_t = run()
    x.copy_(randn(128, 256, seed=7))
    graph.replay()
    want, want_t = run()
    assert torch.equal(out, want)
    assert_same_codes(x8_t, want_t)


def test_direct_calls_and_operators_agree():
    x = randn(96, 160).cuda()
    one = scalar(3.0, "cuda")
    direct, amax = quantize(x, one)
    x8, other = torch.ops.astrai.fp8_quantize(x, one)
    assert_same_codes(direct, x8)
    assert torch.equal(amax, other)
    args = (direct, direct, one, False, True, None, None, torch.bfloat16, True)
    assert torch.equal(torch.ops.astrai.fp8_gemm(*args), mm_fp8(direct, direct, one, trans_b=True))


@pytest.mark.parametrize("which", ["scale", "b", "bias"])
def test_tensors_on_different_devices(which):
    a = torch.zeros(16, 32, device="cuda").to(DTYPES["e4m3"])
    given = {"b": a, "scale": scalar(1.0, "cuda"), "bias": torch.zeros(16, device="cuda")}
    given[which] = given[which].cpu()
    with pytest.raises(RuntimeError, match=f"mm_fp8: {which} must be"):
        mm_fp8(a, trans_b=True, **given)
