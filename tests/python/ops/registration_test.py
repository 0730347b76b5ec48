"""The registered operators, as far as they go without a GPU.

On CPU tensors they compute their definition, so that what is between caller and kernel can be
tested: schemas, fakes, tracing, batching, subclasses, modes. More in registration_paged_test.py.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from astrai.extension.backend.reference import attention_reference
from astrai.extension.ops import attn_decode, attn_prefill, rotary_emb, rotary_embed

ATTENTION = {"attn_decode": attn_decode, "attn_prefill": attn_prefill}


def attention_inputs(q_len=1, kv_len=5, batch=2, device="cpu"):
    torch.manual_seed(0)
    q = torch.randn(batch, q_len, 8, 64, device=device).bfloat16()
    k = torch.randn(batch, kv_len, 2, 64, device=device).bfloat16()
    return q, k, torch.randn_like(k)


def rotary_inputs(device="cpu"):
    torch.manual_seed(0)
    q = torch.randn(7, 4, 64, device=device).bfloat16()
    k = torch.randn(7, 1, 64, device=device).bfloat16()
    cache = torch.randn(32, 64, device=device)
    return q, k, cache, torch.arange(7, device=device) * 3


@pytest.mark.parametrize("name", ATTENTION)
def test_opcheck_attention(name):
    q, k, v = attention_inputs()
    mask = torch.rand(2, 5) < 0.7
    operators = torch.ops.astrai
    for extra in ((), (mask, True, 0.3)):
        torch.library.opcheck(getattr(operators, name).default, (q, k, v, *extra))
        torch.library.opcheck(getattr(operators, name + "_lse").default, (q, k, v, *extra))
    out, lse = torch.empty_like(q), torch.empty(q.shape[:-1])
    for log_sum in (lse, None):
        features = (True, None, [3, -1], 5.0, torch.zeros(8), None, 0.5, torch.ones(1), None)
        rest = (True,) if name == "attn_decode" else ()
        torch.library.opcheck(
            getattr(operators, name + "_out").default,
            (q, k, v, mask, *features, *rest, out, log_sum, None),
        )


def test_opcheck_rotary():
    q, k, cache, positions = rotary_inputs()
    freqs = torch.randn(7, 32, 2)
    operators = torch.ops.astrai
    torch.library.opcheck(operators.rotary_emb.default, (q, freqs))
    torch.library.opcheck(operators.rotary_emb_out.default, (q, freqs, torch.empty_like(q)))
    torch.library.opcheck(operators.rotary_emb_.default, (q.clone(), freqs))
    for interleaved in (False, True):
        table = (cache, positions, interleaved, 64)
        torch.library.opcheck(operators.rotary_embed.default, (q, k, *table))
        torch.library.opcheck(operators.rotary_embed_q.default, (q, *table))
        torch.library.opcheck(operators.rotary_embed_.default, (q.clone(), k.clone(), *table))
        torch.library.opcheck(operators.rotary_embed_.default, (q.clone(), None, *table))


@pytest.mark.parametrize("name", ATTENTION)
def test_fake_tensors_on_cuda_need_no_gpu(name):
    function = ATTENTION[name]
    with FakeTensorMode():
        q, k, v = attention_inputs(device="cuda")
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
        out = function(q, k, v)
        assert (out.shape, out.dtype, out.device.type) == (q.shape, q.dtype, "cuda")
        assert out.is_contiguous()
        out, lse = function(q, k, v, return_lse=True)
        assert (lse.shape, lse.dtype, lse.device.type) == (q.shape[:-1], torch.float32, "cuda")
        given = torch.empty_like(q)
        assert function(q, k, v, out=given) is given
        assert function(q, k, v, out=given, return_lse=True)[1].shape == q.shape[:-1]
    assert function(q, k, v).shape == q.shape  # outside their mode


def test_fake_rotary():
    with FakeTensorMode():
        q, k, cache, positions = rotary_inputs(device="cuda")
        freqs = torch.empty(7, 32, 2, device="cuda")
        assert rotary_emb(q, freqs).shape == q.shape
        assert rotary_emb(q, freqs, out=q) is q
        out = torch.empty_like(q)
        assert rotary_emb(q, freqs, out=out) is out
        q2, k2 = rotary_embed(q, k, cache, positions)
        assert (q2.shape, k2.shape, q2.dtype) == (q.shape, k.shape, q.dtype)
        q2, none = rotary_embed(q, None, cache, positions)
        assert q2.shape == q.shape and none is None
        q2, k2 = rotary_embed(q, k, cache, positions, inplace=True)
        assert q2 is q and k2 is k


def test_meta_tensors_infer_shapes():
    q, k, v = attention_inputs(device="meta")
    assert torch.ops.astrai.attn_decode(q, k, v).shape == q.shape
    assert torch.ops.astrai.attn_decode_lse(q, k, v)[1].shape == q.shape[:-1]


@pytest.mark.parametrize("name", ATTENTION)
def test_case_e09_compile_fullgraph(name):
    function = ATTENTION[name]
    q, k, v = attention_inputs()
    mask = torch.rand(2, 5) < 0.7
    reference = attention_reference(q + 1, k, v, mask, False, 0.2, return_lse=True)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def plain(q):
        return function(q + 1, k, v, mask, scale=0.2, return_lse=True)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def with_out(q):
        out = torch.empty_like(q)
        _, lse = function(q + 1, k, v, mask, scale=0.2, return_lse=True, out=out)
        return out, lse

    for compiled in (plain, with_out):
        out, lse = compiled(q)
        torch.testing.assert_close(out, reference[0])
        torch.testing.assert_close(lse, reference[1])


def test_case_e09_compile_with_dynamic_shapes():
    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def compiled(q, k, v):
        return attn_prefill(q, k, v, is_causal=True) * 2

    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for q_len, kv_len in ((3, 5), (4, 9), (7, 7)):
            q, k, v = attention_inputs(q_len, kv_len)
            expected = attention_reference(q, k, v, None, True) * 2
            torch.testing.assert_close(compiled(q, k, v), expected)


def test_case_e09_compile_in_place():
    q, k, cache, positions = rotary_inputs()
    freqs = torch.randn(7, 32, 2)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(q, k, x):
        rotary_embed(q, k, cache, positions, inplace=True)
        y = x + 0
        rotary_emb(y, freqs, out=y)
        return y, q + 0

    expected = torch.ops.astrai.rotary_embed(q, k, cache, positions)
    q2, k2 = q.clone(), k.clone()
    y, q3 = compiled(q2, k2, q)
    torch.testing.assert_close((q2, k2), expected)
    torch.testing.assert_close(q3, expected[0])
    torch.testing.assert_close(y, torch.ops.astrai.rotary_emb(q, freqs))


def test_export():
    class Attend(torch.nn.Module):
        def forward(self, q, k, v):
            return attn_decode(q, k, v)

    program = torch.export.export(Attend(), attention_inputs())
    targets = [str(node.target) for node in program.graph.nodes]
    assert "astrai.attn_decode.default" in targets


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_vmap_gives_the_result_of_a_loop():
    q, k, v = attention_inputs()
    stacked = torch.stack([q, q * 2, q * 3])
    batched = torch.vmap(lambda x: attn_decode(x, k, v))(stacked)
    for x, got in zip(stacked, batched, strict=True):
        torch.testing.assert_close(got, attention_reference(x, k, v))


class PlainSubclass(torch.Tensor):
    pass


def test_subclass_and_function_mode():
    q, k, v = attention_inputs()
    expected = attention_reference(q, k, v)
    got = attn_decode(q.as_subclass(PlainSubclass), k, v)
    torch.testing.assert_close(got.as_subclass(torch.Tensor), expected)
    with torch.device("cpu"):  # a function mode
        torch.testing.assert_close(attn_decode(q, k, v), expected)


def test_dtensor_gets_a_clear_error():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        q, k, v = (distribute_tensor(x, mesh, [Replicate()]) for x in attention_inputs())
        with pytest.raises(Exception, match=r"astrai.attn_decode.default"):
            attn_decode(q, k, v)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_autograd_is_refused(which):
    inputs = dict(zip("qkv", attention_inputs(), strict=True))
    inputs[which].requires_grad_()
    with pytest.raises(RuntimeError, match=r"attn_decode: an argument requires grad.*autograd"):
        torch.ops.astrai.attn_decode(**inputs)
    with torch.no_grad():
        assert torch.ops.astrai.attn_decode(**inputs).shape == inputs["q"].shape


def test_autograd_is_refused_while_tracing():
    q, k, v = attention_inputs()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(q):
        return attn_decode(q, k, v)

    with pytest.raises(Exception, match="autograd"):
        compiled(q.requires_grad_())


def test_no_tensor_at_all():
    q, k, v = attention_inputs()
    for bad, kind in ((None, "None"), ([1.0], "list")):
        with pytest.raises(TypeError, match=f"attn_decode: q must be a torch.Tensor, got {kind}"):
            attn_decode(bad, k, v)
        with pytest.raises(TypeError, match=f"rotary_emb: x must be a torch.Tensor, got {kind}"):
            rotary_emb(bad, q)
        with pytest.raises(TypeError, match=f"rotary_embed: q must be a torch.Tensor, got {kind}"):
            rotary_embed(bad, q, q, q)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what a machine without a GPU says")
def test_cpu_tensors_on_a_machine_without_a_gpu():
    q, k, v = attention_inputs()
    with pytest.raises(RuntimeError, match=r"CUDA kernel 'attn_decode' is not available\."):
        attn_decode(q, k, v)
    with pytest.raises(RuntimeError, match=r"CUDA kernel 'rotary_emb' is not available\."):
        rotary_emb(q, torch.zeros(2, 1, 32, 2))
