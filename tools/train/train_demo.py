"""Trains a small Llama in bf16 and in fp8 with each recipe, and compares the losses.

    bazel run //tools:train_demo
    bazel run //tools:train_demo -- --recipes=dynamic,delayed --steps=1000 --out=/tmp/loss.png

The text is the running Python's own standard library, byte by byte; weights, batches and schedule
are the same in every run. Without a GPU it trains a tiny model for 20 steps, through the fp8
operators for CPU tensors: enough to see that it runs, not to judge the recipes.
"""

from __future__ import annotations

import os
import pathlib
import sys

import torch
from absl import app, flags

from astrai.extension import BlockScaling, DelayedScaling, DynamicScaling, RowwiseScaling
from tools.train import chart
from tools.train.corpus import Corpus
from tools.train.training import Curve, Setup, train

RECIPES = {
    "dynamic": DynamicScaling(),
    "delayed": DelayedScaling(),
    "rowwise": RowwiseScaling(),
    "block": BlockScaling(),
}
# (hidden, layers, heads, batch, length, steps, peak learning rate, bytes of text)
SIZES = {
    "tiny": (128, 2, 4, 4, 128, 20, 3e-3, 2_000_000),
    "small": (512, 8, 8, 32, 512, 500, 1e-3, 50_000_000),
}
_BAR = 24

_RECIPES = flags.DEFINE_list("recipes", list(RECIPES), f"Of {', '.join(RECIPES)}; bf16 runs too.")
_SIZE = flags.DEFINE_enum(
    "size", "auto", ["auto", *SIZES], "Of the model. auto: small on a GPU, tiny on the CPU."
)
_STEPS = flags.DEFINE_integer("steps", None, "Optimizer steps; default: the size's.", 1)
_BATCH = flags.DEFINE_integer("batch", None, "Sequences a step; default: the size's.", 1)
_LENGTH = flags.DEFINE_integer("length", None, "Bytes of a sequence; default: the size's.", 8)
_RATE = flags.DEFINE_float("learning_rate", None, "Its peak; default: the size's.", 0.0)
_SEED = flags.DEFINE_integer("seed", 0, "Of weights and batches.")
_DEVICE = flags.DEFINE_string("device", "auto", "auto, cpu, cuda or cuda:N.")
_OUT = flags.DEFINE_string("out", "fp8_loss.png", "Where the loss curves go.")


def choose_device(wanted: str) -> torch.device:
    """The device to run on. Raises ValueError for one that is not there."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise ValueError(f"--device must be auto, cpu, cuda or cuda:N, got {wanted}") from None
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= there:
        raise ValueError(f"--device={wanted} is not there: {there} GPU(s)")
    return device


def make_setup(device: torch.device) -> tuple[Setup, int]:
    """What the flags ask for: the setup, and how much text."""
    size = _SIZE.value
    if size == "auto":
        size = "small" if device.type == "cuda" else "tiny"
    hidden, layers, heads, batch, length, steps, rate, size_of_text = SIZES[size]
    setup = Setup(
        hidden=hidden,
        layers=layers,
        heads=heads,
        batch=_BATCH.value or batch,
        length=_LENGTH.value or length,
        steps=_STEPS.value or steps,
        learning_rate=_RATE.value or rate,
        seed=_SEED.value,
        device=device,
    )
    return setup, size_of_text


class ProgressBar:
    """A bar that fills in place on a terminal, and a line for each quarter elsewhere."""

    def __init__(self, name: str, steps: int) -> None:
        self._name, self._steps = name, steps
        self._quarters = 0

    def __call__(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Shows how far it is."""
        full = _BAR * step // self._steps
        bar = "#" * full + "." * (_BAR - full)
        text = (
            f"  {self._name:8} [{bar}] {step}/{self._steps}  loss {loss:.4f}  "
            f"{tokens_per_second:,.0f} tokens/s"
        )
        if sys.stdout.isatty():
            print(f"\r{text}", end="\n" if step == self._steps else "", flush=True)
        elif 4 * step // self._steps > self._quarters:
            self._quarters = 4 * step // self._steps
            print(text, flush=True)


def table(curves: list[Curve]) -> list[str]:
    """Losses, and how far they are from bf16's, which comes first."""
    reference = curves[0].final()
    lines = [f"  {'':8}  final loss  gap to bf16  validation  seconds"]
    for curve in curves:
        gap = 100 * (curve.final() / reference - 1)
        lines.append(
            f"  {curve.name:8}  {curve.final():10.4f}  {gap:+10.2f}%  {curve.validation:10.4f}  "
            f"{curve.seconds:7.1f}"
        )
    return lines


def smooth(values: list[float], width: int) -> list[float]:
    """The mean of each value and of up to ``width - 1`` before it."""
    windows = (values[max(0, i + 1 - width) : i + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def panels(curves: list[Curve]) -> list[chart.Panel]:
    """Charts of the losses, and of how far they are from bf16's."""
    width = max(1, len(curves[0].losses) // 10)
    smoothed = {curve.name: smooth(curve.losses, width) for curve in curves}
    reference = smoothed[curves[0].name]
    gaps = {
        name: [100 * (a / b - 1) for a, b in zip(values, reference, strict=True)]
        for name, values in smoothed.items()
    }
    return [
        chart.Panel("loss (nats per byte)", {curve.name: curve.losses for curve in curves}),
        chart.Panel(f"gap to bf16 (%), mean of {width} steps", gaps, names=False),
    ]


def out_path() -> pathlib.Path:
    """Where the chart goes: relative to where the user typed ``bazel run``."""
    return pathlib.Path(os.environ.get("BUILD_WORKING_DIRECTORY", "."), _OUT.value)


def run() -> None:
    """Trains all runs and writes the chart."""
    unknown = [name for name in _RECIPES.value if name not in RECIPES]
    if unknown:
        raise ValueError(f"--recipes must be of {', '.join(RECIPES)}, got {', '.join(unknown)}")
    device = choose_device(_DEVICE.value)
    setup, size_of_text = make_setup(device)
    corpus = Corpus(size_of_text)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    print(
        f"Llama with {setup.layers} layers of width {setup.hidden}, {setup.batch} x "
        f"{setup.length} bytes a step, {setup.steps} steps, on {where}."
    )
    print(
        f"Text: {corpus.files} files, {len(corpus.train) / 1e6:.1f} MB of Python "
        f"{sys.version_info[0]}.{sys.version_info[1]}'s standard library."
    )
    if device.type == "cpu":
        print("No GPU: fp8 is computed by its definition, slowly.")
    curves = []
    for name in ("bf16", *_RECIPES.value):
        bar = ProgressBar(name, setup.steps)
        curves.append(train(name, RECIPES.get(name), setup, corpus, bar))
    print("\n".join(table(curves)))
    path = out_path()
    chart.write(chart.draw(panels(curves), "step"), path)
    print(f"Loss curves: {path}")


def main(argv: list[str]) -> int:
    """Runs the demo; returns the exit code."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown argument {argv[1]!r}")
    try:
        run()
    except (ValueError, OSError, RuntimeError) as error:
        print(f"train_demo: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    app.run(main)
