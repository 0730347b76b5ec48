"""The goals of targets: which ratio a row needs, who is judged, and how it is counted."""

import pytest

from tools.bench import goals
from tools.bench.results import Row, Work

KV = {"batch": 1, "q_heads": 32, "kv_heads": 8, "head_dim": 128, "kv_len": 2048}


def row(op="decode", peer="cudnn", us=10.0, peer_us=10.0, num_bytes=1e6, variant="v", **shape):
    return Row(
        op=op,
        shape={**KV, **shape},
        dtype="bfloat16",
        variant=variant,
        us=us,
        work=Work(num_bytes=num_bytes, flops=1.0, unit="tbps"),
        peer=peer,
        peer_us=peer_us,
        gpu="NVIDIA H200",
        torch="2.11.0",
    )


@pytest.mark.parametrize(
    ("peer_us", "num_bytes", "goal"),
    [
        (7.73, 2e6, 1.3),
        (11.99, 2e6, 1.3),
        (12.0, 2e6, 1.15),
        (19.99, 2e6, 1.15),
        (20.0, 2e6, 1.0),
        (121.0, 4.39e6 * 121, 1.0),
        (121.0, 4.44e6 * 121, 0.98),
    ],
)
@pytest.mark.parametrize("op", ["decode", "paged_decode"])
def test_decode_asks_for_more_where_the_peer_is_short(op, peer_us, num_bytes, goal):
    assert goals.least_ratio(row(op, peer_us=peer_us, num_bytes=num_bytes)) == goal


def test_equal_is_reached_within_the_noise_but_more_is_not():
    assert goals.holds(0.98, 1.0) and not goals.holds(0.9799, 1.0)
    assert goals.holds(1.15, 1.15) and not goals.holds(1.149, 1.15)
    assert goals.holds(0.98, 0.98) and not goals.holds(0.979, 0.98)


@pytest.mark.parametrize(
    ("peer", "page_size", "goal"),
    [("flashinfer", 1, 1.1), ("flashinfer", 16, 1.0), ("cudnn_dense", 1, None)],
)
def test_paged_prefill_stands_against_flashinfer(peer, page_size, goal):
    assert goals.least_ratio(row("paged_prefill", peer, page_size=page_size)) == goal


@pytest.mark.parametrize(
    ("peer", "bad", "good"),
    [
        ("astrai_page_16", 0.969, 0.971),
        ("astrai_dense", 0.969, 0.971),
        ("astrai_q_len_1", 1 / 1.31, 1 / 1.29),
        ("astrai_bf16_cache", 1 / 0.61, 1 / 0.59),
    ],
)
def test_ours_against_ours(peer, bad, good):
    for ratio, held in ((bad, False), (good, True)):
        (judgement,) = goals.judge([row("paged_decode", peer, us=100.0, peer_us=100.0 * ratio)])
        assert judgement.held is held
        assert judgement.kind == peer


def test_a_condition_without_a_goal_is_not_judged():
    assert goals.judge([row("paged_decode", "astrai_not_deterministic")]) == []


def test_only_the_best_peer_counts():
    found = goals.judge(
        [
            row(peer="flash_attention_4", us=50, peer_us=90.0),
            row(peer="cudnn", us=50, peer_us=40.0),
        ]
    )
    assert [(j.kind, j.against, j.held) for j in found] == [("the best peer", "cudnn", False)]


def test_the_goal_follows_from_the_best_peers_time():
    rows = [
        row(peer="cudnn", us=10, peer_us=11.0),
        row(peer="flash_attention_4", us=10, peer_us=25),
    ]
    (judgement,) = goals.judge(rows)
    assert judgement.goal == ">= 1.30"
    assert not judgement.held


def test_flash_attention_2_is_judged_beside_a_better_peer():
    rows = [
        row("prefill", "cudnn", us=60, peer_us=40.0),
        row("prefill", "flash_attention_2", us=60, peer_us=66.0),
    ]
    found = goals.judge(rows)
    assert [(j.kind, j.held) for j in found] == [
        ("the best peer", False),
        ("flash_attention_2", True),
    ]


def test_shapes_and_variants_are_judged_apart():
    rows = [row(batch=1), row(batch=2), row(batch=2, variant="w"), row("paged_decode")]
    assert len(goals.judge(rows)) == 4


@pytest.mark.parametrize(
    ("changes", "unit", "held"),
    [
        ({"num_bytes": 0.5e9, "us": 0.5e9 / 4.41e6}, "TB/s", True),
        ({"num_bytes": 0.5e9, "us": 0.5e9 / 4.39e6}, "TB/s", False),
        ({"op": "rope_append_kv", "tokens": 64, "us": 2.9}, "us", True),
        ({"op": "rope_append_kv", "tokens": 64, "us": 3.1}, "us", False),
        ({"op": "rope_append_kv", "tokens": 9999, "num_bytes": 64e6, "us": 18.2}, "TB/s", True),
        ({"op": "rope_append_kv", "tokens": 9999, "num_bytes": 64e6, "us": 18.4}, "TB/s", False),
        ({"op": "rotary", "tokens": 64, "us": 2.1}, "us", False),
        ({"op": "rotary", "tokens": 9999, "num_bytes": 64e6, "us": 16.8}, "TB/s", True),
        (
            {"op": "engine", "variant": "decode_step", "num_bytes": 3.03e6, "us": 1.0},
            "TB/s",
            True,
        ),
        (
            {"op": "engine", "variant": "decode_step", "num_bytes": 3.02e6, "us": 1.0},
            "TB/s",
            False,
        ),
    ],
)
def test_figures_of_their_own(changes, unit, held):
    judged = [j for j in goals.judge([row(**changes)]) if j.unit == unit]
    assert [j.held for j in judged] == [held]


def test_small_caches_and_larger_batches_have_no_bandwidth_goal():
    assert goals.own_figures(row(num_bytes=0.49e9)) == []
    assert goals.own_figures(row("engine", variant="decode_step", batch=8)) == []


def test_engine_needs_half_as_much_again_for_the_whole_call():
    assert goals.least_ratio(row("engine", "transformers", variant="generate")) == 1.5
    assert goals.least_ratio(row("engine", "transformers", variant="decode_step")) is None
    assert goals.least_ratio(row("engine", "astrai_step", variant="kernels")) is None


def test_the_table_marks_what_is_missed_and_counts():
    rows = [
        row(batch=1, us=10, peer_us=14.0),
        row(batch=2, us=10, peer_us=11.0),
        row("paged_decode", "flashinfer", us=50, peer_us=60.0),
        row("paged_decode", "astrai_page_16", us=50, peer_us=49.0),
    ]
    lines = goals.table(goals.judge(rows))
    assert lines[2].split()[:5] == ["1.400", "x", ">=", "1.15", "held"]
    assert lines[3].split()[:5] == ["1.100", "x", ">=", "1.30", "MISSED"]
    assert lines[-3:] == [
        "decode, the best peer: 1 held, 1 missed",
        "paged_decode, the best peer: 1 held, 0 missed",
        "paged_decode, astrai_page_16: 1 held, 0 missed",
    ]
