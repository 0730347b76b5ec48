"""Which shapes of attention are measured, and what each of them has to move and compute.

Needs neither GPU nor torch. A shape is a dict; the defaults below name its keys.
"""

from __future__ import annotations

import random
from typing import Any

from tools.bench.results import Work

Shape = dict[str, Any]

_HEADS: Shape = {"batch": 1, "q_heads": 32, "kv_heads": 8, "head_dim": 128}
PREFILL_DEFAULTS: Shape = {
    **_HEADS,
    "q_len": 0,  # 0: as kv_len
    "kv_len": 2048,
    "causal": True,
}
PAGED_PREFILL_DEFAULTS: Shape = {**PREFILL_DEFAULTS, "page_size": 16}
DECODE_DEFAULTS: Shape = {**_HEADS, "kv_len": 2048}
PAGED_DECODE_DEFAULTS: Shape = {
    **_HEADS,
    "kv_len": 2048,  # the longest, if ragged
    "page_size": 16,
    "q_len": 1,
    "cache": "16 bits",  # or "e4m3"
    "window_left": -1,
    "ragged": False,
    "deterministic": False,
}
DEFAULTS = {
    "prefill": PREFILL_DEFAULTS,
    "paged_prefill": PAGED_PREFILL_DEFAULTS,
    "decode": DECODE_DEFAULTS,
    "paged_decode": PAGED_DECODE_DEFAULTS,
}


def _shape(q_heads: int, kv_heads: int, head_dim: int, batch: int, kv_len: int, **more) -> Shape:
    heads = {"batch": batch, "q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim}
    return {**heads, "kv_len": kv_len, **more}


_PREFILL_TABLE = [
    _shape(*heads, batch, kv_len, causal=causal)
    for batch, heads, longest in (
        (1, (32, 8, 128), 16384),
        (4, (32, 8, 128), 8192),
        (2, (32, 32, 64), 16384),
        (2, (16, 4, 256), 16384),
    )
    for kv_len in (512, 1024, 2048, 4096, 8192, 16384)
    if kv_len <= longest
    for causal in (True, False)
]
_PAGED_PREFILL_TABLE = [
    _shape(32, 8, 128, batch, kv_len, causal=True, page_size=page_size)
    for page_size in (1, 16)
    for batch in (1, 4)
    for kv_len in (512, 1024, 2048, 4096, 8192)
]

# The longest kv_len of each batch, where the caches still fit beside the peers' copies.
_LONGEST_GQA = {1: 32768, 16: 32768, 64: 32768, 128: 8192}
_LONGEST_MHA = {1: 32768, 16: 32768, 64: 8192, 128: 2048}
_LONGEST_D256 = {1: 32768, 16: 32768, 64: 32768, 128: 32768}


def _decode_grid(heads: tuple[int, int, int], longest: dict[int, int], **more) -> list[Shape]:
    return [
        _shape(*heads, batch, kv_len, **more)
        for batch in (1, 16, 64, 128)
        for kv_len in (512, 2048, 8192, 32768)
        if kv_len <= longest[batch]
    ]


_DECODE_TABLE = (
    _decode_grid((32, 8, 128), _LONGEST_GQA)
    + _decode_grid((32, 32, 128), _LONGEST_MHA)
    + _decode_grid((64, 8, 128), _LONGEST_GQA)
    + _decode_grid((16, 2, 256), _LONGEST_D256)
)
_PAGED_DECODE_TABLE = [
    *(
        shape
        for page_size in (16, 1)
        for heads in ((32, 8, 128), (64, 8, 128))
        for shape in _decode_grid(heads, _LONGEST_GQA, page_size=page_size)
    ),
    *(_shape(32, 32, 128, batch, 2048, page_size=16) for batch in (1, 16, 64)),
    *(_shape(16, 2, 256, batch, 8192, page_size=16) for batch in (1, 16, 64)),
    *(_shape(32, 8, 128, batch, 8192, page_size=16, q_len=4) for batch in (1, 16, 64)),
    _shape(32, 8, 128, 16, 32768, page_size=16, cache="e4m3"),
    _shape(32, 8, 128, 64, 8192, page_size=16, cache="e4m3"),
    _shape(32, 8, 128, 16, 32768, page_size=16, window_left=4095),
    _shape(32, 8, 128, 1, 32768, page_size=16, deterministic=True),
    _shape(32, 8, 128, 16, 8192, page_size=16, deterministic=True),
    _shape(32, 8, 128, 16, 16384, page_size=16, ragged=True),
    _shape(32, 8, 128, 64, 16384, page_size=16, ragged=True),
]
TABLES = {
    "prefill": _PREFILL_TABLE,
    "paged_prefill": _PAGED_PREFILL_TABLE,
    "decode": _DECODE_TABLE,
    "paged_decode": _PAGED_DECODE_TABLE,
}
QUICK = {
    "prefill": [
        _shape(32, 8, 128, 1, 512, causal=True),
        _shape(32, 8, 128, 1, 4096, causal=True),
        _shape(32, 8, 128, 1, 4096, causal=False),
        _shape(32, 32, 64, 2, 4096, causal=True),
        _shape(16, 4, 256, 2, 4096, causal=True),
    ],
    "paged_prefill": [
        _shape(32, 8, 128, 1, 2048, causal=True, page_size=1),
        _shape(32, 8, 128, 1, 2048, causal=True, page_size=16),
    ],
    "decode": [
        _shape(32, 8, 128, 1, 512),
        _shape(32, 8, 128, 1, 8192),
        _shape(32, 8, 128, 16, 2048),
        _shape(32, 8, 128, 64, 8192),
        _shape(16, 2, 256, 16, 8192),
    ],
    "paged_decode": [
        _shape(32, 8, 128, 1, 2048, page_size=16),
        _shape(32, 8, 128, 16, 2048, page_size=16),
        _shape(32, 8, 128, 16, 2048, page_size=1),
        _shape(32, 8, 128, 16, 8192, page_size=16, q_len=4),
        _shape(32, 8, 128, 64, 8192, page_size=16, cache="e4m3"),
        _shape(32, 8, 128, 64, 16384, page_size=16, ragged=True),
    ],
}


def lengths(shape: Shape) -> list[int]:
    """Returns the number of keys of each request.

    Ragged lengths lie between a 32nd of kv_len and all of it, evenly on a logarithmic scale, as
    those of users do; the same for every run.
    """
    batch, longest = shape["batch"], shape["kv_len"]
    if not shape.get("ragged"):
        return [longest] * batch
    draw = random.Random(batch * 1_000_003 + longest)
    return [max(1, round(longest * 32.0 ** -draw.random())) for _ in range(batch)]


def variant(op: str, shape: Shape) -> str:
    """Returns the row's variant: what sets it apart from others of its operator and size."""
    if op == "decode":
        return "dense"
    if op == "prefill":
        return "causal" if shape["causal"] else "full"
    words = [f"page{shape['page_size']}"]
    if op == "paged_prefill":
        words += [] if shape["causal"] else ["full"]
        return " ".join(words)
    if shape["q_len"] != 1:
        words.append(f"q_len{shape['q_len']}")
    if shape["cache"] != "16 bits":
        words.append(shape["cache"])
    if shape["window_left"] >= 0:
        words.append(f"window{shape['window_left'] + 1}")
    words += [name for name in ("ragged", "deterministic") if shape[name]]
    return " ".join(words)


def visible_pairs(q_len: int, kv_len: int, causal: bool) -> float:
    """Returns how many (query, key) pairs count as work; causal halves a square, as is custom."""
    if not causal:
        return q_len * kv_len
    rows = min(q_len, kv_len)  # earlier rows see no key
    return rows * kv_len - rows * rows / 2


def prefill_work(shape: Shape) -> Work:
    """Returns flops of both products, and bytes of q, k, v and the result once."""
    q_len = shape["q_len"] or shape["kv_len"]
    rows = shape["batch"] * shape["head_dim"]
    pairs = visible_pairs(q_len, shape["kv_len"], shape["causal"])
    moved = 2 * rows * (2 * shape["q_heads"] * q_len + 2 * shape["kv_heads"] * shape["kv_len"])
    return Work(num_bytes=moved, flops=4 * rows * shape["q_heads"] * pairs, unit="tflops")


def decode_work(shape: Shape) -> Work:
    """Returns the bytes of K and V that are seen, beside which q and the result are nothing."""
    q_len, left = shape.get("q_len", 1), shape.get("window_left", -1)
    seen = lengths(shape)
    if left >= 0:
        seen = [min(length, left + q_len) for length in seen]
    element = 1 if shape.get("cache") == "e4m3" else 2
    keys = sum(seen) * shape["head_dim"]
    return Work(
        num_bytes=2 * element * keys * shape["kv_heads"],
        flops=4 * keys * shape["q_heads"] * q_len,
        unit="tbps",
    )


WORK = {
    "prefill": prefill_work,
    "paged_prefill": prefill_work,
    "decode": decode_work,
    "paged_decode": decode_work,
}
