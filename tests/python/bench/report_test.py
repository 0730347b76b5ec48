"""Tables and charts of measured rows: what they show, and what is refused."""

import importlib.util
import json
import sys

import pytest
from absl import flags

from tools.bench import attention_rows, bench_engine, plot, report, results

PAGE = f"# Results\n\nby hand\n\n{report.BEGIN}\nold\n{report.END}\n\nafter\n"
HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None


def line(op="decode", peer="cudnn", us=40.0, peer_us=34.0, variant="dense", **shape):
    defaults = {
        **attention_rows.DEFAULTS,
        "engine": {**bench_engine.DEFAULTS, "part": variant},
        "rope_append_kv": report.bench_rope_append.DEFAULTS,
    }
    shape = {**defaults[op], **shape}
    row = results.Row(
        op=op,
        shape=shape,
        dtype="bfloat16",
        variant=variant,
        us=us,
        work=report.WORK[op](shape),
        peer=peer,
        peer_us=peer_us,
        gpu="NVIDIA H200",
        torch="2.11.0",
        date="2026-11-30",
    )
    return row.to_dict()


def rotary_line(peer="torch", peer_us=80.0, **shape):
    shape = {**report.bench_rotary.DEFAULTS, **shape}
    variant = "interleaved" if shape["interleaved"] else "half_split"
    row = results.Row(
        "rotary", shape, "bfloat16", variant, 10.0, report.WORK["rotary"](shape), peer, peer_us,
        gpu="NVIDIA H200", torch="2.11.0", date="2026-11-30",
    )  # fmt: skip
    return row.to_dict()


HOST = {"op": "host_time", "variant": "binding alone", "us": 0.9232}


def write(path, *lines):
    path.write_text("".join(json.dumps(x) + "\n" for x in lines), encoding="utf-8")
    return path


def cells(text):
    """The tables' rows as lists of cells, rulers left out."""
    rows = [x for x in text.splitlines() if x.startswith("| ")]
    return [[c.strip() for c in x.strip("|").split("|")] for x in rows if "---" not in x]


def test_one_row_per_shape_with_every_peer_and_shared_facts_above():
    text = report.tables(
        [
            line(batch=1, peer="cudnn"),
            line(batch=1, peer="flash_attention_2", peer_us=60.0),
            line(batch=16, us=80.0, peer="cudnn", peer_us=100.0),
        ]
    )
    header, first, second = cells(text)
    expected = ["batch", "us", "rate", "of floor", "cudnn us", "ratio"]
    assert header == [*expected, "flash_attention_2 us", "ratio"]
    assert first == ["1", "40.00", "0.21 TB/s", "5%", "34.00", "0.85", "60.00", "1.50"]
    assert second == ["16", "80.00", "1.68 TB/s", "36%", "100.00", "1.25", "-", "-"]
    assert "All rows: dtype bfloat16, variant dense, q_heads 32, kv_heads 8" in text
    assert "Measured on NVIDIA H200 with torch 2.11.0, 2026-11-30." in text


def test_rows_of_two_days_and_gpus_name_both():
    other = {**line(batch=2), "gpu": "NVIDIA A100", "date": "2026-12-01"}
    text = report.tables([line(), other])
    assert "NVIDIA A100, NVIDIA H200 with torch 2.11.0, 2026-11-30, 2026-12-01." in text


def test_columns_that_the_variant_or_kv_len_tell_are_left_out():
    text = report.tables(
        [
            line("prefill", q_len=512, kv_len=512, causal=True, variant="causal"),
            line("prefill", q_len=4096, kv_len=4096, causal=False, variant="full"),
        ]
    )
    assert cells(text)[0][:3] == ["variant", "kv_len", "us"]
    text = report.tables([line("prefill", q_len=8, kv_len=n, variant="causal") for n in (8, 64)])
    assert "q_len 8" in text


def test_rotary_keeps_inplace_apart():
    text = report.tables([rotary_line(), rotary_line(interleaved=False, inplace=True)])
    assert [row[:2] for row in cells(text)] == [
        ["variant", "inplace"],
        ["interleaved", "no"],
        ["half_split", "yes"],
    ]


def test_paged_rows_are_told_apart_by_their_variant():
    shapes = [{"page_size": 1}, {"q_len": 4}, {"cache": "e4m3"}, {"ragged": True}]
    rows = [{**attention_rows.PAGED_DECODE_DEFAULTS, **shape} for shape in shapes]
    text = report.tables(
        [
            line("paged_decode", variant=attention_rows.variant("paged_decode", row), **row)
            for row in rows
        ]
    )
    header, *body = cells(text)
    assert header[:2] == ["variant", "us"]
    assert [row[0] for row in body] == ["page1", "page16 q_len4", "page16 e4m3", "page16 ragged"]


def test_the_engines_table_has_tokens_per_second():
    text = report.tables(
        [
            line("engine", "transformers", us=2e6, peer_us=4e6, variant="generate", batch=8),
            line("engine", "transformers", us=1e4, peer_us=2e4, variant="decode_step", batch=8),
            line("engine", "astrai_step", us=9e3, peer_us=1e4, variant="kernels", batch=8),
        ]
    )
    header, *body = cells(text)
    assert header[:3] == ["variant", "tokens/s", "us"]
    assert [row[:2] for row in body] == [
        ["generate", "512"],
        ["decode_step", "800"],
        ["kernels", "-"],
    ]
    assert "Goals: engine, the best peer: 1 held, 0 missed." in text


def test_goals_are_counted_above_each_table():
    text = report.tables([line(batch=1), line(batch=2, us=10.0, peer_us=11.0)])
    assert "Goals: decode, the best peer: 0 held, 2 missed." in text
    small = line("rope_append_kv", "flashinfer", us=2.0, peer_us=5.0, tokens=64)
    assert "rope_append_kv, time: 1 held, 0 missed." in report.tables([small])


def test_host_times_have_a_table_of_their_own():
    text = report.tables([line(), HOST])
    assert cells(text)[-2:] == [["call", "us"], ["binding alone", "0.92"]]
    assert report.to_rows([HOST]) == []


def test_an_operator_without_a_count_of_its_work_has_a_table_but_no_chart():
    unknown = {**line(), "op": "novel"}
    assert "### novel" in report.tables([unknown])
    assert report.to_rows([unknown]) == []


def test_rows_have_the_work_that_the_bench_counts():
    (row,) = report.to_rows([line("prefill", kv_len=2048, causal=True, variant="causal")])
    assert row.work.flops == 4 * 32 * 2048 * 2048 * 128 / 2
    assert row.ratio == pytest.approx(34 / 40)


def test_a_rate_that_todays_count_does_not_give_is_refused():
    with pytest.raises(ValueError, match=r"tbps must be 0\.210 .* got 0\.42"):
        report.to_rows([{**line(), "tbps": 0.42}])


def test_the_last_of_equal_measurements_counts(tmp_path):
    first = write(tmp_path / "a.jsonl", line(us=40.0), line(batch=2), HOST)
    second = write(tmp_path / "b.jsonl", line(us=20.0), {**HOST, "us": 0.5})
    lines = report.read_lines([first, second])
    assert [x["us"] for x in lines] == [20.0, 40.0, 0.5]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{", "x.jsonl:2: must be one JSON object"),
        ("[1]", "x.jsonl:2: must be one JSON object, got [1]"),
        ('{"op": "decode"}', "x.jsonl:2: must have shape, dtype"),
        ('{"op": "host_time", "us": 1}', "x.jsonl:2: must have variant"),
    ],
)
def test_a_bad_line_is_named(tmp_path, text, part):
    (tmp_path / "x.jsonl").write_text("\n" + text + "\n")
    with pytest.raises(ValueError) as error:
        report.read_lines([tmp_path / "x.jsonl"])
    assert part in str(error.value)


def test_a_line_without_a_rate_is_refused(tmp_path):
    bare = {name: value for name, value in line().items() if name != "tbps"}
    with pytest.raises(ValueError, match="must have tflops or tbps"):
        report.read_lines([write(tmp_path / "x.jsonl", bare)])


def test_only_the_marked_part_changes_and_twice_is_as_once():
    once = report.replace_tables(PAGE, "new")
    assert once == PAGE.replace("\nold\n", "\n\nnew\n\n")
    assert report.replace_tables(once, "new") == once


@pytest.mark.parametrize(
    "page",
    ["no marks\n", f"{report.BEGIN}\n", f"{report.END}\n{report.BEGIN}\n", PAGE + PAGE],
)
def test_a_page_without_its_marks_is_refused(page):
    with pytest.raises(ValueError, match="--markdown: must hold one line"):
        report.replace_tables(page, "new")


def test_report_writes_the_page_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    told = report.report([write(tmp_path / "a.jsonl", line(), HOST)], page)
    assert told == [
        plot.MISSING_MATPLOTLIB.format("Charts"),
        f"Wrote the tables of 2 rows into {page}.",
    ]
    text = page.read_text()
    assert "| 40.00 |" in text
    assert "old" not in text
    assert "![" not in text
    assert text.startswith("# Results\n\nby hand\n")
    assert text.endswith("\nafter\n")


def test_nothing_is_written_if_a_row_is_at_fault(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    with pytest.raises(ValueError, match="measure it again"):
        report.report([write(tmp_path / "a.jsonl", {**line(), "tbps": 9.0})], page)
    with pytest.raises(ValueError, match="at least one row"):
        report.report([write(tmp_path / "b.jsonl")], page)
    assert page.read_text() == PAGE
    assert sorted(x.name for x in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl", "page.md"]


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="matplotlib is not installed")
def test_charts_of_a_full_table_are_small_and_linked(tmp_path):
    table = attention_rows.TABLES["prefill"]
    rows = [
        line("prefill", peer, 40.0 + i, 20.0 + 2 * i, "causal" if s["causal"] else "full", **s)
        for i, s in enumerate(table)
        for peer in ("cudnn", "flash_attention_2")
    ]
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text(PAGE)
    files = [write(tmp_path / "a.jsonl", *rows), write(tmp_path / "r.jsonl", rotary_line())]
    report.report(files, page, tmp_path / "charts")
    for op in ("prefill", "rotary"):
        chart = tmp_path / "charts" / f"page-{op}.png"
        assert chart.read_bytes().startswith(b"\x89PNG")
        assert chart.stat().st_size < 150_000
        assert f"](../charts/page-{op}.png)" in page.read_text()


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="matplotlib is not installed")
def test_each_peer_keeps_its_colour_in_the_png(tmp_path):
    from PIL import Image

    peers = ("cudnn", "flash_attention_2", "third", "fourth", "fifth")
    lines = [line(peer=peer, peer_us=10.0 * (i + 1)) for i, peer in enumerate(peers)]
    (path,) = report.write_charts(report.to_rows(lines), tmp_path, "page").values()
    with Image.open(path) as image:
        colors = {color for _, color in image.convert("RGB").getcolors(1 << 24)}
    for code in plot._COLORS:
        wanted = [int(code[i : i + 2], 16) for i in (1, 3, 5)]
        assert min(max(abs(a - b) for a, b in zip(wanted, c, strict=True)) for c in colors) < 8


def test_short_labels_drop_what_all_rows_share():
    rows = report.to_rows([line(batch=1), line(batch=2)])
    assert plot.short_labels(rows) == ["batch=1", "batch=2"]
    assert plot.short_labels(rows[:1]) == [rows[0].label()]


def test_command_line_reads_paths_from_where_it_was_typed(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    (tmp_path / "page.md").write_text(PAGE)
    write(tmp_path / "a.jsonl", line())
    flags.FLAGS(["test", "--markdown=page.md"])
    try:
        assert report.main(["report", "a.jsonl"]) == 0
        assert "| 40.00 |" in (tmp_path / "page.md").read_text()
        assert report.main(["report", "missing.jsonl"]) == 1
        assert "missing.jsonl" in capsys.readouterr().err
        assert report.main(["report"]) == 2
    finally:
        flags.FLAGS.unparse_flags()
        flags.FLAGS["markdown"].unparse()
