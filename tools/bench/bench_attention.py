"""Attention, dense and paged, against cuDNN, FlashAttention-2 and -4, and FlashInfer.

    python -m tools.bench.bench_attention --only decode --quick --json decode.jsonl

Prefill keeps its inputs in the L2. Decode rotates K and V, except where eight calls fit the L2
together. cuDNN and FlashAttention-2 run through torch's SDPA on contiguous [B, H, S, D] copies, the
layout they like best; FlashAttention-2 gets the group of q heads that share a K/V head as rows of
one head (decode), or K and V repeated beforehand (prefill). FlashInfer reads our caches through the
same pages; its plan, like our work map, is made outside of what is timed. Where it is not
installed, cuDNN on a dense copy of the cache takes its place, as "cudnn_dense".

The peers named "astrai_..." are ours under another condition.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from absl import flags

from tools.bench import attention_rows, harness, peers
from tools.bench.attention_paged import paged_decode_candidates, paged_prefill_candidates
from tools.bench.attention_rows import Shape
from tools.bench.harness import Candidate
from tools.bench.results import Row

_ONLY = flags.DEFINE_multi_enum(
    "only", [], list(attention_rows.TABLES), "Runs this table alone; may be given several times."
)

# Keys and values of eight calls that fit this stay in the L2.
_L2_BYTES = 60 << 20


def _make(shape: Shape, q_len: int):
    """Returns random q, k, v in [B, L, H, D]."""
    import torch

    def tensor(length, heads):
        return torch.randn(
            shape["batch"],
            length,
            heads,
            shape["head_dim"],
            device=harness.DEVICE,
            dtype=getattr(torch, harness.dtype()),
        )

    kv_len, kv_heads = shape["kv_len"], shape["kv_heads"]
    return tensor(q_len, shape["q_heads"]), tensor(kv_len, kv_heads), tensor(kv_len, kv_heads)


def _as_is(result):
    return result


def _heads_last(result):
    """[B, H, L, D] as [B, L, H, D]."""
    return result.transpose(1, 2)


def _prefill_candidates(shape: Shape) -> dict[str, Candidate]:
    from torch.nn.attention import SDPBackend

    from astrai.extension import ops

    q_len = shape["q_len"]
    q, k, v = _make(shape, q_len)
    causal = shape["causal"]
    found = {"astrai": Candidate([lambda: ops.attn_prefill(q, k, v, is_causal=causal)], _as_is)}
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
    for name, call in (
        ("cudnn", peers.sdpa(SDPBackend.CUDNN_ATTENTION, qt, kt, vt, **mask, **gqa)),
        ("flash_attention_2", peers.sdpa(SDPBackend.FLASH_ATTENTION, qt, *wide, **mask)),
    ):
        found[name] = Candidate([call], _heads_last)
    flash = peers.installed(peers.flash_attention_4)
    if flash is not None:
        found["flash_attention_4"] = Candidate([lambda: flash(q, k, v, causal=causal)], _as_is)
    return found


def _decode_candidates(shape: Shape, sets: int) -> dict[str, Candidate]:
    from torch.nn.attention import SDPBackend

    from astrai.extension import ops

    group = shape["q_heads"] // shape["kv_heads"]
    gqa = {"enable_gqa": group > 1}
    flash = peers.installed(peers.flash_attention_4)
    ours, cudnn, flash_2, flash_4 = [], [], [], []
    for _ in range(sets):
        q, k, v = _make(shape, 1)
        ours.append(lambda q=q, k=k, v=v: ops.attn_decode(q, k, v))
        qt, kt, vt = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        cudnn.append(peers.sdpa(SDPBackend.CUDNN_ATTENTION, qt, kt, vt, **gqa))
        packed = q.view(shape["batch"], shape["kv_heads"], group, shape["head_dim"])
        flash_2.append(peers.sdpa(SDPBackend.FLASH_ATTENTION, packed, kt, vt))
        flash_4.append(lambda q=q, k=k, v=v: flash(q, k, v, causal=False))
    found = {
        "astrai": Candidate(ours, _as_is),
        "cudnn": Candidate(cudnn, _heads_last),
        "flash_attention_2": Candidate(flash_2, lambda out: out.flatten(1, 2)[:, None]),
    }
    if flash is not None:
        found["flash_attention_4"] = Candidate(flash_4, _as_is)
    return found


def _decode_sets(shape: Shape) -> int:
    """How many caches to make; ours and the peers may hold a copy each, of 16 bits."""
    whole = {**shape, "window_left": -1, "cache": "16 bits"}
    num_bytes = attention_rows.decode_work(whole).num_bytes
    return harness.input_sets(int(num_bytes), _is_rotated(num_bytes), copies=2)


def _is_rotated(kv_bytes: float) -> bool:
    return 8 * kv_bytes >= _L2_BYTES


def _candidates(op: str, shape: Shape) -> dict[str, Candidate]:
    if op == "prefill":
        return _prefill_candidates(shape)
    if op == "paged_prefill":
        return paged_prefill_candidates(shape)
    sets = _decode_sets(shape)
    if op == "decode":
        return _decode_candidates(shape, sets)
    return paged_decode_candidates(shape, sets)


def generate() -> Iterator[Row]:
    """Yields the rows of the shapes that the flags ask for."""
    for sentence in peers.missing():
        print(sentence, file=sys.stderr)
    for op in _ONLY.value or attention_rows.TABLES:

        def rows(shape: Shape, op: str = op) -> Iterator[Row]:
            if "q_len" in shape:
                shape["q_len"] = shape["q_len"] or shape["kv_len"]
            times = harness.measure(_candidates(op, shape))
            work, variant = attention_rows.WORK[op](shape), attention_rows.variant(op, shape)
            yield from harness.rows_of(op, shape, harness.dtype(), variant, work, times)

        table, quick = attention_rows.TABLES[op], attention_rows.QUICK[op]
        shapes = harness.shapes_to_run(table, quick, attention_rows.DEFAULTS[op])
        yield from harness.each(op, shapes, rows)


def _check_flags() -> None:
    """With several operators, a shape of --shapes would not say which one it is for."""
    flags.register_multi_flags_validator(
        ["only", "shapes"],
        lambda values: not values["shapes"] or len(values["only"]) == 1,
        message="--shapes needs one --only",
    )


if __name__ == "__main__":
    _check_flags()
    harness.main(generate)
