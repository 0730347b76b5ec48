"""Checks between arguments, outputs and their version counters."""

import binding_probe as probe
import pytest
import torch

from astrai.extension.errors import DtypeError, ShapeError

pytestmark = pytest.mark.usefixtures("path")


def test_add_computes_with_strides_and_offsets():
    a = torch.randn(4, 8)[1:, :5]
    b = torch.randn(3, 5)
    out = torch.full((6, 8), float("nan"))[::2, 2:7]
    probe.add(a, b, out)
    assert torch.equal(out, a + b)


def test_add_without_elements():
    empty = torch.zeros(0, 3)
    probe.add(empty, empty.clone(), empty.clone())


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (
            {"b": torch.zeros(2, 3, dtype=torch.bfloat16)},
            DtypeError,
            "add: b must be torch.float32, got torch.bfloat16",
        ),
        (
            {"a": torch.zeros(3)},
            ShapeError,
            "add: a must be 2-D [rows, columns], got 1-D of shape (3,)",
        ),
        (
            {"b": torch.zeros(2, 4)},
            ShapeError,
            "add: b must be of shape (2, 3) = [rows, columns], got (2, 4)",
        ),
        (
            {"a": torch.zeros(3, 2).t()},
            ShapeError,
            "add: a must be of stride 1 in its last dimension, got strides (1, 2) for shape (2, 3)",
        ),
        (
            {"out": torch.zeros(2, 1).expand(2, 3)},
            ShapeError,
            "add: out must be a tensor whose elements do not share memory, got shape (2, 3) with "
            "strides (1, 0)",
        ),
        ({"out": None}, TypeError, "add: out must be a torch.Tensor, got None"),
    ],
    ids=["dtype", "rank", "shape", "stride", "overlap", "none"],
)
def test_bad_argument(change, error, text):
    args = {"a": torch.zeros(2, 3), "b": torch.zeros(2, 3), "out": torch.zeros(2, 3), **change}
    with pytest.raises(error) as caught:
        probe.add(args["a"], args["b"], args["out"])
    assert str(caught.value) == text


def test_refusing_writes_nothing():
    out = torch.full((2, 3), 7.0)
    version = out._version
    with pytest.raises(ShapeError):
        probe.add(torch.zeros(2, 3), torch.zeros(2, 4), out)
    assert torch.equal(out, torch.full((2, 3), 7.0))
    assert out._version == version


def test_wrong_number_of_arguments():
    with pytest.raises(TypeError, match="add: takes 3 positional arguments, got 2"):
        probe.add(torch.zeros(2, 3), torch.zeros(2, 3))


def test_output_that_is_an_input():
    a, b = torch.ones(2, 3), torch.ones(2, 3)
    probe.add(a, b, a)  # in place, the same strides
    assert torch.equal(a, torch.full((2, 3), 2.0))


def test_output_that_overlaps_an_input():
    storage = torch.zeros(9)
    a, out = storage[:6].view(2, 3), storage[3:].view(2, 3)
    with pytest.raises(ShapeError) as caught:
        probe.add(a, torch.zeros(2, 3), out)
    assert str(caught.value) == (
        "add: out must be in memory apart from a, got memory that both share"
    )


def test_slices_that_interleave_are_no_overlap():
    storage = torch.randn(2, 9)
    a, b, out = storage.split(3, dim=1)
    expected = a + b
    probe.add(a, b, out)
    assert torch.equal(out, expected)


def overlaps(x):
    """Whether two elements share an address, by counting addresses."""
    offsets = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(x.shape, x.stride(), strict=True):
        offsets = offsets[..., None] + torch.arange(size) * stride
    return offsets.unique().numel() != x.numel()


@pytest.mark.parametrize(
    ("shape", "stride"),
    [
        ((2, 3), (3, 1)),
        ((2, 3), (1, 2)),
        ((2, 3), (5, 1)),
        ((2, 3), (2, 1)),
        ((4, 4), (1, 1)),
        ((2, 1, 3), (3, 0, 1)),
        ((3, 2, 2), (1, 6, 3)),
        ((5,), (0,)),
        ((1,), (0,)),
        ((0, 5), (0, 0)),
    ],
)
def test_outputs_that_overlap_themselves(shape, stride):
    x = torch.zeros(64).as_strided(shape, stride)
    if overlaps(x):
        with pytest.raises(ShapeError, match="do not share memory"):
            probe.write(x)
    else:
        probe.write(x)


def test_writing_bumps_the_version_counter():
    out = torch.zeros(3)
    version = out._version
    probe.write(out)
    assert out._version == version + 1
    leaf = torch.ones(3, requires_grad=True)
    saved = leaf * 1
    squared = saved * saved
    probe.write(saved.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.sum().backward()


def test_writing_an_inference_tensor():
    with torch.inference_mode():
        probe.write(torch.zeros(3))


def test_alignment():
    x = torch.zeros(64, dtype=torch.bfloat16)
    base = x.data_ptr() % 16 // 2  # elements past a 16-byte boundary
    aligned = x[(8 - base) % 8 :][:32]
    probe.require_aligned(aligned, 16)
    probe.require_aligned(aligned.view(4, 8), 16)
    probe.require_aligned(aligned[3:3], 16)  # no elements
    with pytest.raises(ShapeError) as caught:
        probe.require_aligned(aligned[1:], 16)
    assert str(caught.value) == (
        "require_aligned: tensor must be aligned to 16 bytes, got an address 2 bytes past a "
        "multiple (a storage offset); call .clone()"
    )
    with pytest.raises(ShapeError) as caught:
        probe.require_aligned(aligned[:27].view(3, 9)[:, :8], 16)
    assert str(caught.value) == (
        "require_aligned: tensor must be of strides that are multiples of 16 bytes, got strides "
        "(9, 1) of torch.bfloat16"
    )
    probe.require_aligned(aligned[:9].view(1, 9)[:, :8], 16)  # size 1: its stride is not used


def test_contiguous():
    probe.require_contiguous(torch.zeros(2, 3))
    with pytest.raises(ShapeError) as caught:
        probe.require_contiguous(torch.zeros(3, 2).t())
    assert str(caught.value) == (
        "require_contiguous: tensor must be contiguous, got strides (1, 2) for shape (2, 3)"
    )
