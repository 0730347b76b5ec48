"""What a kernel gets to see of a tensor, on both paths."""

import binding_probe as probe
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.usefixtures("path")

DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtype_shape_strides_and_pointer(dtype):
    x = torch.zeros(4, 6).to(dtype)[1:, ::2]
    view = probe.view(x)
    assert view["dtype"] == str(dtype)
    assert view["shape"] == (3, 3)
    assert view["strides"] == (6, 2)
    assert view["data"] == x.data_ptr()  # storage offset included
    assert view["device"] == "cpu"
    assert (view["numel"], view["span"], view["contiguous"]) == (9, 17, False)


def test_complex_and_rare_dtypes_are_named_but_never_taken():
    assert probe.view(torch.zeros(2, dtype=torch.complex64))["dtype"] == "a complex dtype"
    assert probe.view(torch.zeros(2, dtype=torch.uint16))["dtype"] == "another dtype"


def test_scalar_and_empty_tensors():
    assert probe.view(torch.zeros(()))["shape"] == ()
    empty = probe.view(torch.zeros(0, 3))
    assert (empty["shape"], empty["numel"], empty["span"]) == ((0, 3), 0, 0)
    assert empty["contiguous"]


def test_parameter_and_its_data():
    parameter = torch.nn.Parameter(torch.zeros(3))
    with torch.no_grad():
        assert probe.view(parameter)["data"] == parameter.data_ptr()
    assert probe.view(parameter.detach())["data"] == parameter.data_ptr()


def test_transposed_and_expanded():
    assert probe.view(torch.zeros(2, 3).t())["strides"] == (1, 3)
    assert probe.view(torch.zeros(3, 1).expand(3, 4))["strides"] == (1, 0)


def test_case_d03_stride_of_a_size_1_dimension_is_made_canonical():
    x = torch.zeros(64).as_strided((4, 1, 8), (8, 7, 1))
    assert probe.view(x)["strides"] == (8, 8, 1)
    assert probe.view(x)["contiguous"]
    assert probe.view(torch.zeros(64).as_strided((1, 1), (5, 7)))["strides"] == (1, 1)
    assert probe.view(torch.zeros(64).as_strided((2, 1), (32, 7)))["strides"] == (32, 1)


@st.composite
def strided_tensors(draw):
    shape = draw(st.lists(st.integers(0, 4), min_size=0, max_size=5))
    strides = draw(st.lists(st.integers(0, 9), min_size=len(shape), max_size=len(shape)))
    offset = draw(st.integers(0, 5))
    return torch.zeros(512, dtype=torch.int32).as_strided(shape, strides, offset)


@settings(max_examples=200, deadline=None)
@given(x=strided_tensors())
@pytest.mark.parametrize("exchange", [True, False])
def test_any_strides(exchange, x):
    probe.use_exchange_api(exchange)
    view = probe.view(x)
    assert view["shape"] == tuple(x.shape)
    if x.numel() == 0:
        return
    assert view["data"] == x.data_ptr()
    for size, got, stride in zip(x.shape, view["strides"], x.stride(), strict=True):
        assert size == 1 or got == stride
    assert view["contiguous"] == x.is_contiguous()
    assert view["span"] == 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))


def test_reading_leaves_no_reference():
    import sys

    x = torch.zeros(3)
    before = sys.getrefcount(x)
    for _ in range(10):
        probe.view(x)
    assert sys.getrefcount(x) == before


def test_scalar_arguments():
    assert probe.scalars(True, 2, 3) == (True, 2.0, 3)
    assert probe.scalars(0, 0.5, -7) == (False, 0.5, -7)
    with pytest.raises(TypeError, match=r"scalars: flag must be a bool, got str"):
        probe.scalars("yes", 1.0, 1)
    with pytest.raises(TypeError, match=r"scalars: number must be a float, got str"):
        probe.scalars(True, "1", 1)
    with pytest.raises(TypeError, match=r"scalars: integer must be an int, got float"):
        probe.scalars(True, 1.0, 1.0)
    with pytest.raises(TypeError, match=r"scalars: integer must be an int, got int"):
        probe.scalars(True, 1.0, 2**70)
    with pytest.raises(TypeError, match=r"scalars: takes 3 positional arguments, got 1"):
        probe.scalars(True)
