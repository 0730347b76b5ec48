"""Charts: the HTML file stands alone and is well formed, and a missing matplotlib is said."""

import importlib.util
import re
import sys
from html.parser import HTMLParser

import pytest

from tools.bench import plot, results

VOID = {"meta"}


def rows():
    shapes = [
        ("decode", "tbps", 1.3e8, 2e9, 40.0, 34.0),
        ("prefill <causal>", "tflops", 3e7, 3e10, 60.0, 75.0),
    ]
    return [
        results.Row(
            op=op,
            shape={"kv_len": 2048},
            dtype="bfloat16",
            variant="v",
            us=us,
            work=results.Work(num_bytes=moved, flops=flops, unit=unit),
            peer=peer,
            peer_us=peer_us,
            gpu="NVIDIA H200",
            torch="2.11.0",
        )
        for op, unit, moved, flops, us, peer_us in shapes
        for peer in ("cudnn", "flash_attention_2")
    ]


class Checker(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.counts = [], {}

    def handle_starttag(self, tag, attrs):
        self.counts[tag] = self.counts.get(tag, 0) + 1
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.counts[tag] = self.counts.get(tag, 0) + 1

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_html_is_well_formed_and_stands_alone():
    page = plot.to_html(rows())
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert checker.counts["svg"] == 2
    assert checker.counts["rect"] == 4  # one bar per row
    assert not re.search(r"https?://|src=|href=|@import|url\(", page)
    assert "prefill &lt;causal&gt;" in page


def test_no_point_lies_outside_of_the_chart():
    page = plot.to_html(rows())
    for x, y in re.findall(r'<circle cx="([-\d.]+)" cy="([-\d.]+)"', page):
        assert 60 <= float(x) <= 700
        assert 60 <= float(y) <= 380


def test_ours_is_one_point_however_many_peers():
    names = [point.name for point in plot.roofline_points(rows())]
    assert sorted(names) == ["astrai", "astrai", "cudnn", "cudnn"] + ["flash_attention_2"] * 2


def test_roof_bends_where_bandwidth_meets_the_peak():
    assert plot.roof_tflops(1.0, "bfloat16") == pytest.approx(4.65)
    assert plot.roof_tflops(1e6, "bfloat16") == 989.0
    knee = 989.0 / 4.65
    assert plot.roof_tflops(knee, "bfloat16") == pytest.approx(989.0)


def test_missing_matplotlib_is_said_and_html_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    prefix = str(tmp_path / "chart")
    lines = plot.write_charts(rows(), prefix)
    assert lines[0] == f"Wrote {prefix}.html."
    assert "matplotlib is not installed" in lines[1]
    assert (tmp_path / "chart.html").stat().st_size > 1000
    assert not (tmp_path / "chart.png").exists()


@pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed"
)
def test_png_is_written(tmp_path):
    plot.write_charts(rows(), str(tmp_path / "chart"))
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_no_rows_give_no_charts(tmp_path):
    assert plot.write_charts([], str(tmp_path / "chart")) == ["No charts: no row was measured."]
    assert list(tmp_path.iterdir()) == []
