"""Dense attention against cuDNN and FlashAttention-2 through torch's SDPA.

    python -m tools.bench.bench_attention --op decode --quick --json decode.jsonl

Prefill keeps its inputs in the L2. Decode rotates K and V, except where eight calls fit the L2
together. The peers get contiguous [B, H, S, D] copies, the layout they like best. FlashAttention
gets the group of q heads that share a K/V head as rows of one head (decode), or K and V repeated
beforehand (prefill); neither is charged to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from absl import flags

from tools.bench import harness
from tools.bench.results import Row, Work

_OP = flags.DEFINE_enum("op", "all", ["all", "prefill", "decode"], "Which tables to run.")

PREFILL_DEFAULTS: dict[str, Any] = {
    "batch": 1,
    "q_heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "q_len": 0,  # 0: as kv_len
    "kv_len": 2048,
    "causal": True,
}
DECODE_DEFAULTS: dict[str, Any] = {
    "batch": 1,
    "q_heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "kv_len": 2048,
}


def _prefill_shape(batch, q_heads, kv_heads, head_dim, kv_len, causal) -> dict[str, Any]:
    return {
        "batch": batch,
        "q_heads": q_heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "kv_len": kv_len,
        "causal": causal,
    }


PREFILL_TABLE = [
    _prefill_shape(*heads, kv_len, causal)
    for heads, longest in (
        ((1, 32, 8, 128), 16384),
        ((4, 32, 8, 128), 8192),
        ((2, 32, 32, 64), 16384),
        ((2, 16, 4, 256), 16384),
    )
    for kv_len in (512, 1024, 2048, 4096, 8192, 16384)
    if kv_len <= longest
    for causal in (True, False)
]
PREFILL_QUICK = [
    _prefill_shape(1, 32, 8, 128, 512, True),
    _prefill_shape(1, 32, 8, 128, 4096, True),
    _prefill_shape(1, 32, 8, 128, 4096, False),
    _prefill_shape(2, 32, 32, 64, 4096, True),
    _prefill_shape(2, 16, 4, 256, 4096, True),
]


def _decode_shape(q_heads, kv_heads, head_dim, batch, kv_len) -> dict[str, Any]:
    return {
        "batch": batch,
        "q_heads": q_heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "kv_len": kv_len,
    }


# The longest kv_len of each batch, where the caches still fit beside the peers' copies.
DECODE_TABLE = [
    _decode_shape(*heads, batch, kv_len)
    for heads, longest in (
        ((32, 8, 128), {1: 32768, 16: 32768, 64: 32768, 128: 8192}),
        ((32, 32, 128), {1: 32768, 16: 32768, 64: 8192, 128: 2048}),
        ((64, 8, 128), {1: 32768, 16: 32768, 64: 32768, 128: 8192}),
        ((16, 2, 256), {1: 32768, 16: 32768, 64: 32768, 128: 32768}),
    )
    for batch in (1, 16, 64, 128)
    for kv_len in (512, 2048, 8192, 32768)
    if kv_len <= longest[batch]
]
DECODE_QUICK = [
    _decode_shape(32, 8, 128, 1, 512),
    _decode_shape(32, 8, 128, 1, 8192),
    _decode_shape(32, 8, 128, 16, 2048),
    _decode_shape(32, 8, 128, 64, 8192),
    _decode_shape(16, 2, 256, 16, 8192),
]


def visible_pairs(q_len: int, kv_len: int, causal: bool) -> float:
    """Returns how many (query, key) pairs count as work; causal halves a square, as is custom."""
    if not causal:
        return q_len * kv_len
    rows = min(q_len, kv_len)  # earlier rows see no key
    return rows * kv_len - rows * rows / 2


def prefill_work(shape: dict[str, Any]) -> Work:
    """Returns flops of both products, and bytes of q, k, v and the result once."""
    q_len = shape["q_len"] or shape["kv_len"]
    rows = shape["batch"] * shape["head_dim"]
    pairs = visible_pairs(q_len, shape["kv_len"], shape["causal"])
    moved = 2 * rows * (2 * shape["q_heads"] * q_len + 2 * shape["kv_heads"] * shape["kv_len"])
    return Work(num_bytes=moved, flops=4 * rows * shape["q_heads"] * pairs, unit="tflops")


def decode_work(shape: dict[str, Any]) -> Work:
    """Returns the bytes of K and V, beside which q and the result are nothing."""
    rows = shape["batch"] * shape["head_dim"] * shape["kv_len"]
    return Work(
        num_bytes=2 * 2 * rows * shape["kv_heads"],
        flops=4 * rows * shape["q_heads"],
        unit="tbps",
    )


def _sdpa(backend, q, k, v, **kwargs):
    """Returns a call of torch's attention on one backend alone."""
    from torch.nn.attention import sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def call():
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, **kwargs)

    return call


def _make(shape: dict[str, Any], q_len: int):
    """Returns random q, k, v in [B, L, H, D]."""
    import torch

    def tensor(length, heads):
        return torch.randn(
            shape["batch"],
            length,
            heads,
            shape["head_dim"],
            device="cuda",
            dtype=getattr(torch, harness.dtype()),
        )

    kv_len, kv_heads = shape["kv_len"], shape["kv_heads"]
    return tensor(q_len, shape["q_heads"]), tensor(kv_len, kv_heads), tensor(kv_len, kv_heads)


def _prefill_candidates(shape: dict[str, Any]) -> dict[str, list[harness.Call]]:
    from torch.nn.attention import SDPBackend

    from astrai.extension import ops

    q_len = shape["q_len"]
    q, k, v = _make(shape, q_len)
    causal = shape["causal"]
    candidates = {"astrai": [lambda: ops.attn_prefill(q, k, v, is_causal=causal)]}
    if causal and q_len != shape["kv_len"]:
        # SDPA's is_causal is aligned top left, another mask than ours unless the lengths are equal.
        from torch.nn.attention.bias import causal_lower_right

        mask = {"attn_mask": causal_lower_right(q_len, shape["kv_len"])}
    else:
        mask = {"is_causal": causal}
    qt, kt, vt = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    group = shape["q_heads"] // shape["kv_heads"]
    wide = [x.repeat_interleave(group, 1) for x in (kt, vt)]
    gqa = {"enable_gqa": group > 1}
    candidates["cudnn"] = [_sdpa(SDPBackend.CUDNN_ATTENTION, qt, kt, vt, **mask, **gqa)]
    candidates["flash_attention_2"] = [_sdpa(SDPBackend.FLASH_ATTENTION, qt, *wide, **mask)]
    return candidates


def _decode_candidates(shape: dict[str, Any], sets: int) -> dict[str, list[harness.Call]]:
    from torch.nn.attention import SDPBackend

    from astrai.extension import ops

    candidates: dict[str, list[harness.Call]] = {"astrai": [], "cudnn": [], "flash_attention_2": []}
    group = shape["q_heads"] // shape["kv_heads"]
    for _ in range(sets):
        q, k, v = _make(shape, 1)
        candidates["astrai"].append(lambda q=q, k=k, v=v: ops.attn_decode(q, k, v))
        qt, kt, vt = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        gqa = {"enable_gqa": group > 1}
        candidates["cudnn"].append(_sdpa(SDPBackend.CUDNN_ATTENTION, qt, kt, vt, **gqa))
        packed = q.view(shape["batch"], shape["kv_heads"], group, shape["head_dim"])
        candidates["flash_attention_2"].append(_sdpa(SDPBackend.FLASH_ATTENTION, packed, kt, vt))
    return candidates


def _decode_is_rotated(kv_bytes: float) -> bool:
    return 8 * kv_bytes >= 60 << 20


def generate() -> Iterator[Row]:
    """Yields the rows of the shapes that the flags ask for."""
    dtype = harness.dtype()
    if _OP.value in ("all", "prefill"):
        for shape in harness.shapes_to_run(PREFILL_TABLE, PREFILL_QUICK, PREFILL_DEFAULTS):
            shape["q_len"] = shape["q_len"] or shape["kv_len"]
            times = harness.measure(_prefill_candidates(shape))
            variant = "causal" if shape["causal"] else "full"
            yield from harness.rows_of("prefill", shape, dtype, variant, prefill_work(shape), times)
    if _OP.value in ("all", "decode"):
        for shape in harness.shapes_to_run(DECODE_TABLE, DECODE_QUICK, DECODE_DEFAULTS):
            work = decode_work(shape)
            # Ours and the peers hold a copy each.
            footprint = int(work.num_bytes)
            rotated = _decode_is_rotated(work.num_bytes)
            sets = harness.input_sets(footprint, rotated, copies=2)
            times = harness.measure(_decode_candidates(shape, sets))
            yield from harness.rows_of("decode", shape, dtype, "dense", work, times)


def _check_flags() -> None:
    """With --op all, a shape of --shapes would not say which operator it is for."""
    flags.register_multi_flags_validator(
        ["op", "shapes"],
        lambda values: not values["shapes"] or values["op"] != "all",
        message="--shapes needs --op prefill or --op decode",
    )


if __name__ == "__main__":
    _check_flags()
    harness.main(generate)
