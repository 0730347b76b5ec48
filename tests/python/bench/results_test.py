"""The harness's maths: bounds, rates, rows, shapes and the plan of a measurement."""

import json

import pytest

from tools.bench import harness, results


def make_row(**changes):
    values = {
        "op": "decode",
        "shape": {"batch": 16, "kv_len": 2048},
        "dtype": "bfloat16",
        "variant": "dense",
        "us": 40.0,
        "work": results.Work(num_bytes=134217728, flops=2147483648, unit="tbps"),
        "peer": "cudnn",
        "peer_us": 34.0,
        "gpu": "NVIDIA H200",
        "torch": "2.11.0",
        "date": "2026-11-30",
    }
    return results.Row(**{**values, **changes})


def test_floor_is_the_larger_of_bytes_and_flops():
    assert results.floor_us(4.65e12, 0, "bfloat16") == pytest.approx(1e6)
    assert results.floor_us(0, 989e12, "bfloat16") == pytest.approx(1e6)
    assert results.floor_us(0, 989e12, "float8_e4m3fn") == pytest.approx(1e6 * 989 / 1979)
    assert results.floor_us(4.65e6, 989e6 * 3, "float16") == pytest.approx(3.0)


def test_floor_agrees_with_the_table_of_targets():
    # 32 q heads, 8 kv heads of 128, batch 16, kv 2048: 28.86 us at 4.65 TB/s.
    assert make_row().floor == pytest.approx(28.86, abs=0.01)


def test_row_has_exactly_the_stated_fields():
    row = json.loads(make_row().to_json())
    assert list(row) == [
        "op",
        "shape",
        "dtype",
        "variant",
        "us",
        "tbps",
        "peer",
        "peer_us",
        "ratio",
        "floor_us",
        "gpu",
        "torch",
        "date",
    ]
    assert row["ratio"] == pytest.approx(34 / 40)
    assert row["tbps"] == pytest.approx(134217728 / 40e6, abs=1e-3)


def test_compute_bound_rows_count_flops():
    work = results.Work(num_bytes=1, flops=8e9, unit="tflops")
    row = make_row(work=work, us=20.0).to_dict()
    assert row["tflops"] == pytest.approx(400.0)
    assert "tbps" not in row


def test_a_line_of_json_is_one_line():
    assert "\n" not in make_row().to_json()


def test_the_date_is_an_iso_date():
    row = results.Row(**{k: v for k, v in vars(make_row()).items() if k != "date"})
    year, month, day = row.date.split("-")
    assert len(year) == 4
    assert len(month) == len(day) == 2


DEFAULTS = {"batch": 1, "causal": True, "scale": 0.5, "layout": "blhd"}


def test_shape_from_the_command_line():
    assert results.parse_shape("batch=4, causal=false", DEFAULTS) == {
        "batch": 4,
        "causal": False,
        "scale": 0.5,
        "layout": "blhd",
    }
    assert results.parse_shape("scale=2,layout=bhld", DEFAULTS)["scale"] == 2.0


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("heads=4", "'heads=4' must be key=value with a key of batch, causal"),
        ("batch", "'batch' must be key=value"),
        ("", "must be key=value"),
        ("batch=x", "batch must be of type int, got 'x'"),
        ("causal=perhaps", "causal must be of type bool"),
    ],
)
def test_bad_shape_names_what_is_wrong(text, part):
    with pytest.raises(ValueError, match="--shapes") as error:
        results.parse_shape(text, DEFAULTS)
    assert part in str(error.value)


def test_order_is_mirrored():
    assert harness.mirrored_order(2) == [0, 1, 1, 0]
    assert harness.mirrored_order(3) == [0, 1, 2, 2, 1, 0]


@pytest.mark.parametrize("bytes_per_set", [1, 1 << 20, 33 << 20, 60 << 20, 300 << 20, 4 << 30])
def test_sets_pass_four_times_the_l2(bytes_per_set):
    l2 = 60 << 20
    sets = harness.sets_to_rotate(bytes_per_set, l2, 100 << 30)
    assert sets >= 2
    assert sets * bytes_per_set > 4 * l2
    assert sets == 2 or (sets - 1) * bytes_per_set <= 4 * l2


def test_sets_fit_the_memory():
    assert harness.sets_to_rotate(40 << 30, 60 << 20, 100 << 30) == 2
    assert harness.sets_to_rotate(40 << 30, 60 << 20, 50 << 30) == 1
    assert harness.sets_to_rotate(40 << 30, 60 << 20, 10 << 30) == 1


def test_graphs_run_long_enough_but_not_forever():
    assert harness.passes_per_graph(2.0, 1) == harness.MAX_CALLS_PER_GRAPH
    assert harness.passes_per_graph(300.0, 3) == 10
    assert harness.passes_per_graph(50_000.0, 4) == 1
    assert harness.passes_per_graph(2.0, 1000) == 1
