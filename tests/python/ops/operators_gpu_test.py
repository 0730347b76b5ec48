"""The paged, ragged and appending operators on a GPU: opcheck, compile, streams, devices."""

import pytest
import torch

from astrai.extension import loader
from astrai.extension.ops import (
    attn_paged_decode,
    attn_paged_prefill,
    attn_varlen,
    build_q_work_map,
    merge_states,
    rope_append_kv,
)
from astrai.extension.ops.reference import Features
from tests.python.ops.attention_inputs import check
from tests.python.ops.bad_append_arguments import good_append
from tests.python.ops.bad_arguments import Make
from tests.python.ops.bad_paged_arguments import good_merge, good_paged, good_varlen
from tests.python.ops.paged_inputs import clone, problem, raw

CUDA = Make("cuda")
OPS = torch.ops.astrai
MODULES = ("attn_decode", "attn_paged_decode", "attn_paged_prefill", "attn_prefill", "rotary_emb")
FEATURES = (True, 0.2, [3, 0], 5.0, None, 0.5, None, None, None)


def test_opcheck():
    good = good_paged(CUDA)
    order = ("q", "k_cache", "v_cache", "req_to_token", "req_pool_indices")
    paged = (*(good[name] for name in order), None, good["kv_indptr"])
    qo_indptr = CUDA.ints(0, 1, 2)
    out, lse = torch.zeros(2, 8, 64, device="cuda").bfloat16(), torch.zeros(2, 8, device="cuda")
    new = CUDA.randn(2, 2, 64), CUDA.randn(2, 2, 64, seed=9)
    varlen = tuple(good_varlen(CUDA).values())
    append = (*good_append(CUDA).values(), True)
    q, k, v = CUDA.randn(2, 1, 8, 64), CUDA.randn(2, 9, 2, 64), CUDA.randn(2, 9, 2, 64, seed=4)
    calls = [
        (OPS.attn_decode, (q, k, v, None, *FEATURES, True)),
        (OPS.attn_prefill_lse, (q, k, v, None, *FEATURES)),
        (OPS.attn_varlen, varlen),
        (OPS.attn_varlen_lse, (*varlen, 4, 7, *FEATURES)),
        (OPS.attn_paged_decode, paged),
        (OPS.attn_paged_decode_lse, (*paged, qo_indptr, 1, None, *FEATURES, True)),
        (
            OPS.attn_paged_decode_out,
            (*paged, None, None, None, *FEATURES, False, *new, out, lse, None),
        ),
        (OPS.attn_paged_prefill, (*paged, qo_indptr)),
        (OPS.attn_paged_prefill_lse, (*paged, qo_indptr, 1, None, None, None, *FEATURES)),
        (OPS.merge_states, tuple(good_merge(CUDA).values())),
        (OPS.rope_append_kv, append),
        (OPS.rope_append_kv_, append),
        (OPS.rope_append_kv_only, append[1:]),
    ]
    for packet, args in calls:
        copies = tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in args)
        torch.library.opcheck(packet.default, copies)
    # The order of entries is free, so values of two calls need not be the same.
    torch.library.opcheck(
        OPS.build_q_work_map.default,
        (CUDA.ints(0, 70, 80, 210), 210),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_case_e05_e09_a_compiled_step_is_the_eager_one(mode):
    """Rotation, append and attention of a decode step, over caches that it mutates."""
    p = problem([77, 300, 16])
    positions = torch.tensor([76, 299, 15], device="cuda")
    pages = p.table.long().gather(1, positions[:, None] // 16)[:, 0]
    slots = pages * 16 + positions % 16
    table = CUDA.table(400, 128)
    block_table, kv_indptr = p.table, p.kv_indptr

    def step(q, k, v, k_cache, v_cache):
        q = rope_append_kv(q, k, v, table, positions, k_cache, v_cache, slots, interleaved=False)
        return attn_paged_decode(
            q, k_cache, v_cache, None, None, kv_indptr, block_table=block_table
        )

    new = CUDA.randn(3, 2, 128, seed=5), CUDA.randn(3, 2, 128, seed=6)
    before = [clone(p.k_cache), clone(p.v_cache)]
    want = step(p.q, *new, p.k_cache, p.v_cache)
    want_k = clone(p.k_cache)
    compiled = torch.compile(step, fullgraph=True, mode=mode)
    for _ in range(4):
        p.k_cache.copy_(before[0])
        p.v_cache.copy_(before[1])
        got = compiled(p.q, *new, p.k_cache, p.v_cache)
        assert torch.equal(got, want) and torch.equal(raw(p.k_cache), raw(want_k))


def calls():
    """Each operator as a call without arguments, and its result."""
    p = problem([77, 300, 16], append=True)
    prefill = problem([77, 300, 16], [77, 100, 3])
    varlen = good_varlen(CUDA)
    merge = good_merge(CUDA)
    return {
        "paged_decode": lambda: attn_paged_decode(**p.arguments()),
        "paged_prefill": lambda: attn_paged_prefill(**prefill.arguments(), is_causal=True),
        "varlen": lambda: attn_varlen(**varlen),
        "merge": lambda: merge_states(**merge)[0],
    }


@pytest.mark.parametrize("name", ["paged_decode", "paged_prefill", "varlen", "merge"])
def test_graphs_and_streams(name):
    call = calls()[name]
    want = call()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        out = call()
    side.synchronize()
    torch.testing.assert_close(out, want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    out.fill_(torch.nan)
    graph.replay()
    torch.testing.assert_close(out, want)


def test_late_inputs_are_waited_for():
    p = problem([3000, 20])
    want, _ = p.expected()
    q, p.q = p.q, torch.zeros_like(p.q)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        p.q.copy_(q)
        out = attn_paged_decode(**p.arguments())
    side.synchronize()
    check(out, None, want, q.dtype)


def test_the_older_way_to_read_tensors():
    want = {name: call() for name, call in calls().items()}
    modules = [loader.get_module(name) for name in MODULES]
    for module in modules:
        module.use_exchange_api(False)
    try:
        for name, call in calls().items():
            torch.testing.assert_close(call(), want[name])
        append = good_append(CUDA)
        append |= {name: append[name].to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")}
        before = clone(append["k_cache"])
        rope_append_kv(**append, interleaved=True)
        assert not torch.equal(raw(append["k_cache"]), raw(before))
    finally:
        for module in modules:
            module.use_exchange_api(True)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")
def test_case_e07_tensors_on_the_second_device():
    with torch.cuda.device(1):
        p = problem([77, 300, 16], append=True)
        features = Features()
        want, _ = p.expected(features)
    assert torch.cuda.current_device() == 0
    out = attn_paged_decode(**p.arguments())
    assert out.device.index == 1
    check(out, None, want, p.q.dtype)
    batch, _ = build_q_work_map(torch.tensor([0, 70], dtype=torch.int32, device="cuda:1"))
    assert batch.tolist() == [0, 0] and torch.cuda.current_device() == 0
