"""rope_append_kv against its definition in float64, and attention over what it wrote."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from astrai.extension.ops import attn_paged_prefill, rope_append_kv, rotary_embed
from tests.python.ops.attention_inputs import randn
from tests.python.ops.paged_inputs import caches, clone, raw
from tests.python.ops.references import rotate, table

E4M3 = torch.float8_e4m3fn
# Of a value rounded once to the dtype: absolute where it is small, and relative.
TOLERANCE = {torch.bfloat16: (1e-3, 2**-8), torch.float16: (1e-4, 2**-10), E4M3: (2**-10, 2**-4)}


def expected(x, cos_sin_cache, positions, interleaved):
    if cos_sin_cache is None:
        return x.double()
    cos, sin = cos_sin_cache[positions.long()].double().chunk(2, -1)
    return rotate(x.double(), cos, sin, interleaved)


def close(got, want, step=1.0):
    absolute, relative = TOLERANCE[got.dtype]
    if got.dtype is E4M3:
        want = (want / step).clamp(-448, 448)
        relative, absolute = relative * (1 + 1e-4), absolute * (1 + 1e-4)
    error = (got.double() - want).abs()
    assert (error <= absolute + relative * want.abs()).all(), float(error.max())


def run(
    tokens=37,
    heads=(8, 2),
    dims=(128, 128),
    rotary_dim=128,
    page_size=16,
    dtype=torch.bfloat16,
    cache_dtype=None,
    interleaved=False,
    side_by_side=False,
    inplace=False,
    index=torch.int64,
    fused=False,
    steps=(None, None),
    seed=0,
):
    """One call on random tensors; compares q, what was written, and that nothing else was."""
    q_heads, kv_heads = heads
    if fused:
        sizes = [q_heads * dims[0], kv_heads * dims[0], kv_heads * dims[1]]
        parts = randn(tokens, sum(sizes), dtype=dtype, seed=seed).split(sizes, -1)
        shapes = ((q_heads, dims[0]), (kv_heads, dims[0]), (kv_heads, dims[1]))
        q, k, v = (x.unflatten(-1, s) for x, s in zip(parts, shapes, strict=True))
    else:
        q = randn(tokens, q_heads, dims[0], dtype=dtype, seed=seed)
        k = randn(tokens, kv_heads, dims[0], dtype=dtype, seed=seed + 1)
        v = randn(tokens, kv_heads, dims[1], dtype=dtype, seed=seed + 2)
    cos_sin_cache = table(100, rotary_dim, device="cuda") if rotary_dim else None
    positions = torch.randint(0, 100, (tokens,), device="cuda", dtype=index)
    held = cache_dtype or dtype
    pages = (tokens + page_size - 1) // page_size + 2
    both = caches(pages * page_size, page_size, kv_heads, *dims, held, side_by_side)
    slots = torch.randperm(pages * page_size, device="cuda")[:tokens].to(index)
    slots[tokens // 2] = -1
    before = [clone(x) for x in (q, k, v, *both)]

    want_q = expected(q, cos_sin_cache, positions, interleaved)
    want_k = expected(k, cos_sin_cache, positions, interleaved)
    got = rope_append_kv(
        q,
        k,
        v,
        cos_sin_cache,
        positions if rotary_dim else None,
        *both,
        slots,
        interleaved=interleaved,
        k_scale=steps[0],
        v_scale=steps[1],
        q_out=q if inplace else None,
    )
    close(got, want_q)
    assert torch.equal(got[..., rotary_dim:], before[0][..., rotary_dim:])
    assert got is q if inplace or not rotary_dim else torch.equal(q, before[0])
    assert torch.equal(k, before[1]) and torch.equal(v, before[2])

    kept = slots[slots >= 0].long()
    for cache, old, rows, step in zip(both, before[3:], (want_k, v.double()), steps, strict=True):
        place = (kept // page_size, kept % page_size) if page_size > 1 else (kept,)
        close(raw(cache)[place].view(held), rows[slots >= 0], 1.0 if step is None else float(step))
        untouched = torch.ones(cache.shape[:-2], dtype=torch.bool, device="cuda")
        untouched[place] = False
        assert torch.equal(raw(cache)[untouched], raw(old)[untouched])
    if held == dtype:
        written = raw(both[1])[(kept // page_size, kept % page_size) if page_size > 1 else (kept,)]
        assert torch.equal(written.view(dtype), v[slots >= 0])  # a copy is exact


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("e4m3", [False, True])
@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
def test_case_d10_page_sizes(dtype, e4m3, page_size):
    steps = (0.03, torch.tensor([0.011], device="cuda")) if e4m3 else (None, None)
    for interleaved in (False, True):
        for side_by_side in (False, True):
            run(
                dtype=dtype,
                cache_dtype=E4M3 if e4m3 else None,
                page_size=page_size,
                interleaved=interleaved,
                side_by_side=side_by_side,
                steps=steps,
            )


def test_pages_of_any_size_that_follow_each_other():
    for page_size in (3, 24, 100):
        run(page_size=page_size)


@pytest.mark.parametrize("rotary_dim", [0, 2, 20, 32, 64, 96, 126, 128])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_case_d15_partial_rotation_leaves_the_tail(rotary_dim, interleaved, inplace):
    run(rotary_dim=rotary_dim, interleaved=interleaved, inplace=inplace)
    run(rotary_dim=rotary_dim, interleaved=interleaved, inplace=inplace, cache_dtype=E4M3)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_case_d04_slices_of_a_fused_qkv(inplace, interleaved):
    run(fused=True, inplace=inplace, interleaved=interleaved)
    run(
        fused=True,
        inplace=inplace,
        interleaved=interleaved,
        heads=(5, 1),
        dims=(64, 32),
        rotary_dim=64,
    )


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_index_dtypes(index):
    run(index=index)


@pytest.mark.parametrize("tokens", [1, 2, 64, 1000, 5000])
@pytest.mark.parametrize("heads", [(32, 8), (8, 1), (9, 3)], ids=str)
def test_token_counts_and_heads(tokens, heads):
    for interleaved in (False, True):
        run(tokens=tokens, heads=heads, interleaved=interleaved)


def test_case_d13_one_kv_head():
    run(heads=(16, 1))


def test_values_of_another_head_dim():
    run(dims=(192, 128), rotary_dim=64)
    run(dims=(64, 256), rotary_dim=64, cache_dtype=E4M3)


def good():
    both = caches(64, 16, 2, 128, 128, torch.bfloat16, False)
    q, k, v = (randn(7, h, 128, seed=h) for h in (8, 2, 2))
    return [q, k, v, table(20, 128, device="cuda"), torch.arange(7, device="cuda"), *both]


def test_without_q_and_without_rotation():
    slots = torch.arange(7, device="cuda")
    q, k, v, cos_sin, positions, k_cache, v_cache = good()
    assert (
        rope_append_kv(None, k, v, cos_sin, positions, k_cache, v_cache, slots, interleaved=False)
        is None
    )
    want = rotary_embed(k, None, cos_sin, positions)[0]
    assert torch.equal(k_cache.view(64, 2, 128)[:7], want)
    q, k, v, _, _, k_cache, v_cache = good()
    tensors = (k, v, None, None, k_cache, v_cache, slots)
    assert rope_append_kv(q, *tensors, interleaved=False) is q
    assert torch.equal(k_cache.view(64, 2, 128)[:7], k)
    q_out = torch.empty_like(q)
    assert rope_append_kv(q, *tensors, interleaved=True, q_out=q_out) is q_out
    assert torch.equal(q_out, q)


def test_the_rotation_is_that_of_rotary_embed_bit_for_bit():
    slots = torch.arange(7, device="cuda")
    for interleaved in (False, True):
        q, k, *rest = good()
        got = rope_append_kv(q, k, *rest, slots, interleaved=interleaved)
        want = rotary_embed(q, k, rest[1], rest[2], interleaved)
        assert torch.equal(got, want[0])
        assert torch.equal(rest[3].view(64, 2, 128)[:7], want[1])


def test_case_d12_slots_and_positions_out_of_range():
    q, k, v, cos_sin, _, k_cache, v_cache = good()
    positions = torch.tensor([0, -1, 20, 3, 4, 5, 6], device="cuda")
    slots = torch.tensor([-1, 1, 2, 64, 2**40, 5, -(2**40)], device="cuda")
    before = clone(k_cache)
    got = rope_append_kv(q, k, v, cos_sin, positions, k_cache, v_cache, slots, interleaved=True)
    assert got[1:3].isnan().all() and got[[0, 3, 4, 5, 6]].isfinite().all()
    rows, old = k_cache.view(64, 2, 128), before.view(64, 2, 128)
    assert rows[1:3].isnan().all() and rows[5].isfinite().all()
    others = [i for i in range(64) if i not in (1, 2, 5)]
    assert torch.equal(raw(rows)[others], raw(old)[others])


def test_case_f01_saturation_and_nan():
    special = torch.tensor([448.0, 464.0, 465.0, -1e4, torch.inf, -torch.inf, torch.nan, 2**-10])
    k = torch.zeros(1, 1, 8, dtype=torch.bfloat16, device="cuda")
    k[0, 0] = special.cuda()
    both = [torch.zeros(1, 1, 8, device="cuda").to(E4M3) for _ in range(2)]
    slots = torch.zeros(1, dtype=torch.int32, device="cuda")
    rope_append_kv(None, k, k, None, None, *both, slots, interleaved=True)
    want = torch.tensor([448.0, 448, 448, -448, 448, -448, torch.nan, 0], device="cuda")
    for cache in both:
        torch.testing.assert_close(cache[0, 0].float(), want, equal_nan=True, atol=0, rtol=0)


def test_case_c02_no_tokens():
    q, k, v, cos_sin, _, *both = good()
    none = torch.zeros(0, dtype=torch.int64, device="cuda")
    out = rope_append_kv(q[:0], k[:0], v[:0], cos_sin, none, *both, none, interleaved=True)
    assert out.shape == (0, 8, 128)


def test_cuda_graph_and_compile():
    slots = torch.arange(7, device="cuda")
    args = good()
    want = rope_append_kv(*args, slots, interleaved=True)
    want_k = clone(args[5])
    args[5].fill_(torch.nan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = rope_append_kv(*args, slots, interleaved=True)
    graph.replay()
    assert torch.equal(out, want) and torch.equal(raw(args[5]), raw(want_k))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(*args):
        return rope_append_kv(*args, slots, interleaved=True) * 1

    args[5].fill_(torch.nan)
    assert torch.equal(compiled(*args), want) and torch.equal(raw(args[5]), raw(want_k))


def test_a_prompt_appended_and_attended_to():
    q, k, v, cos_sin, positions, *both = good()
    slots = torch.tensor([48, 49, 50, 51, 52, 53, 54], device="cuda")
    q = rope_append_kv(q, k, v, cos_sin, positions, *both, slots, interleaved=False)
    indptr = torch.tensor([0, 7], dtype=torch.int32, device="cuda")
    block_table = torch.tensor([[3]], dtype=torch.int32, device="cuda")
    out = attn_paged_prefill(
        q, *both, None, None, indptr, indptr, is_causal=True, block_table=block_table
    )
    assert out.isfinite().all()
    assert torch.equal(out[0].view(2, 4, 128), v[0].unsqueeze(1).expand(2, 4, 128))


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    tokens=st.integers(1, 40),
    heads=st.sampled_from([(1, 1), (8, 2), (9, 3), (5, 5)]),
    half_dim=st.integers(1, 128),
    page_size=st.sampled_from([1, 2, 16, 64]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    e4m3=st.booleans(),
    interleaved=st.booleans(),
    inplace=st.booleans(),
    fused=st.booleans(),
    side_by_side=st.booleans(),
)
def test_any_combination(data, half_dim, e4m3, **more):
    dim = 2 * half_dim
    run(
        dims=(dim, data.draw(st.sampled_from([dim, half_dim]))),
        rotary_dim=2 * data.draw(st.integers(0, half_dim)),
        cache_dtype=E4M3 if e4m3 else None,
        steps=(0.02, 0.5) if e4m3 else (None, None),
        seed=data.draw(st.integers(0, 2**20)),
        **more,
    )
