"""The training demo: the text, the schedule, the chart, and a run of few steps on the CPU."""

import struct
import zlib

import pytest
import torch
from absl import flags
from absl.testing import flagsaver

from astrai.extension import DelayedScaling, DynamicScaling
from astrai.extension.fp8 import fp8_linear_enable
from tools.train import chart, train_demo
from tools.train.corpus import Corpus, source_files
from tools.train.training import Curve, Setup, rate, train

if not flags.FLAGS.is_parsed():
    flags.FLAGS(["train_demo"])

SETUP = Setup(
    hidden=32,
    layers=1,
    heads=2,
    batch=2,
    length=32,
    steps=3,
    learning_rate=1e-3,
    seed=0,
    device=torch.device("cpu"),
)


@pytest.fixture(autouse=True)
def without_override():
    yield
    fp8_linear_enable(False)


def decoded(png):
    """(width, height, rows of RGB bytes) of a PNG file without filters."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    at, chunks = 8, {}
    while at < len(png):
        (size,) = struct.unpack(">I", png[at : at + 4])
        kind, body = png[at + 4 : at + 8], png[at + 8 : at + 8 + size]
        (crc,) = struct.unpack(">I", png[at + 8 + size : at + 12 + size])
        assert crc == zlib.crc32(kind + body)
        chunks[kind] = body
        at += 12 + size
    width, height, depth, color, *_ = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert (depth, color) == (8, 2)
    data = zlib.decompress(chunks[b"IDAT"])
    stride = 3 * width + 1
    assert len(data) == height * stride
    rows = [data[i * stride : (i + 1) * stride] for i in range(height)]
    assert all(row[0] == 0 for row in rows)
    return width, height, [row[1:] for row in rows]


def test_text_is_the_librarys_own_and_always_the_same():
    files = source_files()
    assert len(files) > 100
    assert files == source_files()
    assert not any("site-packages" in path.parts for path in files)
    corpus = Corpus(100_000)
    assert corpus.train.numel() == 95_000 and corpus.validation.numel() == 5_000
    text = bytes(corpus.train.tolist()).decode("utf-8", errors="replace")
    assert "import " in text and "def " in text
    batches = [
        corpus.batch(corpus.train, 3, 16, torch.Generator().manual_seed(7)) for _ in range(2)
    ]
    assert torch.equal(*batches) and batches[0].shape == (3, 17)


def test_learning_rate():
    rates = [rate(step, 100) for step in range(100)]
    assert rates[0] == 0.1 and max(rates) == rates[10] == 1.0
    assert rates[:10] == sorted(rates[:10]) and rates[10:] == sorted(rates[10:], reverse=True)
    assert 0.1 <= rates[-1] < 0.11
    assert rate(0, 1) == 1.0


def test_runs_differ_in_their_recipe_alone():
    corpus, seen = Corpus(50_000), []
    curves = [
        train(name, recipe, SETUP, corpus, lambda *args: seen.append(args))
        for name, recipe in (("bf16", None), ("a", DynamicScaling()), ("b", DynamicScaling()))
    ]
    bf16, first, second = (curve.losses for curve in curves)
    assert first == second != bf16
    assert bf16 == pytest.approx(first, rel=0.01)
    assert all(len(losses) == 3 for losses in (bf16, first))
    assert [args[0] for args in seen] == [1, 2, 3] * 3
    assert curves[0].validation == pytest.approx(curves[1].validation, rel=0.01)
    assert curves[0].final() == bf16[-1]


def test_table():
    curves = [Curve("bf16", [3.0, 2.0], 2.5, 1.0), Curve("delayed", [3.0, 2.02], 2.6, 2.0)]
    lines = train_demo.table(curves)
    assert lines[1].split() == ["bf16", "2.0000", "+0.00%", "2.5000", "1.0"]
    assert lines[2].split() == ["delayed", "2.0200", "+1.00%", "2.6000", "2.0"]


def test_smoothing():
    assert train_demo.smooth([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]


def test_chart_is_a_png_with_the_curves_in_it(tmp_path):
    panels = [
        chart.Panel("up", {"a": [0.0, 1.0, 2.0], "b": [2.0, float("nan"), 0.0]}),
        chart.Panel("flat", {"a": [1.0, 1.0]}, names=False),
    ]
    canvas = chart.draw(panels, "step")
    chart.write(canvas, tmp_path / "a.png")
    width, height, rows = decoded((tmp_path / "a.png").read_bytes())
    assert (width, height) == (chart.WIDTH, 2 * chart.HEIGHT)
    where = {}
    for y, row in enumerate(rows):
        for color in chart.COLORS[:2]:
            at = row.find(bytes(color))
            while at >= 0 and at % 3:
                at = row.find(bytes(color), at + 1)
            if at >= 0:
                where.setdefault(color, []).append((at // 3, y))
    first_half = [(x, y) for x, y in where[chart.COLORS[0]] if y < chart.HEIGHT]
    # The line rises: its lowest row is the leftmost.
    assert min(first_half)[1] > chart.HEIGHT / 2
    assert any(y > chart.HEIGHT for _, y in where[chart.COLORS[0]])
    # "b" has no two neighbours that are finite: its name's colour is all there is of it.
    assert min(x for x, _ in where[chart.COLORS[1]]) > chart.WIDTH - 230


def test_ticks():
    assert chart.ticks(0.0, 10.0) == [0, 2, 4, 6, 8, 10]
    assert chart.ticks(1, 500) == [100, 200, 300, 400, 500]
    assert chart.ticks(2.81, 2.86) == pytest.approx([2.81, 2.82, 2.83, 2.84, 2.85, 2.86])


def test_demo_runs_on_the_cpu(tmp_path, capsys):
    out = tmp_path / "loss.png"
    options = {"device": "cpu", "steps": 2, "batch": 1, "length": 16, "out": str(out)}
    with flagsaver.flagsaver(recipes=["delayed", "block"], **options):
        assert train_demo.main(["train_demo"]) == 0
    printed = capsys.readouterr().out
    assert "No GPU" in printed and "2/2" in printed
    for name in ("bf16", "delayed", "block"):
        assert f"  {name:8}  " in printed
    assert decoded(out.read_bytes())[0] == chart.WIDTH
    assert f"Loss curves: {out}" in printed


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"recipes": ["slow"]}, "--recipes must be of dynamic.*got slow"),
        ({"device": "tpu0"}, "--device must be"),
        ({"device": "cuda:99"}, "--device=cuda:99 is not there"),
    ],
)
def test_bad_flags(options, text, capsys):
    import re

    with flagsaver.flagsaver(**options):
        assert train_demo.main(["train_demo"]) == 1
    assert re.search(text, capsys.readouterr().err)


def test_recipes_of_the_demo_are_all_there_are():
    from astrai.extension import fp8

    names = {type(recipe).__name__ for recipe in train_demo.RECIPES.values()}
    assert names == {name for name in fp8.__all__ if name.endswith("Scaling")}
    assert DelayedScaling() in train_demo.RECIPES.values()
