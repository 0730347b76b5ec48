"""What dense attention refuses, with the exact words, and that a refusal writes nothing."""

import re

import pytest
import torch

from astrai.extension.errors import ShapeError
from astrai.extension.ops import attn_decode, attn_prefill
from tests.python.ops.attention_inputs import qkv
from tests.python.ops.bad_arguments import ATTENTION, Make, good_attention

FUNCTIONS = {"attn_decode": attn_decode, "attn_prefill": attn_prefill}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("case", ATTENTION)
def test_bad_argument(name, case):
    change, error, text = ATTENTION[case]
    t = Make("cuda")
    good = good_attention(t)
    args = {**good, **change(t)}
    out = args.setdefault("out", torch.full_like(good["q"], 7.0))
    before = out.clone()
    with pytest.raises(error, match="^" + re.escape(f"{name}: {text}")):
        FUNCTIONS[name](**args)
    torch.cuda.synchronize()
    assert torch.equal(out, before)


def test_decode_takes_one_query():
    with pytest.raises(RuntimeError, match=r"attn_decode: Q seq_len must be 1, got 3"):
        attn_decode(*qkv(2, 3, 40, 8, 2, 64))


def test_output_that_shares_memory_with_an_input():
    q, k, v = qkv(2, 1, 40, 8, 2, 64)
    with pytest.raises(ShapeError, match="out must be in memory apart from q"):
        attn_decode(q, k, v, out=q)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("which", ["q", "k", "v", "out"])
def test_autograd(name, which):
    q, k, v = qkv(2, 1, 40, 8, 2, 64)
    args = {"q": q, "k": k, "v": v, "out": torch.empty_like(q)}
    args[which].requires_grad_()
    with pytest.raises(RuntimeError, match=f"{name}: {which} requires grad.*autograd"):
        FUNCTIONS[name](**args)
    with torch.no_grad():
        FUNCTIONS[name](**args)


def test_all_cpu_tensors():
    q, k, v = (x.cpu() for x in qkv(2, 1, 40, 8, 2, 64))
    with pytest.raises(RuntimeError, match="q must be a CUDA tensor, got a tensor on cpu"):
        attn_decode(q, k, v)
