"""What the paged, ragged, merging and appending operators refuse, with the exact words."""

import re

import pytest
import torch

from astrai.extension.errors import DtypeError, ShapeError
from astrai.extension.ops import (
    attn_paged_decode,
    attn_paged_prefill,
    attn_varlen,
    build_q_work_map,
    merge_states,
    rope_append_kv,
)
from tests.python.ops.bad_append_arguments import APPEND, good_append
from tests.python.ops.bad_arguments import Make
from tests.python.ops.bad_paged_arguments import (
    MERGE,
    PAGED,
    PAGED_DECODE,
    VARLEN,
    good_merge,
    good_paged,
    good_varlen,
)

CUDA = Make("cuda")


def refused(function, args, error, text):
    before = {
        name: x.clone() for name, x in args.items() if isinstance(x, torch.Tensor) and x.is_cuda
    }
    with pytest.raises(error, match="^" + re.escape(f"{function.__name__}: {text}")):
        function(**args)
    torch.cuda.synchronize()
    assert all(torch.equal(args[name], x) for name, x in before.items() if x.element_size() > 1)


@pytest.mark.parametrize("case", PAGED)
@pytest.mark.parametrize("function", [attn_paged_decode, attn_paged_prefill])
def test_paged(function, case):
    change, error, text = PAGED[case]
    args = {**good_paged(CUDA), "qo_indptr": CUDA.ints(0, 1, 2), **change(CUDA)}
    refused(function, args, error, text)


@pytest.mark.parametrize("case", PAGED_DECODE)
def test_paged_decode(case):
    change, error, text = PAGED_DECODE[case]
    refused(attn_paged_decode, good_paged(CUDA) | change(CUDA), error, text)


@pytest.mark.parametrize("case", VARLEN)
def test_varlen(case):
    change, error, text = VARLEN[case]
    refused(attn_varlen, good_varlen(CUDA) | change(CUDA), error, text)


@pytest.mark.parametrize("case", MERGE)
def test_merge(case):
    change, error, text = MERGE[case]
    refused(merge_states, good_merge(CUDA) | change(CUDA), error, text)


@pytest.mark.parametrize("case", APPEND)
def test_append(case):
    change, error, text = APPEND[case]
    args = {"interleaved": False, **good_append(CUDA), **change(CUDA)}
    refused(rope_append_kv, args, error, text)


def test_buffers():
    good = good_paged(CUDA)
    small = CUDA.randn(1, 8, 64)
    with pytest.raises(ShapeError, match=r"out_buf must be of at least 2 rows like q, got shape"):
        attn_paged_decode(**good, out_buf=small)
    with pytest.raises(DtypeError, match=r"out must be torch\.bfloat16 like q, got torch\.float16"):
        attn_paged_decode(**good, out_buf=CUDA.randn(2, 8, 64, dtype=torch.float16))
    with pytest.raises(DtypeError, match=r"o_part_buf must be torch\.float32"):
        attn_paged_decode(**good, o_part_buf=small, ml_part_buf=small)
    with pytest.raises(TypeError, match=r"qo_indptr must be a torch\.Tensor, got None"):
        attn_paged_prefill(**good, qo_indptr=None)


def test_work_map():
    with pytest.raises(DtypeError, match=r"build_q_work_map: qo_indptr must be torch\.int32"):
        build_q_work_map(CUDA.ints(0, 5).long())
    with pytest.raises(RuntimeError, match="qo_indptr must be a CUDA tensor"):
        build_q_work_map(CUDA.ints(0, 5).cpu())


@pytest.mark.parametrize("which", ["q", "k_cache", "v_cache", "new_k", "new_v", "out_buf"])
def test_autograd(which):
    args = good_paged(CUDA) | {name: CUDA.randn(2, 2, 64) for name in ("new_k", "new_v")}
    args["out_buf"] = CUDA.randn(2, 8, 64)
    args[which].requires_grad_()
    with pytest.raises(RuntimeError, match=r"attn_paged_decode: \w+ requires grad.*autograd"):
        attn_paged_decode(**args)
    with torch.no_grad():
        attn_paged_decode(**args)
