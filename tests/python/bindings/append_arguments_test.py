"""Arguments of rope_append_kv as the kernel gets them, and what is refused, without a GPU."""

import re

import binding_probe as probe
import pytest
import torch

from astrai.extension.errors import ShapeError
from tests.python.ops.bad_append_arguments import APPEND, good_append
from tests.python.ops.bad_arguments import Make, needs_two_devices

pytestmark = pytest.mark.usefixtures("path")

CPU = Make("cpu")


def append(q, k, v, cos_sin_cache, positions, k_cache, v_cache, slots, **more):
    q_out = more.get("q_out", None if q is None else torch.empty_like(q).contiguous())
    return probe.rope_append_params(
        q,
        k,
        v,
        cos_sin_cache,
        positions,
        k_cache,
        v_cache,
        slots,
        more.get("interleaved", False),
        more.get("rotary_dim"),
        more.get("k_scale"),
        more.get("v_scale"),
        q_out,
    )


@pytest.mark.parametrize("case", [name for name in APPEND if not needs_two_devices(name)])
def test_refuses(case):
    change, error, text = APPEND[case]
    args = good_append(CPU) | change(CPU)
    before = {name: x.clone() for name, x in args.items() if isinstance(x, torch.Tensor)}
    with pytest.raises(error, match="^" + re.escape(f"rope_append_kv: {text}")):
        append(**args)
    assert all(torch.equal(args[name], x) for name, x in before.items() if x.element_size() > 1)


def test_params():
    good = good_append(CPU)
    q_out = torch.empty(7, 4, 64).bfloat16()
    params = append(**good, q_out=q_out, interleaved=True, k_scale=2.0)
    assert (params["dtype"], params["cache_dtype"]) == ("bfloat16", "bfloat16")
    assert params["sizes"] == (7, 2, 64, 64, 64)
    assert params["interleaved"] and params["has_work"] and params["can_implement"]
    assert params["q"] == (4, good["q"].data_ptr(), 256, 64, q_out.data_ptr(), 256, 64)
    k = (good["k"].data_ptr(), 128, 64, good["k_cache"].data_ptr(), 512, 128, 64, 2.0, 0)
    assert params["k"] == k
    assert params["angles"] == (good["cos_sin_cache"].data_ptr(), 20)
    assert params["positions"] == (good["positions"].data_ptr(), True)
    assert params["slots"] == (good["slots"].data_ptr(), True, 20, 4)


def test_case_d04_slices_of_a_fused_qkv_and_in_place():
    fused = CPU.randn(7, 8 * 64)
    q, k, v = (x.unflatten(-1, (-1, 64)) for x in fused.split([256, 128, 128], -1))
    params = append(**good_append(CPU) | {"q": q, "k": k, "v": v}, q_out=q)
    assert params["q"] == (4, q.data_ptr(), 512, 64, q.data_ptr(), 512, 64)
    assert params["k"][:3] == (k.data_ptr(), 512, 64)
    assert params["v"][:3] == (v.data_ptr(), 512, 64)


def test_case_d02_interleaved_e4m3_cache():
    cache = torch.zeros(5, 2, 4, 2, 64).to(torch.float8_e4m3fn)
    step = torch.ones(1)
    caches = {"k_cache": cache[:, 0], "v_cache": cache[:, 1]}
    params = append(**good_append(CPU) | caches, k_scale=step, v_scale=0.5)
    assert params["cache_dtype"] == "float8_e4m3fn"
    assert params["k"][3:] == (cache.data_ptr(), 1024, 128, 64, 1.0, step.data_ptr())
    assert params["v"][3:] == (cache[:, 1].data_ptr(), 1024, 128, 64, 0.5, 0)


def test_caches_of_slots_and_values_of_another_head_dim():
    good = good_append(CPU)
    other = {
        "v": CPU.randn(7, 2, 32),
        "k_cache": CPU.randn(20, 2, 64),
        "v_cache": CPU.randn(20, 2, 32),
    }
    params = append(**good | other)
    assert params["sizes"] == (7, 2, 64, 32, 64)
    assert params["slots"][2:] == (20, 1)
    assert params["can_implement"]


def test_without_q_and_without_rotation():
    good = good_append(CPU)
    params = append(**good | {"q": None})
    assert params["q"][0] == 0 and params["has_work"]
    plain = append(**good | {"cos_sin_cache": None, "positions": None})
    assert plain["sizes"][-1] == 0 and plain["angles"] == (0, 0) and plain["can_implement"]


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_index_dtypes(index):
    good = good_append(CPU)
    good["positions"], good["slots"] = good["positions"].to(index), good["slots"].to(index)
    params = append(**good)
    assert params["positions"][1] == params["slots"][1] == (index is torch.int64)


def test_case_c02_no_tokens():
    good = good_append(CPU)
    for name in ("q", "k", "v", "positions", "slots"):
        good[name] = good[name][:0]
    assert not append(**good)["has_work"]


@pytest.mark.parametrize("which", ["q", "k", "v", "k_cache", "v_cache", "cos_sin_cache"])
def test_autograd(which):
    good = good_append(CPU)
    good[which].requires_grad_()
    with pytest.raises(RuntimeError, match=f"rope_append_kv: {which} requires grad.*autograd"):
        append(**good)


@pytest.mark.parametrize("which", ["k", "v", "k_cache"])
def test_output_that_shares_memory(which):
    good = good_append(CPU)
    storage = CPU.randn(20, 4, 2, 64)
    shared = {"k": storage[0].view(4, 2, 64), "v": storage[1], "k_cache": storage[:5]}[which]
    if which != "k_cache":
        good |= {name: good[name][:4] for name in ("q", "k", "v", "positions", "slots")}
        good[which] = shared
        q_out = storage[:2].view(-1, 4, 64)[:4]
    else:
        good[which] = shared
        q_out = storage.view(-1, 4, 64)[:7]
    with pytest.raises(ShapeError, match=f"q_out must be in memory apart from {which}, got"):
        append(**good, q_out=q_out)
