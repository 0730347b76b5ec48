"""The benchmarks' tables and work counts, and what they say where nothing can be measured."""

import json
import sys
import time
import types
from typing import ClassVar

import pytest
from absl import flags

from tools.bench import (
    attention_rows,
    bench_attention,
    bench_binding,
    bench_engine,
    bench_fp8,
    bench_rope_append,
    bench_rotary,
    harness,
    results,
)


@pytest.fixture(autouse=True)
def parsed_flags():
    flags.FLAGS(["test"])
    yield
    flags.FLAGS.unparse_flags()
    for name in ("shapes", "part", "seconds", "json"):
        flags.FLAGS[name].unparse()


def flag_values(*args):
    flags.FLAGS(["test", *args])


@pytest.mark.parametrize(
    ("table", "defaults"),
    [
        *((attention_rows.TABLES[op], attention_rows.DEFAULTS[op]) for op in attention_rows.TABLES),
        *((attention_rows.QUICK[op], attention_rows.DEFAULTS[op]) for op in attention_rows.QUICK),
        *(
            (table, bench.DEFAULTS)
            for bench in (bench_rotary, bench_rope_append, bench_fp8, bench_engine)
            for table in (bench.TABLE, bench.QUICK)
        ),
    ],
)
def test_tables_use_known_keys_and_hold_no_row_twice(table, defaults):
    rows = [tuple(sorted({**defaults, **shape}.items())) for shape in table]
    assert all(set(shape) <= set(defaults) for shape in table)
    assert len(set(rows)) == len(rows)


def test_every_row_of_the_targets_is_there():
    tables = attention_rows.TABLES
    assert len(tables["prefill"]) == 2 * (6 + 5 + 6 + 6)
    assert len(tables["decode"]) == 15 + (4 + 4 + 3 + 2) + 15 + 16
    assert len(tables["paged_prefill"]) == 2 * 10
    plain = [s for s in tables["paged_decode"] if s["head_dim"] == 128 and len(s) == 6]
    for page_size in (1, 16):
        for q_heads in (32, 64):
            found = [
                (shape["batch"], shape["kv_len"])
                for shape in plain
                if (shape["page_size"], shape["q_heads"], shape["kv_heads"])
                == (page_size, q_heads, 8)
            ]
            assert len(found) == 15


def test_quick_rows_are_like_those_of_the_table():
    for op in ("prefill", "decode", "paged_prefill"):
        assert all(shape in attention_rows.TABLES[op] for shape in attention_rows.QUICK[op])


def test_every_feature_has_a_row():
    shapes = [
        {**attention_rows.PAGED_DECODE_DEFAULTS, **shape}
        for shape in attention_rows.TABLES["paged_decode"]
    ]
    variants = {attention_rows.variant("paged_decode", shape) for shape in shapes}
    assert variants == {
        "page1",
        "page16",
        "page16 q_len4",
        "page16 e4m3",
        "page16 window4096",
        "page16 ragged",
        "page16 deterministic",
    }


def test_ragged_lengths_are_the_same_in_every_run():
    shape = {**attention_rows.PAGED_DECODE_DEFAULTS, "batch": 64, "kv_len": 16384, "ragged": True}
    lengths = attention_rows.lengths(shape)
    assert lengths == attention_rows.lengths(dict(shape))
    assert 16384 // 32 <= min(lengths) < 1000
    assert 8192 < max(lengths) <= 16384
    assert attention_rows.lengths({**shape, "ragged": False}) == [16384] * 64


def test_paged_decode_counts_what_is_seen():
    work = attention_rows.decode_work
    shape = {**attention_rows.PAGED_DECODE_DEFAULTS, "batch": 4, "kv_len": 8192}
    plain = work(shape)
    assert plain == work({**attention_rows.DECODE_DEFAULTS, "batch": 4, "kv_len": 8192})
    assert work({**shape, "cache": "e4m3"}).num_bytes == plain.num_bytes / 2
    assert work({**shape, "window_left": 1023}).num_bytes == plain.num_bytes / 8
    four = work({**shape, "q_len": 4})
    assert (four.num_bytes, four.flops) == (plain.num_bytes, 4 * plain.flops)
    ragged = {**shape, "ragged": True}
    seen = sum(attention_rows.lengths(ragged))
    assert work(ragged).num_bytes == plain.num_bytes * seen / (4 * 8192)


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
    assert attention_rows.visible_pairs(2048, 2048, causal=False) == 2048**2
    assert attention_rows.visible_pairs(2048, 2048, causal=True) == 2048**2 / 2
    assert attention_rows.visible_pairs(1, 4096, causal=True) == 4095.5
    # Only the last 4 of 8 queries see a key.
    assert attention_rows.visible_pairs(8, 4, causal=True) == 8


def test_prefill_flops_as_in_the_targets():
    shape = {**attention_rows.PREFILL_DEFAULTS, "kv_len": 2048, "causal": True}
    assert attention_rows.prefill_work(shape).flops == 4 * 32 * 2048 * 2048 * 128 / 2


def test_decode_bytes_as_in_the_targets():
    shape = {**attention_rows.DECODE_DEFAULTS, "batch": 64, "kv_len": 8192}
    work = attention_rows.decode_work(shape)
    assert work.num_bytes / 4.65e6 == pytest.approx(461.82, abs=0.01)


def test_decode_rotates_all_but_the_smallest_rows():
    assert not bench_attention._is_rotated(2 << 20)
    assert bench_attention._is_rotated(8 << 20)


def test_rotary_bytes_count_reading_writing_and_angles():
    shape = {**bench_rotary.DEFAULTS, "tokens": 10}
    assert bench_rotary.bytes_moved(shape) == 10 * 40 * 128 * 2 * 2 + 10 * 128 * 4


def test_rope_append_bytes_count_reading_writing_angles_and_indices():
    shape = {**bench_rope_append.DEFAULTS, "tokens": 10}
    work = bench_rope_append.rope_append_work(shape)
    assert work.num_bytes == 10 * ((32 + 16) * 128 * 2 * 2 + 128 * 4 + 8)
    narrow = bench_rope_append.rope_append_work({**shape, "cache": "e4m3"})
    assert work.num_bytes - narrow.num_bytes == 10 * 16 * 128


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


def test_candidates_with_other_results_are_a_failure(monkeypatch, capsys):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(harness, "_Graph", lambda calls: FakeGraph(("x", [1.0] * 99)))
    monkeypatch.setattr(harness, "_journal", harness._Journal(row="the row"))
    right, noise = torch.randn(64), 1e-3 * torch.randn(64)
    for other, told in (
        (right + noise, []),
        (right * 1.1, ["the row: the result differs from that of peer by 0.091"]),
        (right * float("nan"), ["the row: the result differs from that of peer by nan"]),
    ):
        harness._journal.failures.clear()
        harness.measure(
            {
                "astrai": harness.Candidate([lambda: right], lambda x: x),
                "peer": harness.Candidate([lambda x=other: x[None]], lambda x: x[0]),
                "not compared": [lambda: None],
            }
        )
        assert harness._journal.failures == told
        assert capsys.readouterr().err.splitlines() == told


@pytest.fixture
def gpu(monkeypatch):
    """A run without a GPU that behaves as if there was one."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(harness, "needs_gpu", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return monkeypatch


def made_row(shape):
    work = results.Work(num_bytes=1e6, flops=1.0, unit="tbps")
    return results.Row("rotary", shape, "bfloat16", "v", 2.0, work, "torch", 4.0, "gpu", "2.11")


def test_a_row_that_fails_is_told_and_the_others_are_measured(gpu, capsys, tmp_path):
    def rows(shape):
        if shape["tokens"] == 2:
            raise RuntimeError("an unusual launch")
        yield made_row(shape)

    flag_values(f"--json={tmp_path / 'x.jsonl'}")
    shapes = [{"tokens": n} for n in (1, 2, 3)]
    assert harness.run(lambda: harness.each("rotary", shapes, rows)) == 1
    out = capsys.readouterr().out
    assert "FAILED rotary tokens=2: RuntimeError: an unusual launch" in out
    assert "rotary, time: 2 held, 0 missed" in out
    written = (tmp_path / "x.jsonl").read_text().splitlines()
    assert [json.loads(line)["shape"] for line in written] == [{"tokens": 1}, {"tokens": 3}]
    assert harness.run(lambda: harness.each("rotary", shapes[:1], rows)) == 0


def test_a_gpu_beyond_use_ends_the_run(gpu):
    def lost():
        raise RuntimeError("an illegal memory access was encountered")

    gpu.setattr("torch.cuda.synchronize", lost)

    def rows(shape):
        raise ValueError("first sign")
        yield

    with pytest.raises(RuntimeError, match="illegal memory access"):
        harness.run(lambda: harness.each("rotary", [{"tokens": 1}, {"tokens": 2}], rows))


def test_peers_that_did_not_run_are_told_once_at_the_end(gpu, capsys):
    def rows(shape):
        harness.note_peer_failure("flashinfer", RuntimeError("no kernel\nmore"))
        yield made_row(shape)

    harness.run(lambda: harness.each("rotary", [{"tokens": 1}, {"tokens": 2}], rows))
    told = "flashinfer does not run here: no kernel (2 rows, the first: rotary tokens=1)"
    assert told in capsys.readouterr().out.splitlines()


def test_no_row_is_started_after_the_time_is_over(gpu, capsys):
    flag_values("--seconds=0")
    harness.run(lambda: harness.each("rotary", [{"tokens": 1}], lambda shape: [made_row(shape)]))
    assert "left out, the time was over: rotary tokens=1" in capsys.readouterr().out


def test_parts_are_disjoint_and_make_up_the_whole():
    shapes = [{"tokens": n} for n in range(7)]
    found = []
    for part in ("1/3", "2/3", "3/3"):
        flags.FLAGS.unparse_flags()
        flag_values(f"--part={part}")
        found.append([shape["tokens"] for shape in harness.part_of(shapes)])
    assert found == [[0, 3, 6], [1, 4], [2, 5]]


@pytest.mark.parametrize("part", ["0/2", "3/2", "1", "a/b", "1/0", "-1/2"])
def test_a_part_that_is_none_is_refused(part):
    flag_values(f"--part={part}")
    with pytest.raises(ValueError, match="--part: must be K/N"):
        harness.part_of([{}])


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
