"""Which calls may skip torch's dispatcher."""

import binding_probe as probe
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from astrai.extension.ops import _kernel

X = torch.zeros(3)


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class PlainSubclass(torch.Tensor):
    pass


@pytest.fixture(params=["module", "python"], autouse=True)
def direct(request):
    """The function of the modules, and the one that stands in while no module is loaded."""
    return {"module": probe.direct, "python": _kernel._direct}[request.param]


def test_plain_tensors(direct):
    assert direct() is True
    assert direct(X, None, torch.nn.Parameter(X)) is True


def test_what_is_no_tensor_is_left_to_the_checks_of_the_operator(direct):
    assert direct([1.0], None, 3) is True


def test_subclasses(direct):
    with FakeTensorMode():
        fake = torch.zeros(3)
    assert direct(X, fake) is False
    assert direct(X.as_subclass(PlainSubclass)) is False


@pytest.mark.parametrize("mode", [DispatchMode, FunctionMode, FakeTensorMode])
def test_modes(direct, mode):
    with mode():
        assert direct(X) is False
    assert direct(X) is True


def test_default_device_is_a_function_mode(direct):
    with torch.device("cpu"):
        assert direct(X) is False


def test_functorch_levels(direct):
    answers = []

    def f(x):
        answers.append(direct(X))
        return x

    torch.vmap(f)(torch.zeros(2, 3))
    torch.func.functionalize(f)(X)
    torch.func.jvp(f, (X,), (X,))
    assert answers == [False, False, False]
    assert direct(X) is True


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_jit_trace(direct):
    answers = []

    def f(x):
        answers.append(direct(X))
        return x + 1

    torch.jit.trace(f, (X,), check_trace=False)
    assert answers == [False]
    assert direct(X) is True


def test_make_fx(direct):
    from torch.fx.experimental.proxy_tensor import make_fx

    answers = []

    def f(x):
        answers.append(direct(X))
        return x + 1

    make_fx(f)(X)
    assert answers == [False]
