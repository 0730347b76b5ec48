"""The registered fp8 operators: schemas, fakes, tracing, autograd."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from astrai.extension.ops import (
    dynamic_step,
    mm_fp8,
    quantize,
    quantize_block,
    quantize_dual,
    quantize_rowwise,
)

OPERATORS = torch.ops.astrai
SCALE = torch.tensor([3.0])


def inputs():
    torch.manual_seed(0)
    return torch.randn(5, 7).bfloat16(), torch.randn(4, 7).bfloat16()


@pytest.mark.parametrize(
    ("name", "rest"),
    [
        ("fp8_quantize", (SCALE,)),
        ("fp8_quantize", (SCALE, "e5m2", True)),
        ("fp8_quantize_dual", (SCALE, "e4m3")),
        ("fp8_quantize_ring", (SCALE, torch.zeros(7), "e4m3", True, 2, 448.0, 1.0)),
        ("fp8_quantize_dual_ring", (SCALE, torch.zeros(7), "e5m2", 0, 57344.0, 0.5)),
        ("fp8_dynamic_step", ("e5m2", 0.5)),
        ("fp8_quantize_rowwise", ()),
        ("fp8_quantize_block", ([1, 128],)),
        ("fp8_quantize_block", ([128, 128], "e5m2")),
    ],
)
def test_opcheck(name, rest):
    torch.library.opcheck(getattr(OPERATORS, name).default, (inputs()[0], *rest))


@pytest.mark.parametrize("batch", [(), (2,)])
def test_opcheck_gemm(batch):
    x, w = (quantize(x, SCALE)[0] for x in inputs())
    a = x.expand(*batch, *x.shape)
    arguments = (a, w, SCALE, False, True, torch.randn(4).bfloat16(), None, torch.float16, False)
    # test_schema compares inputs, and torch compares no fp8 tensors.
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(OPERATORS.fp8_gemm.default, arguments, test_utils=tests)


def everything(x, w):
    x8, amax = quantize(x, SCALE.to(x.device))
    w8, w8_t, _ = quantize_dual(w, dynamic_step(w).reciprocal())
    out = mm_fp8(x8, w8, dynamic_step(w), trans_b=True, out_dtype=torch.float32)
    again = mm_fp8(x8, w8_t, dynamic_step(w), out_dtype=torch.float32)
    (rows, steps), (others, other_steps) = quantize_rowwise(x), quantize_rowwise(w)
    by_row = mm_fp8(rows, others, steps, trans_b=True, scale_b=other_steps)
    (blocks, steps), (others, other_steps) = quantize_block(x), quantize_block(w, (128, 128))
    by_block = mm_fp8(blocks, others, steps, trans_b=True, scale_b=other_steps)
    return out, again, by_row, by_block, amax


def test_fake_tensors_on_cuda_need_no_gpu():
    want = everything(*inputs())
    with FakeTensorMode():
        x = torch.empty(5, 7, dtype=torch.bfloat16, device="cuda")
        w = torch.empty(4, 7, dtype=torch.bfloat16, device="cuda")
        x8, x8_t, _ = quantize_dual(x, torch.ones(1, device="cuda"), "e5m2")
        assert x8.dtype is torch.float8_e5m2 and x8_t.shape == (7, 5)
        out = mm_fp8(x8, x8, torch.ones(1, device="cuda"), trans_b=True)
        assert (out.shape, out.dtype, out.device.type) == ((5, 5), torch.bfloat16, "cuda")
        _, step = quantize_block(w, (128, 128))
        assert (step.shape, step.device.type) == ((1, 1), "cuda")
        with pytest.raises(ValueError, match="inner dim mismatch"):
            mm_fp8(x8, x8, torch.ones(1, device="cuda"))
    assert want[0].shape == (5, 4)


@pytest.mark.parametrize("dynamic", [False, True])
def test_case_e09_compile_fullgraph(dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(everything, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    x, w = inputs()
    for rows in (5, 3):
        for got, want in zip(compiled(x[:rows], w), everything(x[:rows], w), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_compile_with_a_ring_and_a_slot():
    torch._dynamo.reset()
    x, _ = inputs()

    def call(x, ring, slot):
        x8, _ = quantize(x, SCALE, ring_state=ring, hist_idx=1)
        quantize(x, SCALE, amax_out=slot)
        return x8.float()

    states = [(torch.zeros(7), torch.zeros(1)) for _ in range(2)]
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, *states[0]), call(x, *states[1]))
    torch.testing.assert_close(states[0], states[1])
    assert states[0][1] == x.abs().max()


def test_case_e10_autograd_is_refused():
    x, w = inputs()
    x.requires_grad_()
    for call in (
        lambda: quantize(x, SCALE),
        lambda: quantize_rowwise(x),
        lambda: mm_fp8(
            x.detach().to(torch.float8_e4m3fn),
            w.to(torch.float8_e4m3fn),
            SCALE.clone().requires_grad_(),
            trans_b=True,
        ),
    ):
        with pytest.raises(RuntimeError, match=r"requires grad.*autograd"):
            call()
        with torch.no_grad():
            call()


def test_operators_and_functions_agree_under_a_function_mode():
    x, _ = inputs()
    want = quantize(x, SCALE)[0]
    with torch.device("cpu"):  # a function mode
        got = quantize(x, SCALE)[0]
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
