"""The benchmarks' tables and work counts, and what they say where nothing can be measured."""

import sys
import time
import types
from typing import ClassVar

import pytest
from absl import flags

from tools.bench import bench_attention, bench_binding, bench_fp8, bench_rotary, harness


@pytest.fixture(autouse=True)
def parsed_flags():
    flags.FLAGS(["test"])
    yield
    flags.FLAGS.unparse_flags()
    flags.FLAGS["shapes"].unparse()


def flag_values(*args):
    flags.FLAGS(["test", *args])


@pytest.mark.parametrize(
    ("table", "defaults"),
    [
        (bench_attention.PREFILL_TABLE, bench_attention.PREFILL_DEFAULTS),
        (bench_attention.PREFILL_QUICK, bench_attention.PREFILL_DEFAULTS),
        (bench_attention.DECODE_TABLE, bench_attention.DECODE_DEFAULTS),
        (bench_attention.DECODE_QUICK, bench_attention.DECODE_DEFAULTS),
        (bench_rotary.TABLE, bench_rotary.DEFAULTS),
        (bench_rotary.QUICK, bench_rotary.DEFAULTS),
        (bench_fp8.TABLE, bench_fp8.DEFAULTS),
        (bench_fp8.QUICK, bench_fp8.DEFAULTS),
    ],
)
def test_tables_use_known_keys_and_hold_no_row_twice(table, defaults):
    rows = [tuple(sorted({**defaults, **shape}.items())) for shape in table]
    assert all(set(shape) <= set(defaults) for shape in table)
    assert len(set(rows)) == len(rows)


def test_every_row_of_the_targets_is_there():
    assert len(bench_attention.PREFILL_TABLE) == 2 * (6 + 5 + 6 + 6)
    assert len(bench_attention.DECODE_TABLE) == 15 + (4 + 4 + 3 + 2) + 15 + 16


def test_quick_rows_are_rows_of_the_table():
    assert all(shape in bench_attention.PREFILL_TABLE for shape in bench_attention.PREFILL_QUICK)
    assert all(shape in bench_attention.DECODE_TABLE for shape in bench_attention.DECODE_QUICK)


def test_shapes_flag_adds_and_only_shapes_replaces():
    table, quick, defaults = [{"m": 1}, {"m": 2}], [{"m": 2}], {"m": 0, "n": 7}
    assert harness.shapes_to_run(table, quick, defaults) == [{"m": 1, "n": 7}, {"m": 2, "n": 7}]
    flag_values("--quick", "--shapes=m=5,n=6")
    assert harness.shapes_to_run(table, quick, defaults) == [{"m": 2, "n": 7}, {"m": 5, "n": 6}]
    flags.FLAGS.unparse_flags()
    flag_values("--only_shapes", "--shapes=m=9")
    assert harness.shapes_to_run(table, quick, defaults)[-1] == {"m": 9, "n": 7}


def test_fewer_than_seven_rounds_are_refused():
    with pytest.raises(flags.IllegalFlagValueError):
        flag_values("--rounds=3")


def test_causal_work_is_half_of_a_square():
    assert bench_attention.visible_pairs(2048, 2048, causal=False) == 2048**2
    assert bench_attention.visible_pairs(2048, 2048, causal=True) == 2048**2 / 2
    assert bench_attention.visible_pairs(1, 4096, causal=True) == 4095.5
    # Only the last 4 of 8 queries see a key.
    assert bench_attention.visible_pairs(8, 4, causal=True) == 8


def test_prefill_flops_as_in_the_targets():
    shape = {**bench_attention.PREFILL_DEFAULTS, "kv_len": 2048, "causal": True}
    assert bench_attention.prefill_work(shape).flops == 4 * 32 * 2048 * 2048 * 128 / 2


def test_decode_bytes_as_in_the_targets():
    shape = {**bench_attention.DECODE_DEFAULTS, "batch": 64, "kv_len": 8192}
    work = bench_attention.decode_work(shape)
    assert work.num_bytes / 4.65e6 == pytest.approx(461.82, abs=0.01)


def test_decode_rotates_all_but_the_smallest_rows():
    assert not bench_attention._decode_is_rotated(2 << 20)
    assert bench_attention._decode_is_rotated(8 << 20)


def test_rotary_bytes_count_reading_writing_and_angles():
    shape = {**bench_rotary.DEFAULTS, "tokens": 10}
    assert bench_rotary.bytes_moved(shape) == 10 * 40 * 128 * 2 * 2 + 10 * 128 * 4


def test_fp8_work():
    work = bench_fp8.gemm_work({"m": 2, "n": 3, "k": 5})
    assert (work.num_bytes, work.flops) == (10 + 15 + 12, 60)


def loader_with(*names):
    return types.SimpleNamespace(KERNEL_NAMES=list(names))


def test_fp8_says_in_one_sentence_that_it_is_not_built(monkeypatch, capsys):
    extension = types.ModuleType("astrai.extension")
    extension.loader = loader_with("attn_decode", "rotary_emb")
    monkeypatch.setitem(sys.modules, "astrai", types.ModuleType("astrai"))
    monkeypatch.setitem(sys.modules, "astrai.extension", extension)
    assert bench_fp8.run() == 0
    printed = capsys.readouterr().out
    assert printed == bench_fp8.NOT_BUILT + "\n"
    assert "not built yet" in printed
    extension.loader = loader_with("fp8_ops")
    assert bench_fp8.is_built()


class FakeGraph:
    """Stands for a captured graph: a candidate's "calls" are the times that it shall report."""

    log: ClassVar[list[str]] = []

    def __init__(self, calls):
        if calls == "fails":
            raise RuntimeError("no kernel takes this shape\nsecond line")
        self.name, self.times = calls[0], iter(calls[1])

    def time_us(self):
        FakeGraph.log.append(self.name)
        return next(self.times)


def test_candidates_are_interleaved_and_the_median_counts(monkeypatch):
    monkeypatch.setattr(harness, "_Graph", FakeGraph)
    monkeypatch.setattr(FakeGraph, "log", [])
    flag_values("--rounds=7")
    ours, peer = [5.0] * 6 + [4.0] * 7 + [100.0], [8.0] * 14
    assert harness.measure({"astrai": ("a", ours), "peer": ("b", peer)}) == {
        "astrai": 4.5,
        "peer": 8.0,
    }
    assert FakeGraph.log == ["a", "b", "b", "a"] * 7


def test_a_peer_that_does_not_run_is_left_out_with_a_line(monkeypatch, capsys):
    monkeypatch.setattr(harness, "_Graph", FakeGraph)
    times = harness.measure({"astrai": ("a", [1.0] * 99), "peer": "fails"})
    assert list(times) == ["astrai"]
    assert capsys.readouterr().err == "peer does not run here: no kernel takes this shape\n"


def test_our_own_failure_is_an_error(monkeypatch):
    monkeypatch.setattr(harness, "_Graph", FakeGraph)
    with pytest.raises(RuntimeError, match="no kernel takes this shape"):
        harness.measure({"astrai": "fails"})


def test_without_a_gpu_a_benchmark_says_so(monkeypatch, capsys):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def generate():
        raise AssertionError("nothing is measured without a GPU")
        yield

    assert harness.run(generate) == 1
    assert "needs a CUDA GPU" in capsys.readouterr().err


def test_host_time_is_that_of_the_call():
    settled = []

    def call():
        stop = time.perf_counter_ns() + 200_000
        while time.perf_counter_ns() < stop:
            pass

    nanoseconds = bench_binding.host_ns(call, 10, 7, lambda: settled.append(1))
    assert 190_000 < nanoseconds < 2_000_000  # the upper bound leaves room for a busy machine
    assert len(settled) == 15  # a warm-up round, and 7 of the call and of the empty loop each
