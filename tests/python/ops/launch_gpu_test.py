"""How calls reach the GPU: streams, graphs, compile, subclasses, both ways to read tensors."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from astrai.extension import loader
from astrai.extension.ops import attn_decode, attn_prefill, rotary_emb, rotary_embed
from tests.python.ops.attention_inputs import check, qkv, randn, reference
from tests.python.ops.references import table

MODULES = ("attn_decode", "attn_prefill", "rotary_emb")
ATTENTION = {"attn_decode": attn_decode, "attn_prefill": attn_prefill}


def busy():
    """Keeps the current stream at work for some milliseconds."""
    torch.cuda._sleep(20_000_000)


@pytest.mark.parametrize("name", ATTENTION)
def test_runs_on_the_current_stream(name):
    q, k, v = qkv(2, 1, 300, 8, 2, 128)
    expected = reference(q, k, v)
    late_q = torch.zeros_like(q)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        busy()
        late_q.copy_(q)  # on the side stream, after the wait
        out = ATTENTION[name](late_q, k, v)
    side.synchronize()
    check(out, None, expected, q.dtype)


def test_rotary_runs_on_the_current_stream():
    x = randn(50, 4, 64)
    freqs = torch.randn(50, 32, 2, device="cuda")
    expected = rotary_emb(x, freqs)
    late = torch.zeros_like(x)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        busy()
        late.copy_(x)
        out = rotary_emb(late, freqs)
    side.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("name", ATTENTION)
def test_cuda_graph(name):
    q, k, v = qkv(2, 1, 3000, 8, 2, 128)
    function = ATTENTION[name]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        function(q, k, v)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = function(q, k, v, return_lse=True)
    for seed in range(3):
        q.copy_(randn(*q.shape, seed=seed + 10))
        k.copy_(randn(*k.shape, seed=seed + 20))
        expected = reference(q, k, v)
        for _ in range(30):
            graph.replay()
        check(out, lse, expected, q.dtype)


def test_cuda_graph_of_rotary():
    q, k = randn(16, 4, 64), randn(16, 1, 64)
    cache, positions = table(1000, 64, device="cuda"), torch.arange(16, device="cuda")
    rotary_embed(q, k, cache, positions)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q2, k2 = rotary_embed(q, k, cache, positions)
    positions.add_(500)
    graph.replay()
    expected = rotary_embed(q, k, cache, positions)
    assert torch.equal(q2, expected[0]) and torch.equal(k2, expected[1])


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_case_e09_compile_fullgraph(name, mode):
    function = ATTENTION[name]
    q, k, v = qkv(2, 1, 100, 8, 2, 64)
    expected = reference(q * 2, k, v)

    @torch.compile(fullgraph=True, mode=mode)
    def compiled(q, k, v):
        out, lse = function(q * 2, k, v, return_lse=True)
        return out + 0, lse + 0

    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        out, lse = compiled(q, k, v)
        check(out, lse, expected, q.dtype)


def test_case_e09_compile_in_place():
    q, k = randn(16, 4, 64), randn(16, 1, 64)
    cache, positions = table(1000, 64, device="cuda"), torch.arange(16, device="cuda")
    expected = rotary_embed(q, k, cache, positions)

    @torch.compile(fullgraph=True)
    def compiled(q, k):
        a, b = q + 0, k + 0
        rotary_embed(a, b, cache, positions, inplace=True)
        return a, b

    a, b = compiled(q, k)
    assert torch.equal(a, expected[0]) and torch.equal(b, expected[1])


@pytest.mark.parametrize("name", ATTENTION)
def test_case_e09_opcheck(name):
    q, k, v = qkv(2, 1, 30, 8, 2, 64)
    operators = torch.ops.astrai
    torch.library.opcheck(getattr(operators, name).default, (q, k, v))
    torch.library.opcheck(getattr(operators, name + "_lse").default, (q, k, v, None, True, 0.5))
    lse = torch.empty(q.shape[:-1], device="cuda")
    features = (True, None, [-1, -1], 0.0, None, None, None, None, None)
    rest = (False,) if name == "attn_decode" else ()
    torch.library.opcheck(
        getattr(operators, name + "_out").default,
        (q, k, v, None, *features, *rest, torch.empty_like(q), lse, None),
    )


def test_case_e09_opcheck_rotary():
    q, k = randn(16, 4, 64), randn(16, 1, 64)
    cache, positions = table(1000, 64, device="cuda"), torch.arange(16, device="cuda")
    freqs = torch.randn(16, 32, 2, device="cuda")
    operators = torch.ops.astrai
    torch.library.opcheck(operators.rotary_emb.default, (q, freqs))
    torch.library.opcheck(operators.rotary_emb_.default, (q.clone(), freqs))
    torch.library.opcheck(operators.rotary_emb_out.default, (q, freqs, torch.empty_like(q)))
    torch.library.opcheck(operators.rotary_embed.default, (q, k, cache, positions, True, 64))
    torch.library.opcheck(operators.rotary_embed_q.default, (q, cache, positions))
    torch.library.opcheck(operators.rotary_embed_.default, (q.clone(), k.clone(), cache, positions))


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_vmap():
    q, k, v = qkv(2, 1, 30, 8, 2, 64)
    stacked = torch.stack([q, q * 2])
    batched = torch.vmap(lambda x: attn_decode(x, k, v))(stacked)
    assert torch.equal(batched[1], attn_decode(stacked[1], k, v))


class PlainSubclass(torch.Tensor):
    pass


def test_subclass_parameter_and_function_mode():
    q, k, v = qkv(2, 1, 30, 8, 2, 64)
    expected = attn_decode(q, k, v)
    assert torch.equal(attn_decode(q.as_subclass(PlainSubclass), k, v), expected)
    assert torch.equal(attn_decode(torch.nn.Parameter(q, requires_grad=False), k, v), expected)
    with torch.device("cuda"):
        assert torch.equal(attn_decode(q, k, v), expected)
    with torch.inference_mode():
        assert torch.equal(attn_decode(q, k, v), expected)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(q)
        assert attn_decode(fake, mode.from_tensor(k), mode.from_tensor(v)).shape == q.shape


def test_functional_tensor_is_refused():
    q, k, v = qkv(2, 1, 30, 8, 2, 64)
    with pytest.raises(TypeError, match=r"attn_decode: k must be .*got a functional tensor"):
        attn_decode(q, torch._to_functional_tensor(k), v)


def test_version_counters():
    q, k, v = qkv(2, 1, 30, 8, 2, 64)
    out = torch.empty_like(q)
    versions = [x._version for x in (q, k, v, out)]
    attn_decode(q, k, v, out=out)
    assert [x._version for x in (q, k, v, out)] == [*versions[:3], versions[3] + 1]
    cache, positions = table(10, 64, device="cuda"), torch.zeros(2, dtype=torch.int64).cuda()
    version = q._version
    rotary_embed(q, None, cache, positions, inplace=True)
    assert q._version == version + 1


@pytest.fixture
def capsule_path():
    """Tensors read through __dlpack__, as for torch before 2.10."""
    modules = [loader.get_module(name) for name in MODULES]
    for module in modules:
        module.use_exchange_api(False)
    yield
    for module in modules:
        module.use_exchange_api(True)


@pytest.mark.usefixtures("capsule_path")
def test_the_older_path_runs_on_the_current_stream():
    test_runs_on_the_current_stream("attn_decode")
    test_runs_on_the_current_stream("attn_prefill")
    test_rotary_runs_on_the_current_stream()


@pytest.mark.usefixtures("capsule_path")
def test_the_older_path_in_a_cuda_graph():
    test_cuda_graph("attn_decode")
    test_cuda_graph_of_rotary()


def test_workspace_is_free_again_after_the_call():
    q, k, v = qkv(1, 1, 20000, 8, 1, 128)
    out = torch.empty_like(q)
    attn_decode(q, k, v, out=out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        attn_decode(q, k, v, out=out)
    assert torch.cuda.memory_allocated() == before


def test_calls_back_to_back_on_two_streams():
    q, k, v = qkv(1, 1, 5000, 8, 1, 128)
    expected = attn_decode(q, k, v)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    outs = []
    for i in range(200):
        with torch.cuda.stream(streams[i % 2]):
            outs.append(attn_decode(q, k, v))
    torch.cuda.synchronize()
    for out in outs:
        assert torch.equal(out, expected)
