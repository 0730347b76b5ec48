"""What rotary embedding refuses, with the exact words, and that a refusal writes nothing."""

import re

import pytest
import torch

from astrai.extension.errors import DtypeError, ShapeError
from astrai.extension.ops import rotary_emb, rotary_embed
from tests.python.ops.attention_inputs import randn
from tests.python.ops.bad_arguments import ROTARY, Make, good_rotary


@pytest.mark.parametrize("case", ROTARY)
@pytest.mark.parametrize("inplace", [False, True])
def test_bad_argument(case, inplace):
    change, error, text = ROTARY[case]
    args = {**good_rotary(Make("cuda")), **change(Make("cuda"))}
    before = {name: x.clone() for name, x in args.items() if isinstance(x, torch.Tensor)}
    with pytest.raises(error, match="^" + re.escape(f"rotary_embed: {text}")):
        rotary_embed(**args, inplace=inplace)
    torch.cuda.synchronize()
    assert all(torch.equal(args[name], x) for name, x in before.items())


def test_in_place_on_tensors_that_share_memory():
    args = good_rotary(Make("cuda"))
    args["q"] = randn(7, 1, 64).expand(7, 4, 64)
    with pytest.raises(ShapeError, match="q must be a tensor whose elements do not share memory"):
        rotary_embed(**args, inplace=True)
    q = args["q"] = randn(7, 2, 64)
    args["k"] = q.view(7, 2, 64)
    with pytest.raises(ShapeError, match="must be in memory apart from"):
        rotary_embed(**args, inplace=True)


@pytest.mark.parametrize(
    ("x_shape", "freqs", "error", "text"),
    [
        ((7, 4, 63), (7, 31, 2), ShapeError, "x must be of an even head_dim, got shape (7, 4, 63)"),
        (
            (7, 4, 64),
            (7, 32),
            ShapeError,
            "freqs_cis must be of shape (7, 32, 2) = [tokens, head_dim / 2, 2], got (7, 32)",
        ),
        (
            (7, 4, 64),
            (1, 32, 2),
            ShapeError,
            "freqs_cis must be of shape (7, 32, 2) = [tokens, head_dim / 2, 2], got (1, 32, 2)",
        ),
        (
            (2, 7, 4, 64),
            (7, 32, 2),
            ShapeError,
            "freqs_cis must be of shape (2, 7, 32, 2) = [batch, tokens, head_dim / 2, 2], got "
            "(7, 32, 2)",
        ),
    ],
)
def test_rotary_emb_bad_shapes(x_shape, freqs, error, text):
    with pytest.raises(error, match="^" + re.escape(f"rotary_emb: {text}")):
        rotary_emb(randn(*x_shape), torch.zeros(freqs, device="cuda"))


def test_rotary_emb_bad_dtypes_and_devices():
    x, freqs = randn(7, 4, 64), torch.zeros(7, 32, 2, device="cuda")
    with pytest.raises(DtypeError, match=r"freqs_cis must be torch\.float32, got torch\.bfloat16"):
        rotary_emb(x, freqs.bfloat16())
    with pytest.raises(DtypeError, match=r"x must be torch\.bfloat16 or torch\.float16"):
        rotary_emb(x.float(), freqs)
    with pytest.raises(RuntimeError, match="freqs_cis must be a CUDA tensor"):
        rotary_emb(x, freqs.cpu())
    with pytest.raises(ShapeError, match=r"out must be of shape \(7, 4, 64\) like x"):
        rotary_emb(x, freqs, out=randn(7, 64, 4))
    storage = randn(8, 4, 64)
    with pytest.raises(ShapeError, match="out must be in memory apart from x"):
        rotary_emb(storage[:7], freqs, out=storage[1:])
    with pytest.raises(RuntimeError, match=r"rotary_emb: x requires grad.*autograd"):
        rotary_emb(x.requires_grad_(), freqs)
