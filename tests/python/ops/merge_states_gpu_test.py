"""merge_states against its definition in float64."""

import pytest
import torch

from astrai.extension.ops import merge_states, reference
from tests.python.ops.attention_inputs import randn

TOLERANCE = {
    torch.bfloat16: {"atol": 1e-3, "rtol": 2**-8},
    torch.float16: {"atol": 1e-4, "rtol": 2**-10},
    torch.float32: {"atol": 1e-6, "rtol": 1e-5},
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (5, 8, 128), (3, 7, 4, 72), (40, 2, 1), (2, 3, 257)])
def test_case_c13_states_with_and_without_keys(dtype, shape):
    parts = []
    for seed in (1, 2):
        o, lse = randn(*shape, dtype=dtype, seed=seed), 9 * torch.randn(shape[:-1], device="cuda")
        empty = torch.rand(shape[:-1], device="cuda") < 0.3
        o[empty], lse[empty] = torch.nan, float("-inf")
        parts += [o, lse]
    want = reference.merge_states(*(x.double() for x in parts))
    out, lse = merge_states(*parts)
    assert out.dtype == dtype and lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), want[0], **TOLERANCE[dtype])
    torch.testing.assert_close(lse.double(), want[1], atol=1e-5, rtol=1e-6)


def test_case_c02_nothing_to_merge():
    out, lse = merge_states(*(torch.zeros(s, device="cuda") for s in ((0, 4, 64), (0, 4)) * 2))
    assert out.shape == (0, 4, 64) and lse.shape == (0, 4)


def test_copies_are_made_of_what_is_not_contiguous():
    o, lse = randn(4, 6, 64), torch.randn(4, 6, device="cuda")
    want = merge_states(o, lse, o, lse)
    got = merge_states(o.transpose(0, 1).contiguous().transpose(0, 1), lse.T.contiguous().T, o, lse)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
