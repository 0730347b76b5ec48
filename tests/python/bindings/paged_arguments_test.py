"""Arguments of the paged, ragged and merging operators as their kernels get them, without a GPU.

The same refusals run on CUDA tensors, through the public functions, in tests/python/ops.
"""

import re

import binding_probe as probe
import pytest
import torch

from astrai.extension.errors import ShapeError
from tests.python.ops.bad_arguments import Make, needs_two_devices
from tests.python.ops.bad_paged_arguments import (
    MERGE,
    PAGED,
    PAGED_DECODE,
    VARLEN,
    fill,
    good_merge,
    good_paged,
    good_varlen,
)

pytestmark = pytest.mark.usefixtures("path")

CPU = Make("cpu")
FEATURES = {
    "is_causal": False,
    "scale": None,
    "window": (-1, -1),
    "softcap": 0.0,
    "sinks": None,
    "k_scale": None,
    "v_scale": None,
}
INT_MAX = 2**31 - 1


def refused(call, error, text):
    with pytest.raises(error, match="^" + re.escape(text)):
        call()


def on_one_device(cases):
    return [name for name in cases if not needs_two_devices(name)]


def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=None, max_seqlen_k=None, **more):
    features = [more.get(name, value) for name, value in FEATURES.items()]
    out = more.get("out", torch.full((*q.shape[:-1], v.shape[-1]), 7.0, dtype=q.dtype))
    tensors = (q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return probe.varlen_params(*tensors, *features, out, more.get("lse"))


def paged(name, **given):
    """``name``: attn_paged_decode or attn_paged_prefill."""
    tables = ("req_to_token", "req_pool_indices", "block_table", "kv_indptr", "qo_indptr")
    order = ("q", "k_cache", "v_cache", *tables, "max_q_len", "new_k", "new_v", "mask")
    features = [given.get(name, value) for name, value in FEATURES.items()]
    q, v_cache = given["q"], given["v_cache"]
    out = given.get("out", torch.full((*q.shape[:-1], v_cache.shape[-1]), 7.0, dtype=q.dtype))
    most = 16 if name == "attn_paged_decode" else INT_MAX
    inputs = [given.get(argument) for argument in order]
    return probe.paged_params(name, most, *inputs, *features, out, given.get("lse"))


@pytest.mark.parametrize("case", on_one_device(VARLEN))
def test_varlen_refuses(case):
    change, error, text = VARLEN[case]
    args = {**good_varlen(CPU), **change(CPU)}
    refused(lambda: varlen(**args), error, f"attn_varlen: {text}")


@pytest.mark.parametrize("case", on_one_device(PAGED))
@pytest.mark.parametrize("name", ["attn_paged_decode", "attn_paged_prefill"])
def test_paged_refuses(name, case):
    change, error, text = PAGED[case]
    args = {**good_paged(CPU), "qo_indptr": CPU.ints(0, 1, 2), **change(CPU)}
    refused(lambda: paged(name, **args), error, f"{name}: {text}")


@pytest.mark.parametrize("case", on_one_device(PAGED_DECODE))
def test_paged_decode_refuses(case):
    change, error, text = PAGED_DECODE[case]
    args = {**good_paged(CPU), **change(CPU)}
    refused(lambda: paged("attn_paged_decode", **args), error, f"attn_paged_decode: {text}")


def test_varlen_params():
    good = good_varlen(CPU)
    lse = torch.empty(7, 8)
    params = varlen(**good, lse=lse, is_causal=True)
    assert params["sizes"] == (2, 7, 12, 8, 2, 64, 64)
    assert params["total_q"] == 7
    starts = (good["cu_seqlens_q"].data_ptr(), good["cu_seqlens_k"].data_ptr())
    assert params["indptr"] == starts
    assert params["q"] == (good["q"].data_ptr(), 0, 512, 64)
    assert params["k"] == (good["k"].data_ptr(), 0, 128, 64)
    assert (params["lse"], params["causal"], params["why_not"]) == (lse.data_ptr(), True, "")
    assert varlen(**good, max_seqlen_q=4, max_seqlen_k=9)["sizes"][1:3] == (4, 9)
    assert varlen(**good, max_seqlen_q=99, max_seqlen_k=99)["sizes"][1:3] == (7, 12)


def test_case_d02_varlen_slices_of_packed_qkv():
    q, k, v = CPU.randn(7, 3, 4, 64).unbind(1)
    starts = CPU.ints(0, 3, 7)
    params = varlen(q, k, v, starts, starts)
    for name, x in (("q", q), ("k", k), ("v", v)):
        assert params[name] == (x.data_ptr(), 0, 3 * 4 * 64, 64)


def test_case_c02_varlen_without_queries():
    params = varlen(
        CPU.randn(0, 8, 64),
        CPU.randn(5, 2, 64),
        CPU.randn(5, 2, 64),
        CPU.ints(0, 0),
        CPU.ints(0, 5),
    )
    assert (params["total_q"], params["why_not"]) == (0, "")


def test_token_table_params():
    good = good_paged(CPU)
    params = paged("attn_paged_decode", **good)
    assert params["sizes"] == (2, 1, 6, 8, 2, 64, 64)
    assert params["q"] == (good["q"].data_ptr(), 512, 512, 64)
    assert params["k"] == (good["k_cache"].data_ptr(), 128, 128, 64)
    table = good["req_to_token"]
    rows = good["req_pool_indices"].data_ptr()
    assert params["pages"] == (table.data_ptr(), 6, 6, rows, 1)
    assert params["indptr"] == (0, good["kv_indptr"].data_ptr())
    assert (params["new_k"][0], params["mask"][0], params["why_not"]) == (0, 0, "")


def test_case_d11_a_table_row_may_be_wider_than_its_part():
    good = good_paged(CPU)
    wide = fill(CPU, 3, 50)[:, 2:8]
    params = paged("attn_paged_decode", **(good | {"req_to_token": wide}))
    assert params["pages"][:3] == (wide.data_ptr(), 50, 6)


def test_slots_of_a_cache_of_larger_pages():
    good = good_paged(CPU)
    k, v = CPU.randn(5, 4, 2, 64), CPU.randn(5, 4, 2, 64)
    params = paged("attn_paged_decode", **(good | {"k_cache": k, "v_cache": v}))
    assert params["k"] == (k.data_ptr(), 128, 128, 64)
    assert params["pages"][4] == 1


@pytest.mark.parametrize("page_size", [1, 2, 16, 256])
def test_case_d02_block_table_and_interleaved_caches(page_size):
    cache = CPU.randn(3, 2, page_size, 2, 64)
    k, v = cache[:, 0], cache[:, 1]
    block_table, kv_indptr, qo_indptr = fill(CPU, 2, 5), CPU.ints(0, 1, 1), CPU.ints(0, 3, 7)
    q = CPU.randn(7, 8, 64)
    new = CPU.randn(7, 4, 64)
    params = paged(
        "attn_paged_decode",
        q=q,
        k_cache=k,
        v_cache=v,
        block_table=block_table,
        kv_indptr=kv_indptr,
        qo_indptr=qo_indptr,
        new_k=new[:, :2],
        new_v=new[:, 2:],
    )
    assert params["sizes"] == (2, 7, 5 * page_size, 8, 2, 64, 64)
    assert params["total_q"] == 7
    assert params["pages"] == (block_table.data_ptr(), 5, 5, 0, page_size)
    page = 2 * page_size * 128
    assert params["k"] == (k.data_ptr(), page, 128, 64)
    assert params["v"] == (v.data_ptr(), page, 128, 64)
    assert params["new_k"] == (new.data_ptr(), 256, 256, 64)
    assert params["new_v"] == (new[:, 2:].data_ptr(), 256, 256, 64)
    assert params["why_not"] == ""


def test_most_queries_of_a_request():
    good = good_paged(CPU)
    many = {"q": CPU.randn(40, 8, 64), "qo_indptr": CPU.ints(0, 16, 32)}
    assert paged("attn_paged_decode", **good | many)["sizes"][1] == 16
    assert paged("attn_paged_decode", **good | many, max_q_len=4)["sizes"][1] == 4
    assert paged("attn_paged_prefill", **good | many)["sizes"][1] == 40
    assert paged("attn_paged_prefill", **good | many, max_q_len=33)["sizes"][1] == 33


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        # batch, head, q, rows, width
        ((2, 6), (6, 0, 0, 5, 6)),
        ((1, 9), (0, 0, 0, 5, 9)),
        ((2, 8, 5, 6), (240, 30, 6, 5, 6)),
        ((2, 1, 3, 6), (18, 0, 6, 3, 6)),
        ((1, 8, 1, 4), (0, 4, 0, 5, 4)),
        ((2, 0), (0, 0, 0, 5, 0)),
    ],
    ids=str,
)
def test_mask_params(shape, expected):
    mask = CPU.ones(*shape)
    good = good_paged(CPU) | {"q": CPU.randn(5, 8, 64), "qo_indptr": CPU.ints(0, 2, 5)}
    params = paged("attn_paged_prefill", **good, mask=mask)
    strides = params["mask"][1:]
    assert params["mask"][0] != 0
    assert strides[3:] == expected[3:]
    if mask.numel():
        assert params["mask"] == (mask.data_ptr(), *expected)


def test_case_c02_paged_without_requests_or_table():
    good = good_paged(CPU)
    none = {
        "q": CPU.randn(0, 8, 64),
        "req_pool_indices": CPU.ints(),
        "kv_indptr": CPU.ints(0),
    }
    assert paged("attn_paged_decode", **good | none)["why_not"] == ""
    params = paged("attn_paged_decode", **good | {"req_to_token": fill(CPU, 3, 0)})
    assert (params["sizes"][2], params["why_not"]) == (0, "")
    assert params["pages"][0] != 0


def test_case_d03_stride_of_a_size_1_dimension():
    good = good_paged(CPU)
    one = CPU.randn(20, 64).as_strided((20, 1, 64), (64, 7, 1))
    params = paged("attn_paged_decode", **good | {"k_cache": one, "v_cache": one})
    assert params["k"] == (one.data_ptr(), 64, 64, 64)


def test_output_that_shares_memory():
    good = good_paged(CPU)
    refused(
        lambda: paged("attn_paged_decode", **good, out=good["q"]),
        ShapeError,
        "attn_paged_decode: out must be in memory apart from q, got memory that both share",
    )
    new = {"new_k": good["k_cache"][3:5], "new_v": CPU.randn(2, 2, 64)}
    refused(
        lambda: paged("attn_paged_decode", **good, **new),
        ShapeError,
        "attn_paged_decode: k_cache must be in memory apart from new_k, got memory that both share",
    )


@pytest.mark.parametrize("which", ["q", "k_cache", "v_cache", "new_k", "new_v", "sinks"])
def test_autograd(which):
    args = good_paged(CPU) | {
        "new_k": CPU.randn(2, 2, 64),
        "new_v": CPU.randn(2, 2, 64),
        "sinks": torch.zeros(8),
    }
    args[which].requires_grad_()
    with pytest.raises(RuntimeError, match=f"attn_paged_decode: {which} requires grad.*autograd"):
        paged("attn_paged_decode", **args)
    with torch.no_grad():
        assert paged("attn_paged_decode", **args)["why_not"] == ""


def merge(o_a, lse_a, o_b, lse_b, out=None, lse=None):
    out = torch.empty_like(o_a) if out is None else out
    lse = torch.empty(lse_a.shape) if lse is None else lse
    return probe.merge_params(o_a, lse_a, o_b, lse_b, out, lse)


@pytest.mark.parametrize("case", on_one_device(MERGE))
def test_merge_refuses(case):
    change, error, text = MERGE[case]
    refused(lambda: merge(**good_merge(CPU) | change(CPU)), error, f"merge_states: {text}")


def test_merge_params():
    good = good_merge(CPU)
    params = merge(**good)
    assert (params["dtype"], params["sizes"]) == ("bfloat16", (40, 64))
    assert params["inputs"] == tuple(x.data_ptr() for x in good.values())
    assert merge(**good, out=good["o_a"])["outputs"][0] == good["o_a"].data_ptr()
    refused(
        lambda: merge(**good, out=good["o_a"].view(8, 5, 64)),
        ShapeError,
        "merge_states: out must be of shape (5, 8, 64) like o_a, got (8, 5, 64)",
    )
