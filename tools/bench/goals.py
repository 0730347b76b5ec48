"""What a measured row has to reach, and the table that says which rows do.

A row stands against the best of its peers. Where that peer needs little time, most of it is launch
and latency that a better kernel can do without, so more is asked for; a kernel that reads at more
than 4.4 TB/s leaves nothing to gain. Rows may also have a figure to reach of their own, and ours
under one condition may stand against ours under another (the peers named "astrai_...").
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tools.bench.results import BANDWIDTH_TBPS, Row

BEST_PEER = "the best peer"
# Equal within the noise of a measurement.
EQUAL = 0.98
# (the peer takes less than this many microseconds, the ratio to reach)
SHORT_CALLS = ((12.0, 1.3), (20.0, 1.15))
# A peer above this reads as fast as the memory allows.
SATURATED_TBPS = 4.4

# Ours against ours: the least peer_us / us.
SELF_GOALS = {
    "astrai_page_16": 0.97,  # page 1 costs at most 3 % more than page 16
    "astrai_dense": 0.97,  # so does a paged prefill against a dense one
    "astrai_q_len_1": 1 / 1.3,  # four queries cost at most 1.3 of one
    "astrai_bf16_cache": 1 / 0.6,  # an e4m3 cache takes at most 0.6 of the time
}
ENGINE_RATIO = 1.5
ENGINE_BANDWIDTH = 0.65  # of what the best kernel reads, in a decode step of one request
LARGE_KV_BYTES = 0.5e9
LARGE_TENSOR_BYTES = 64e6
FEW_TOKENS = 64


@dataclass(frozen=True)
class Judgement:
    """One thing that a row has to reach.

    Attributes:
        op: Operator of the row.
        label: Which row it is.
        kind: What is counted together: "the best peer", or `against`.
      against: A peer, or what the figure is.
        value: What was measured, in `unit`.
        goal: What it is held against.
        held: Whether it is reached.
        unit: "x" for a ratio to a peer, where larger is better, else that of a figure.
    """

    op: str
    label: str
    kind: str
    against: str
    value: float
    goal: str
    held: bool
    unit: str = "x"


def least_ratio(row: Row) -> float | None:
    """Returns the least peer_us / us that the row may have; None if nothing is asked for."""
    if row.peer.startswith("astrai_"):
        return SELF_GOALS.get(row.peer)
    if row.op in ("decode", "paged_decode"):
        for limit_us, ratio in SHORT_CALLS:
            if row.peer_us < limit_us:
                return ratio
        return EQUAL if row.work.rate(row.peer_us) > SATURATED_TBPS else 1.0
    if row.op == "prefill":
        return 1.0
    if row.op == "paged_prefill":
        if row.peer != "flashinfer":
            return None  # a dense peer is only there to compare with
        return 1.1 if row.shape["page_size"] == 1 else 1.0
    if row.op == "rope_append_kv":
        return 1.0
    if row.op == "engine":
        return ENGINE_RATIO if row.variant == "generate" else None
    return None


def holds(ratio: float, goal: float) -> bool:
    """Whether a ratio reaches a goal; equal counts as reached within the noise."""
    return ratio >= (EQUAL if goal == 1.0 else goal)


def own_figures(row: Row) -> list[tuple[str, float, float, bool, str]]:
    """Returns (name, value, bound, held, unit) of the figures that ours has to reach by itself."""
    rate, found = row.work.rate(row.us), []

    def at_least(tbps: float) -> None:
        found.append(("bandwidth", rate, tbps, rate >= tbps, "TB/s"))

    def at_most(us: float) -> None:
        found.append(("time", row.us, us, row.us <= us, "us"))

    if row.op in ("decode", "paged_decode") and row.work.num_bytes >= LARGE_KV_BYTES:
        at_least(SATURATED_TBPS)
    if row.op in ("rotary", "rope_append_kv"):
        if row.work.num_bytes >= LARGE_TENSOR_BYTES:
            at_least(3.8 if row.op == "rotary" else 3.5)
        if row.shape["tokens"] <= FEW_TOKENS:
            at_most(2.0 if row.op == "rotary" else 3.0)
    if row.op == "engine" and row.variant == "decode_step" and row.shape["batch"] == 1:
        at_least(ENGINE_BANDWIDTH * BANDWIDTH_TBPS)
    return found


def judge(rows: Iterable[Row]) -> list[Judgement]:
    """Returns what the rows have to reach, in their order.

    Rows that differ in the peer alone are judged together: the best of the peers that a goal is set
    against, each "astrai_..." for itself, and FlashAttention-2 too where it is not the best.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        key = json.dumps([row.op, row.variant, row.dtype, row.shape], sort_keys=True)
        groups.setdefault(key, []).append(row)
    return [judgement for group in groups.values() for judgement in _judge_group(group)]


def _judge_group(rows: Sequence[Row]) -> list[Judgement]:
    found = []

    def add(row: Row, kind: str) -> None:
        goal = least_ratio(row)
        if goal is not None:
            held, text = holds(row.ratio, goal), f">= {goal:.2f}"
            found.append(Judgement(row.op, row.label(), kind, row.peer, row.ratio, text, held))

    others = [r for r in rows if not r.peer.startswith("astrai_") and least_ratio(r) is not None]
    if others:
        best = min(others, key=lambda row: row.peer_us)
        add(best, BEST_PEER)
        for row in others:
            if row.peer == "flash_attention_2" and row is not best:
                add(row, row.peer)
    for row in rows:
        if row.peer.startswith("astrai_"):
            add(row, row.peer)
    first = rows[0]
    for name, value, bound, held, unit in own_figures(first):
        sign = "<=" if unit == "us" else ">="
        goal = f"{sign} {bound:.2f}"
        found.append(Judgement(first.op, first.label(), name, name, value, goal, held, unit))
    return found


def table(judgements: Sequence[Judgement]) -> list[str]:
    """Returns the lines of the final table: all that is judged, then the counts."""
    lines = ["", f"{'value':>9}       {'goal':<9} {'':6}  against, row"]
    for j in judgements:
        mark = "held" if j.held else "MISSED"
        lines.append(f"{j.value:9.3f} {j.unit:<5} {j.goal:<9} {mark:<6}  {j.against}; {j.label}")
    return [*lines, "", *counts(judgements)]


def counts(judgements: Sequence[Judgement]) -> list[str]:
    """Returns a line for each operator and kind of goal: how many are held, how many missed."""
    lines = []
    for op, kind in dict.fromkeys((j.op, j.kind) for j in judgements):
        mine = [j for j in judgements if (j.op, j.kind) == (op, kind)]
        held = sum(j.held for j in mine)
        lines.append(f"{op}, {kind}: {held} held, {len(mine) - held} missed")
    return lines
