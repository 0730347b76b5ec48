"""The registered operators over paged and packed tensors; see registration_test.py."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from astrai.extension.ops import (
    attn_paged_decode,
    attn_paged_prefill,
    attn_varlen,
    build_q_work_map,
    merge_states,
    rope_append_kv,
)
from tests.python.ops.bad_append_arguments import good_append
from tests.python.ops.bad_arguments import Make
from tests.python.ops.bad_paged_arguments import (
    good_merge,
    good_paged,
    good_varlen,
)

CPU = Make("cpu")
OPS = torch.ops.astrai
FEATURES = (True, 0.2, [3, 0], 5.0, torch.zeros(8), 0.5, None, None, torch.ones(1))


def paged_tensors(t, block_table=False):
    """The first seven arguments of the operators."""
    good = good_paged(t)
    if block_table:
        good |= {"req_to_token": None, "req_pool_indices": None}
    table = torch.arange(12, dtype=torch.int32, device=t.device).view(2, 6) if block_table else None
    order = ("q", "k_cache", "v_cache", "req_to_token", "req_pool_indices")
    return [*(good[name] for name in order), table, good["kv_indptr"]]


def clones(args):
    return [x.clone() if isinstance(x, torch.Tensor) else x for x in args]


@pytest.mark.parametrize("block_table", [False, True])
def test_opcheck_paged_decode(block_table):
    tensors = paged_tensors(CPU, block_table)
    qo_indptr = CPU.ints(0, 1, 2)
    mask = torch.rand(2, 6) < 0.7
    for rest in ((), (qo_indptr, 1, mask, *FEATURES, True)):
        torch.library.opcheck(OPS.attn_paged_decode.default, (*tensors, *rest))
        torch.library.opcheck(OPS.attn_paged_decode_lse.default, (*tensors, *rest))
    new_k, new_v = CPU.randn(2, 2, 64), CPU.randn(2, 2, 64, seed=9)
    out, lse, workspace = torch.empty(2, 8, 64).bfloat16(), torch.empty(2, 8), torch.empty(64)
    for outs in ((out, lse, workspace), (out, None, None)):
        for new in ((new_k, new_v), (None, None)):
            args = (*tensors, None, None, mask, *FEATURES, False, *new, *outs)
            torch.library.opcheck(OPS.attn_paged_decode_out.default, tuple(clones(args)))


def test_opcheck_paged_prefill():
    tensors = paged_tensors(CPU)
    tensors[0] = CPU.randn(5, 8, 64)
    qo_indptr = CPU.ints(0, 2, 5)
    tiles = build_tiles(qo_indptr)
    for rest in ((), (3, *tiles, torch.rand(2, 8, 3, 6) < 0.7, *FEATURES)):
        torch.library.opcheck(OPS.attn_paged_prefill.default, (*tensors, qo_indptr, *rest))
        torch.library.opcheck(OPS.attn_paged_prefill_lse.default, (*tensors, qo_indptr, *rest))
    outs = (torch.empty(5, 8, 64).bfloat16(), torch.empty(5, 8), None)
    args = (*tensors, qo_indptr, None, None, None, None, *FEATURES, *outs)
    torch.library.opcheck(OPS.attn_paged_prefill_out.default, args)


def build_tiles(qo_indptr):
    return OPS.build_q_work_map(qo_indptr, int(qo_indptr[-1]))


def test_opcheck_the_rest():
    tensors = tuple(good_varlen(CPU).values())
    for rest in ((), (4, 7, *FEATURES)):
        torch.library.opcheck(OPS.attn_varlen.default, (*tensors, *rest))
        torch.library.opcheck(OPS.attn_varlen_lse.default, (*tensors, *rest))
    outs = (torch.empty(7, 8, 64).bfloat16(), torch.empty(7, 8), None)
    torch.library.opcheck(OPS.attn_varlen_out.default, (*tensors, None, None, *FEATURES, *outs))
    torch.library.opcheck(OPS.merge_states.default, tuple(good_merge(CPU).values()))
    torch.library.opcheck(OPS.build_q_work_map.default, (CPU.ints(0, 70, 80, 210), 210))


@pytest.mark.parametrize("e4m3", [False, True])
def test_opcheck_rope_append(e4m3):
    good = good_append(CPU)
    if e4m3:
        good |= {name: good[name].to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")}
    rest = (True, 64, 0.5, None, None, torch.ones(1))
    tensors = tuple(good.values())
    kinds = {
        OPS.rope_append_kv.default: (*tensors, *rest),
        OPS.rope_append_kv_.default: (*tensors, *rest),
        OPS.rope_append_kv_only.default: (*tensors[1:], *rest),
        OPS.rope_append_kv_out.default: (*tensors, *rest, torch.empty_like(good["q"])),
    }
    # The others compare values, for which torch has nothing in float8.
    some = ("test_autograd_registration", "test_faketensor")
    for operator, args in kinds.items():
        utils = {"test_utils": some} if e4m3 else {}
        torch.library.opcheck(operator, tuple(clones(args)), **utils)


class FakeMake(Make):
    """Makes fake tensors, for which there is no generator."""

    def randn(self, *shape, dtype=torch.bfloat16, seed=0):
        return torch.empty(*shape, dtype=dtype, device=self.device)

    def ints(self, *values):
        return torch.empty(len(values), dtype=torch.int32, device=self.device)

    def table(self, *shape):
        return torch.empty(shape, device=self.device)


def test_fake_tensors_on_cuda_need_no_gpu():
    with FakeTensorMode():
        t = FakeMake("cuda")
        paged = good_paged(t)
        v_cache = torch.empty(20, 2, 128, device="cuda", dtype=torch.bfloat16)
        wide = {
            "q": torch.empty(2, 8, 192, device="cuda", dtype=torch.bfloat16),
            "k_cache": torch.empty(20, 2, 192, device="cuda", dtype=torch.bfloat16),
            "v_cache": v_cache,
        }
        out, lse = attn_paged_decode(**paged | wide, return_lse=True)
        assert (out.shape, out.dtype, out.device.type) == ((2, 8, 128), torch.bfloat16, "cuda")
        assert (lse.shape, lse.dtype) == ((2, 8), torch.float32)
        out_buf = torch.empty(5, 8, 128, device="cuda", dtype=torch.bfloat16)
        out = attn_paged_decode(**paged | wide, out_buf=out_buf)
        assert out.shape == (2, 8, 128) and out._base is out_buf
        qo_indptr = t.ints(0, 1, 2)
        out = attn_paged_prefill(**paged | wide, qo_indptr=qo_indptr)
        assert out.shape == (2, 8, 128)
        _, lse = attn_paged_prefill(**paged, qo_indptr=qo_indptr, return_lse=True)
        assert lse.shape == (2, 8)
        out, lse = attn_varlen(**good_varlen(t), return_lse=True)
        assert (out.shape, lse.shape) == ((7, 8, 64), (7, 8))
        merged = merge_states(**good_merge(t))
        assert [x.shape for x in merged] == [(5, 8, 64), (5, 8)]
        batch, index = build_q_work_map(t.ints(0, 70, 80, 210), 210)
        assert batch.shape == index.shape == (6,) and batch.dtype == torch.int32
        append = good_append(t)
        assert rope_append_kv(**append, interleaved=True).shape == (7, 4, 64)
        assert rope_append_kv(**append, interleaved=True, q_out=append["q"]) is append["q"]
        assert rope_append_kv(**append | {"q": None}, interleaved=True) is None
        plain = append | {"cos_sin_cache": None, "positions": None}
        assert rope_append_kv(**plain, interleaved=True) is append["q"]


@pytest.mark.parametrize("with_out", [False, True])
def test_case_e09_compile_a_decode_step(with_out):
    """Rotation, append and attention in one graph, over caches that it mutates."""
    good = good_append(CPU)
    pages = good.pop("k_cache"), good.pop("v_cache")
    block_table = torch.arange(5, dtype=torch.int32).view(1, 5)
    indptr = {"kv_indptr": CPU.ints(0, 17), "qo_indptr": CPU.ints(0, 7)}
    good["slots"] += 10

    def step(q, k_cache, v_cache):
        q = rope_append_kv(
            **good | {"q": q + 1}, k_cache=k_cache, v_cache=v_cache, interleaved=False
        )
        tables = (None, None, indptr["kv_indptr"])
        more = {"qo_indptr": indptr["qo_indptr"], "block_table": block_table, "return_lse": True}
        if with_out:
            more["out_buf"] = torch.empty(9, 4, 64, dtype=q.dtype)
        out, lse = attn_paged_decode(q, k_cache, v_cache, *tables, **more)
        return out * 1, lse

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    copies = [clones(pages) for _ in range(2)]
    q = good["q"]
    # Outside of a trace the functions are CUDA kernels: what they mean is said by the operators.
    with torch.device("cpu"):  # a function mode: calls go to the operators
        expected = step(q, *copies[0])
    got = compiled(q, *copies[1])
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(copies[1], copies[0])
    assert not torch.equal(copies[0][0], pages[0])


def test_case_e09_compile_with_new_tokens_and_dynamic_batch():
    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def compiled(q, k_cache, v_cache, table, rows, kv_indptr, new_k, new_v):
        return attn_paged_decode(q, k_cache, v_cache, table, rows, kv_indptr, new_k, new_v) * 2

    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch in (3, 4, 5):  # no other dimension is of any of these sizes
            table = torch.randperm(70, dtype=torch.int32).view(10, 7)
            k_cache, v_cache = CPU.randn(70, 2, 64), CPU.randn(70, 2, 64, seed=1)
            rows = torch.arange(batch, dtype=torch.int32)
            kv_indptr = torch.arange(batch + 1, dtype=torch.int32) * 6
            q = CPU.randn(batch, 8, 64)
            new_k, new_v = CPU.randn(batch, 2, 64, seed=2), CPU.randn(batch, 2, 64, seed=3)
            args = (table, rows, kv_indptr)
            copies = [k_cache.clone(), v_cache.clone()]
            got = compiled(q, k_cache, v_cache, *args, new_k, new_v)
            with torch.device("cpu"):
                want = attn_paged_decode(q, *copies, *args, new_k, new_v) * 2
            torch.testing.assert_close(got, want)
            torch.testing.assert_close([k_cache, v_cache], copies)
            assert torch.equal(k_cache[table[rows.long(), 5].long()], new_k)


def test_export_ragged_prefill():
    class Attend(torch.nn.Module):
        def forward(self, q, k, v, starts):
            return attn_varlen(q, k, v, starts, starts, is_causal=True)

    q, k, v = CPU.randn(7, 8, 64), CPU.randn(7, 2, 64), CPU.randn(7, 2, 64)
    program = torch.export.export(Attend(), (q, k, v, CPU.ints(0, 3, 7)))
    assert "astrai.attn_varlen.default" in [str(node.target) for node in program.graph.nodes]


@pytest.mark.parametrize("which", ["q", "k_cache", "new_k"])
def test_autograd_is_refused(which):
    args = good_paged(CPU) | {"new_k": CPU.randn(2, 2, 64), "new_v": CPU.randn(2, 2, 64)}
    args[which].requires_grad_()
    with (
        torch.device("cpu"),
        pytest.raises(RuntimeError, match=r"attn_paged_decode_out: an argument requires grad"),
    ):
        attn_paged_decode(**args)


def test_no_tensor_at_all():
    with pytest.raises(TypeError, match=r"attn_varlen: q must be a torch.Tensor, got None"):
        attn_varlen(None, None, None, None, None)
    with pytest.raises(TypeError, match=r"attn_paged_decode: q must be a torch.Tensor, got list"):
        attn_paged_decode(**good_paged(CPU) | {"q": [1]})
    with pytest.raises(TypeError, match=r"attn_paged_prefill: v_cache must be a torch.Tensor"):
        attn_paged_prefill(**good_paged(CPU) | {"v_cache": None}, qo_indptr=None)
    with pytest.raises(TypeError, match=r"merge_states: lse_b must be a torch.Tensor, got int"):
        merge_states(**good_merge(CPU) | {"lse_b": 3})
    with pytest.raises(TypeError, match=r"build_q_work_map: qo_indptr must be a torch.Tensor"):
        build_q_work_map([0, 3])
    with pytest.raises(TypeError, match=r"rope_append_kv: q must be a torch.Tensor, got list"):
        rope_append_kv(**good_append(CPU) | {"q": [1]}, interleaved=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what a machine without a GPU says")
def test_cpu_tensors_on_a_machine_without_a_gpu():
    text = r"CUDA kernel '{}' is not available\."
    with pytest.raises(RuntimeError, match=text.format("attn_paged_decode")):
        attn_paged_decode(**good_paged(CPU))
    with pytest.raises(RuntimeError, match=text.format("attn_paged_prefill")):
        attn_paged_prefill(**good_paged(CPU), qo_indptr=CPU.ints(0, 1, 2))
    with pytest.raises(RuntimeError, match=text.format("attn_prefill")):
        attn_varlen(**good_varlen(CPU))
    with pytest.raises(RuntimeError, match=text.format("rotary_emb")):
        rope_append_kv(**good_append(CPU), interleaved=True)
