"""Rotation of q and k and the write of K and V into a paged cache, against FlashInfer and torch.

    python -m tools.bench.bench_rope_append --quick --json rope.jsonl

FlashInfer rotates q and k in place by one kernel and appends k and v by another; torch (where
FlashInfer is not installed, or for an e4m3 cache) by many, compiled. Inputs of calls that fit the
L2 stay there (in a model the projection has just written them); larger ones are rotated.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from tools.bench import harness, peers
from tools.bench.harness import Candidate
from tools.bench.results import Row, Work

DEFAULTS: dict[str, Any] = {
    "tokens": 2048,
    "q_heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "page_size": 16,
    "interleaved": False,
    "cache": "16 bits",  # or "e4m3"
}
TABLE = [
    *(
        {"tokens": tokens, "page_size": page_size}
        for page_size in (16, 1)
        for tokens in (1, 16, 64, 512, 2048, 8192, 16384, 65536)
    ),
    *({"tokens": tokens, "interleaved": True} for tokens in (64, 16384)),
    *({"tokens": tokens, "cache": "e4m3"} for tokens in (64, 16384)),
]
QUICK = [
    {"tokens": 64},
    {"tokens": 64, "cache": "e4m3"},
    {"tokens": 16384},
    {"tokens": 16384, "page_size": 1},
]
_L2_RESIDENT_BYTES = 60 << 20
# Dequantisation step of an e4m3 cache: values of unit variance fit its range as they are.
_STEP = 1.0


def rope_append_work(shape: dict[str, Any]) -> Work:
    """Returns bytes read and written: q, k and v in, q and the cache out, angles, two indices."""
    tokens, dim = shape["tokens"], shape["head_dim"]
    kv = 2 * shape["kv_heads"] * dim
    read = 2 * (shape["q_heads"] * dim + kv) + 4 * dim + 2 * 4
    written = 2 * shape["q_heads"] * dim + (1 if shape["cache"] == "e4m3" else 2) * kv
    rotated = (shape["q_heads"] + shape["kv_heads"]) * dim
    return Work(num_bytes=tokens * (read + written), flops=3 * tokens * rotated, unit="tbps")


def variant(shape: dict[str, Any]) -> str:
    """Returns the row's variant."""
    words = [f"page{shape['page_size']}", "interleaved" if shape["interleaved"] else "half_split"]
    return " ".join(words + [shape["cache"]] * (shape["cache"] != "16 bits"))


def rotate(x: Any, cos: Any, sin: Any, interleaved: bool) -> Any:
    """Returns x [tokens, heads, head_dim] rotated in fp32; cos and sin are [tokens, 1, half]."""
    import torch

    wide = x.float()
    if interleaved:
        first, second = wide[..., 0::2], wide[..., 1::2]
    else:
        first, second = wide.chunk(2, dim=-1)
    turned = (first * cos - second * sin, first * sin + second * cos)
    whole = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return whole.to(x.dtype)


def append_with_torch(
    q: Any,
    k: Any,
    v: Any,
    caches: tuple[Any, Any],
    slots: Any,
    cos: Any,
    sin: Any,
    interleaved: bool,
) -> Any:
    """Returns q rotated; k rotated and v go into the slots of the caches."""
    import torch

    for source, target in ((rotate(k, cos, sin, interleaved), caches[0]), (v, caches[1])):
        # As bytes: not every version of torch indexes tensors of float8.
        tokens = target.flatten(0, 1).view(torch.uint8)
        tokens[slots] = source.to(target.dtype).view(torch.uint8)
    return rotate(q, cos, sin, interleaved)


def candidates(shape: dict[str, Any], sets: int) -> dict[str, Candidate]:
    """Returns ours first. One request has all tokens, in pages without an order."""
    import torch

    from astrai.extension import ops

    tokens, dim, page_size = shape["tokens"], shape["head_dim"], shape["page_size"]
    dtype, device = getattr(torch, harness.dtype()), harness.DEVICE
    table = torch.randperm(-(-tokens // page_size), device=device).to(torch.int32)[None]
    positions = torch.arange(tokens, device=device, dtype=torch.int32)
    slots = table[0, positions // page_size] * page_size + positions % page_size
    angles = torch.rand(tokens, dim // 2, device=device) * 6.28
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    interleaved, is_narrow = shape["interleaved"], shape["cache"] == "e4m3"
    steps = {"k_scale": _STEP, "v_scale": _STEP} if is_narrow else {}

    def random(heads: int) -> Any:
        return torch.randn(tokens, heads, dim, device=device, dtype=dtype)

    def cache() -> Any:
        pages = torch.empty(
            table.numel(), page_size, shape["kv_heads"], dim, device=device, dtype=dtype
        )
        return pages.to(torch.float8_e4m3fn) if is_narrow else pages

    flashinfer = None
    if not is_narrow and peers.installed(peers.flashinfer) is not None:
        pages = peers.flashinfer_pages(table, [tokens], page_size)
        flashinfer = peers.flashinfer_rope_append(
            positions, cos_sin, interleaved, dim, pages, torch.zeros_like(positions)
        )
    torch.compiler.reset()  # or the shapes of a long table would end at the recompile limit
    compiled = torch.compile(append_with_torch)
    angles_and_place = (slots.long(), angles.cos()[:, None], angles.sin()[:, None], interleaved)
    ours, theirs = [], []
    for _ in range(sets):
        q, k, v = random(shape["q_heads"]), random(shape["kv_heads"]), random(shape["kv_heads"])
        caches = cache(), cache()

        def call(q=q, k=k, v=v, caches=caches):
            return ops.rope_append_kv(
                q, k, v, cos_sin, positions, *caches, slots, interleaved=interleaved, **steps
            )

        ours.append(call)
        if flashinfer is not None:
            # Its q and k turn further with every call: copies, so that ours stay what they are.
            mine = q.clone(), k.clone(), v
            theirs.append(lambda mine=mine, caches=caches: flashinfer(*mine, caches))
        else:
            arguments = (q, k, v, caches, *angles_and_place)
            theirs.append(lambda arguments=arguments: compiled(*arguments))
    name = "torch.compile" if flashinfer is None else "flashinfer"
    # FlashInfer's first call is long over when results would be compared, and q has turned on.
    result = None if flashinfer is not None else _as_is
    return {"astrai": Candidate(ours, _as_is), name: Candidate(theirs, result)}


def _as_is(result):
    return result


def generate() -> Iterator[Row]:
    """Yields the rows of the shapes that the flags ask for."""
    for sentence in peers.missing():
        print(sentence, file=sys.stderr)

    def rows(shape: dict[str, Any]) -> Iterator[Row]:
        work = rope_append_work(shape)
        moved = int(work.num_bytes)
        sets = harness.input_sets(moved // 2, rotated=moved > _L2_RESIDENT_BYTES, copies=2)
        times = harness.measure(candidates(shape, sets))
        names = ("rope_append_kv", shape, harness.dtype(), variant(shape))
        yield from harness.rows_of(*names, work, times)

    yield from harness.each("rope_append_kv", harness.shapes_to_run(TABLE, QUICK, DEFAULTS), rows)


if __name__ == "__main__":
    harness.main(generate)
