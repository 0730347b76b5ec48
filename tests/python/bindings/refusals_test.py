"""Every tensor that a kernel must not get, and what is said about it, on both paths."""

import binding_probe as probe
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from astrai.extension.errors import DtypeError, ShapeError

pytestmark = pytest.mark.usefixtures("path")


class PlainSubclass(torch.Tensor):
    pass


def refused(error, text, function, *args):
    """Calls, and checks the whole message."""
    with pytest.raises(error) as caught:
        function(*args)
    assert str(caught.value) == text
    return caught.value


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (None, "None"),
        ([1.0], "list"),
        (1.0, "float"),
        (np.zeros(3), "numpy.ndarray"),
        (torch.float32, "torch.dtype"),
    ],
    ids=["none", "list", "float", "numpy", "dtype"],
)
def test_no_tensor(value, kind):
    refused(TypeError, f"view: tensor must be a torch.Tensor, got {kind}", probe.view, value)


SUBCLASS = ", a subclass; call the operator in torch.ops.astrai, which dispatches on subclasses"


def test_fake_tensor_inside_and_outside_its_mode():
    kind = "torch._subclasses.fake_tensor.FakeTensor"
    text = f"view: tensor must be a torch.Tensor, got {kind}{SUBCLASS}"
    with FakeTensorMode():
        fake = torch.zeros(3)
        refused(TypeError, text, probe.view, fake)
    refused(TypeError, text, probe.view, fake)


def test_subclass():
    with pytest.raises(TypeError, match=r"PlainSubclass, a subclass; call the operator"):
        probe.view(torch.zeros(3).as_subclass(PlainSubclass))


def test_dtensor():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        x = distribute_tensor(torch.zeros(4), mesh, [Replicate()])
        assert not probe.direct(x)
        with pytest.raises(TypeError, match=r"DTensor, a subclass; call the operator"):
            probe.view(x)
        assert probe.view(x.to_local())["shape"] == (4,)
    finally:
        dist.destroy_process_group()


def test_functional_tensor():
    refused(
        TypeError,
        "view: tensor must be a tensor with memory of its own, got a functional tensor; call the "
        "operator in torch.ops.astrai, which torch can trace",
        probe.view,
        torch._to_functional_tensor(torch.zeros(3)),
    )


FUNCTORCH = (
    "view: tensor must be a tensor with memory of its own, got a tensor inside a functorch "
    "transform such as vmap; call the operator in torch.ops.astrai, which torch can batch"
)


def test_vmap():
    refused(TypeError, FUNCTORCH, torch.vmap(probe.view), torch.zeros(3, 2))


def test_nested_vmap_and_grad_transform():
    refused(TypeError, FUNCTORCH, torch.vmap(torch.vmap(probe.view)), torch.zeros(3, 2, 2))

    def loss(x):
        probe.view(x)
        return x.sum()

    refused(TypeError, FUNCTORCH, torch.func.grad(loss), torch.zeros(3))


@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr", "_mkldnn"])
@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
def test_sparse_layouts(layout):
    x = torch.zeros(3, 3)
    x = {
        "sparse_coo": torch.Tensor.to_sparse,
        "sparse_csr": torch.Tensor.to_sparse_csr,
        "_mkldnn": torch.Tensor.to_mkldnn,
    }[layout](x)
    error = refused(
        TypeError,
        f"view: tensor must be a dense tensor (layout torch.strided), got layout torch.{layout}",
        probe.view,
        x,
    )
    assert error.__cause__ is not None  # torch's own words


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_quantized_and_nested():
    quantized = torch.quantize_per_tensor(torch.zeros(3), 1.0, 0, torch.qint8)
    refused(
        TypeError,
        "view: tensor must be a tensor with memory, got dtype torch.qint8 on device cpu whose "
        "memory torch does not give out",
        probe.view,
        quantized,
    )
    nested = torch.nested.nested_tensor([torch.zeros(3), torch.zeros(2)])
    with pytest.raises(TypeError, match="whose memory torch does not give out"):
        probe.view(nested)


@pytest.mark.parametrize("size", [0, 3])
def test_meta_tensor(size):
    refused(
        TypeError,
        "view: tensor must be a tensor with memory, got a meta tensor; the operator in "
        "torch.ops.astrai infers shapes from meta tensors",
        probe.view,
        torch.zeros(size, device="meta"),
    )


NEGATED = (
    "view: tensor must be a tensor without the negative bit, got a negated view; call "
    ".resolve_neg()"
)


def test_negative_bit():
    x = torch.zeros(3, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    refused(TypeError, NEGATED, probe.view, x)
    refused(TypeError, NEGATED, probe.view, torch._neg_view(torch.zeros(3, dtype=torch.bfloat16)))
    assert probe.view(x.resolve_neg())["shape"] == (3,)


def test_conjugate_bit():
    x = torch.zeros(3, dtype=torch.complex64).conj()
    refused(
        TypeError,
        "view: tensor must be a tensor without the conjugate bit, got a conjugated view; call "
        ".resolve_conj()",
        probe.view,
        x,
    )
    assert probe.view(x.resolve_conj())["dtype"] == "a complex dtype"


def test_requires_grad_with_and_without_no_grad():
    text = (
        "view: tensor requires grad, but this kernel has no autograd formula; call it under "
        "torch.no_grad() or pass tensor.detach()"
    )
    x = torch.zeros(3, requires_grad=True)
    refused(RuntimeError, text, probe.view, x)
    refused(RuntimeError, text, probe.view, x * 2)
    with torch.no_grad():
        assert probe.view(x)["shape"] == (3,)
    with torch.inference_mode():
        assert probe.view(x)["shape"] == (3,)
    assert probe.view(x.detach())["shape"] == (3,)


def test_output_that_requires_grad():
    out = torch.zeros(3, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"write: out requires grad.*autograd"):
        probe.write(out)
    with torch.no_grad():
        probe.write(out)


def test_rank_above_8():
    refused(
        ShapeError,
        "view: tensor must be of rank 8 at most, got rank 9",
        probe.view,
        torch.zeros([1] * 9),
    )


def test_elements_not_on_their_own_alignment():
    x = torch.frombuffer(bytearray(17), dtype=torch.float32, offset=1, count=4)
    refused(
        ShapeError,
        "view: tensor must be aligned to its elements of 4 bytes, got an address that is not a "
        "multiple of it",
        probe.view,
        x,
    )


def test_cpu_tensor_for_a_cuda_kernel():
    refused(
        RuntimeError,
        "require_cuda: tensor must be a CUDA tensor, got a tensor on cpu",
        probe.require_cuda,
        torch.zeros(3),
    )


def test_an_exception_does_not_stick():
    with pytest.raises(TypeError):
        probe.view(None)
    assert probe.view(torch.zeros(3))["shape"] == (3,)


def test_error_classes():
    assert issubclass(ShapeError, ValueError) and issubclass(ShapeError, RuntimeError)
    assert issubclass(DtypeError, TypeError) and issubclass(DtypeError, RuntimeError)
