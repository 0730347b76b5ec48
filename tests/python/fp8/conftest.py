"""Each test of fp8 starts and ends in a process without the override."""

import pytest

from astrai.extension.fp8 import fp8_linear_enable
from astrai.extension.fp8.region import LOCAL


@pytest.fixture(autouse=True)
def without_override():
    fp8_linear_enable(False)
    yield
    fp8_linear_enable(False)
    assert LOCAL.frame is None and LOCAL.replay is None and LOCAL.tapes == ()
