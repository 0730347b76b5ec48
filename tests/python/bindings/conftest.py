import binding_probe
import pytest

HAS_EXCHANGE_API = binding_probe.use_exchange_api(True)


@pytest.fixture(params=["exchange_api", "dlpack_capsule"])
def path(request):
    """Both ways to read a tensor; the first exists from torch 2.10 on."""
    if request.param == "exchange_api" and not HAS_EXCHANGE_API:
        pytest.skip("this torch has no __dlpack_c_exchange_api__")
    in_use = binding_probe.use_exchange_api(request.param == "exchange_api")
    assert in_use == (request.param == "exchange_api")
    yield request.param
    binding_probe.use_exchange_api(True)
