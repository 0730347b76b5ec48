"""Rotary embedding against torch's complex multiplication, eager and compiled.

    python -m tools.bench.bench_rotary --quick --json rotary.jsonl

Inputs of calls that fit the L2 stay there (in a model the projection has just written them); larger
ones are rotated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tools.bench import harness
from tools.bench.results import Row, Work

DEFAULTS: dict[str, Any] = {
    "tokens": 2048,
    "q_heads": 32,
    "k_heads": 8,
    "head_dim": 128,
    "interleaved": True,
    "inplace": False,
}
QUICK = [
    {"tokens": 64},
    {"tokens": 64, "interleaved": False},
    {"tokens": 2048},
    {"tokens": 16384},
    {"tokens": 16384, "interleaved": False},
]
TABLE = [
    {"tokens": tokens, "q_heads": q_heads, "k_heads": k_heads, "interleaved": interleaved}
    for tokens in (1, 16, 64, 512, 2048, 8192, 16384, 65536)
    for q_heads, k_heads in ((32, 0), (32, 8))
    for interleaved in (True, False)
] + [
    {"tokens": 16384, "inplace": True},
    {"tokens": 16384, "interleaved": False, "inplace": True},
    {"tokens": 16384, "q_heads": 64, "k_heads": 1, "head_dim": 64},
    {"tokens": 8192, "q_heads": 32, "k_heads": 8, "head_dim": 256},
]
_L2_RESIDENT_BYTES = 60 << 20


def bytes_moved(shape: dict[str, Any]) -> int:
    """Returns bytes that one call must move: q and k in and out in 16 bits, fp32 angles once."""
    elements = shape["tokens"] * (shape["q_heads"] + shape["k_heads"]) * shape["head_dim"]
    return 4 * elements + 4 * shape["tokens"] * shape["head_dim"]


def rotary_work(shape: dict[str, Any]) -> Work:
    """Returns the bytes moved, beside which the arithmetic (3 per element) is nothing."""
    elements = shape["tokens"] * (shape["q_heads"] + shape["k_heads"]) * shape["head_dim"]
    return Work(num_bytes=bytes_moved(shape), flops=3 * elements, unit="tbps")


def _rotate_interleaved(x, freqs):
    """Rotates pairs (2i, 2i + 1): complex multiplication in fp32."""
    import torch

    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * freqs).flatten(-2).to(x.dtype)


def _rotate_halves(x, cos, sin):
    """Rotates pairs (i, i + D / 2) in fp32, as Hugging Face writes it."""
    import torch

    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


def _candidates(shape: dict[str, Any], sets: int) -> dict[str, list[harness.Call]]:
    import torch

    from astrai.extension import ops

    dtype = getattr(torch, harness.dtype())
    tokens, dim = shape["tokens"], shape["head_dim"]
    heads = [count for count in (shape["q_heads"], shape["k_heads"]) if count > 0]
    angles = torch.rand(tokens, dim // 2, device="cuda") * 6.28
    cache = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions = torch.arange(tokens, device="cuda")
    # The peers' angles are gathered beforehand, ours are looked up in the call.
    freqs = torch.polar(torch.ones_like(angles), angles)[:, None]
    cos, sin = (torch.cat((f, f), dim=-1)[:, None] for f in (angles.cos(), angles.sin()))

    def peer(tensors):
        if shape["interleaved"]:
            return [_rotate_interleaved(x, freqs) for x in tensors]
        return [_rotate_halves(x, cos, sin) for x in tensors]

    torch.compiler.reset()  # or the shapes of a long table would end at the recompile limit
    compiled = torch.compile(peer)
    result: dict[str, list[harness.Call]] = {"astrai": [], "torch": [], "torch.compile": []}
    for _ in range(sets):
        qk = [torch.randn(tokens, count, dim, device="cuda", dtype=dtype) for count in heads]
        q, k = qk if len(qk) == 2 else (qk[0], None)

        def ours(q=q, k=k):
            return ops.rotary_embed(
                q,
                k,
                cache,
                positions,
                interleaved=shape["interleaved"],
                inplace=shape["inplace"],
            )

        result["astrai"].append(ours)
        result["torch"].append(lambda qk=qk: peer(qk))
        result["torch.compile"].append(lambda qk=qk: compiled(qk))
    return result


def generate() -> Iterator[Row]:
    """Yields the rows of the shapes that the flags ask for."""
    for shape in harness.shapes_to_run(TABLE, QUICK, DEFAULTS):
        moved = bytes_moved(shape)
        sets = harness.input_sets(moved // 2, rotated=moved > _L2_RESIDENT_BYTES)
        times = harness.measure(_candidates(shape, sets))
        variant = "interleaved" if shape["interleaved"] else "half_split"
        work = rotary_work(shape)
        yield from harness.rows_of("rotary", shape, harness.dtype(), variant, work, times)


if __name__ == "__main__":
    harness.main(generate)
