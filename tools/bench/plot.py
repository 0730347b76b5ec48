"""Charts of measured rows: a roofline and the ratio to the peers, as PNG and as one HTML file."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

from tools.bench.results import BANDWIDTH_TBPS, PEAK_TFLOPS, Row

MISSING_MATPLOTLIB = "{} not written: matplotlib is not installed (pip install matplotlib)."

# Distinct in lightness too, so that the charts can be read in grey (Okabe and Ito's palette).
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")

_RATIO_TICKS = (0.125, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 4.0, 8.0, 16.0, 32.0)


@dataclass(frozen=True)
class Point:
    """One measured time in the roofline: operations per byte, and TFLOP/s."""

    intensity: float
    tflops: float
    name: str
    label: str


def roofline_points(rows: Sequence[Row]) -> list[Point]:
    """Returns our points and the peers'; ours once where it stands against several peers."""
    points: dict[tuple[str, str], Point] = {}
    for row in rows:
        intensity = row.work.flops / row.work.num_bytes
        for name, us in (("astrai", row.us), (row.peer, row.peer_us)):
            points[name, row.label()] = Point(
                intensity, row.work.flops / us / 1e6, name, row.label()
            )
    return list(points.values())


def roof_tflops(intensity: float, dtype: str) -> float:
    """Returns the TFLOP/s that memory and tensor cores allow at this intensity."""
    return min(intensity * BANDWIDTH_TBPS, PEAK_TFLOPS[dtype])


def write_charts(rows: Sequence[Row], prefix: str) -> list[str]:
    """Writes PREFIX.html, and PREFIX.png if matplotlib is installed; returns what to tell."""
    if not rows:
        return ["No charts: no row was measured."]
    html_path, png_path = f"{prefix}.html", f"{prefix}.png"
    with open(html_path, "w", encoding="utf-8") as stream:
        stream.write(to_html(rows))
    lines = [f"Wrote {html_path}."]
    try:
        write_png(rows, png_path)
        lines.append(f"Wrote {png_path}.")
    except ImportError:
        lines.append(MISSING_MATPLOTLIB.format(png_path))
    return lines


def _title(rows: Sequence[Row]) -> str:
    row = rows[0]
    return f"{row.gpu}, torch {row.torch}, {row.date}"


def _color_of(names: Sequence[str]) -> dict[str, str]:
    return {name: _COLORS[index % len(_COLORS)] for index, name in enumerate(names)}


def _names(points: Sequence[Point]) -> list[str]:
    return list(dict.fromkeys(point.name for point in points))


def write_png(rows: Sequence[Row], path: str, dpi: int = 120) -> None:
    """Writes both charts as one PNG.

    Args:
      rows: at least one.
      path: of the file.
      dpi: dots per inch.

    Raises:
      ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image  # matplotlib needs it too

    points = roofline_points(rows)
    colors = _color_of(_names(points))
    shapes = short_labels(rows)
    # One line per shape, with one mark per peer.
    lines = {label: place for place, label in enumerate(dict.fromkeys(shapes))}
    figure = Figure(figsize=(14, max(5.0, 0.15 * len(lines) + 1.5)), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    figure.set_dpi(dpi)
    figure.suptitle(_title(rows))
    roofline, ratios = figure.subplots(1, 2)

    for name, color in colors.items():
        mine = [point for point in points if point.name == name]
        roofline.scatter(
            [p.intensity for p in mine], [p.tflops for p in mine], s=14, color=color, label=name
        )
    low, high = _decades([point.intensity for point in points])
    for dtype in dict.fromkeys(row.dtype for row in rows):
        xs = [low * (high / low) ** (i / 100) for i in range(101)]
        roofline.plot(xs, [roof_tflops(x, dtype) for x in xs], lw=1, color="black")
    roofline.set(
        xscale="log", yscale="log", xlabel="operations per byte", ylabel="TFLOP/s", title="Roofline"
    )
    roofline.legend()

    for peer in dict.fromkeys(row.peer for row in rows):
        mine = [(row, label) for row, label in zip(rows, shapes, strict=True) if row.peer == peer]
        ratios.scatter(
            [row.ratio for row, _ in mine],
            [lines[label] for _, label in mine],
            s=16,
            color=colors[peer],
            label=peer,
        )
    ratios.set_yticks(list(lines.values()), list(lines), fontsize=7)
    ratios.axvline(1.0, color="black", lw=1)
    ratios.grid(axis="y", lw=0.3)
    ratios.set_ylim(len(lines) - 0.5, -0.5)
    # Equal distances for "twice" and "half".
    ratios.set_xscale("log", base=2)
    low, high = ratios.get_xlim()
    ratios.set_xticks([tick for tick in _RATIO_TICKS if low < tick < high])
    ratios.minorticks_off()
    ratios.xaxis.set_major_formatter("{x:g}")
    ratios.set(xlabel="peer's time / ours: right of 1, ours is ahead", title="Ratio")
    ratios.legend()
    canvas.draw()
    image = Image.frombuffer("RGBA", canvas.get_width_height(), canvas.buffer_rgba())
    # A palette makes a third of the size. Pillow's own choice of method gives rare colours away.
    image = image.convert("RGB").quantize(64, method=Image.Quantize.FASTOCTREE)
    image.save(path, format="PNG", optimize=True)


def short_labels(rows: Sequence[Row]) -> list[str]:
    """Returns each row's label without the words that all rows have."""
    words = [row.label().split() for row in rows]
    shared = set(words[0]).intersection(*words) if len(set(map(tuple, words))) > 1 else set()
    return [" ".join(word for word in label if word not in shared) for label in words]


def _decades(values: Sequence[float]) -> tuple[float, float]:
    """Returns powers of ten around the values."""
    return (
        10.0 ** math.floor(math.log10(min(values))),
        10.0 ** (math.floor(math.log10(max(values))) + 1),
    )


def to_html(rows: Sequence[Row]) -> str:
    """Returns one HTML page with both charts as SVG and the table; it refers to no other file."""
    title = html.escape(_title(rows))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 14px sans-serif; margin: 2em; color: #222; }}
svg text {{ font: 11px sans-serif; fill: #222; }}
table {{ border-collapse: collapse; }}
td, th {{ padding: 2px 10px; text-align: right; border-bottom: 1px solid #ddd; }}
td:first-child, th:first-child {{ text-align: left; }}
</style>
</head>
<body>
<h1>{title}</h1>
<h2>Roofline</h2>
{_roofline_svg(rows)}
<h2>Ratio: the peer's time / ours; above 1, ours is ahead</h2>
{_ratio_svg(rows)}
<h2>Table</h2>
{_table(rows)}
</body>
</html>
"""


def _roofline_svg(rows: Sequence[Row]) -> str:
    points = roofline_points(rows)
    colors = _color_of(_names(points))
    width, height, margin = 760, 440, 60
    x_low, x_high = _decades([point.intensity for point in points])
    roofs = [roof_tflops(x_high, row.dtype) for row in rows]
    y_low, y_high = _decades([*(point.tflops for point in points), *roofs])

    def at(intensity: float, tflops: float) -> tuple[float, float]:
        x = math.log10(intensity / x_low) / math.log10(x_high / x_low)
        y = math.log10(tflops / y_low) / math.log10(y_high / y_low)
        return margin + x * (width - 2 * margin), height - margin - y * (height - 2 * margin)

    parts = [f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}">']
    for exponent in range(round(math.log10(x_low)), round(math.log10(x_high)) + 1):
        x, bottom = at(10.0**exponent, y_low)
        parts.append(f'<path d="M{x:.1f} {margin}V{bottom:.1f}" stroke="#ddd"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{bottom + 16:.1f}" text-anchor="middle">'
            f"{10.0**exponent:g}</text>"
        )
    for exponent in range(round(math.log10(y_low)), round(math.log10(y_high)) + 1):
        left, y = at(x_low, 10.0**exponent)
        parts.append(f'<path d="M{left:.1f} {y:.1f}H{width - margin}" stroke="#ddd"/>')
        parts.append(
            f'<text x="{left - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{10.0**exponent:g}</text>'
        )
    for dtype in dict.fromkeys(row.dtype for row in rows):
        xs = [x_low * (x_high / x_low) ** (i / 60) for i in range(61)]
        # The part of the roof below the chart is left out.
        places = [at(x, roof_tflops(x, dtype)) for x in xs if roof_tflops(x, dtype) >= y_low]
        if places:
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f'<polyline points="{line}" fill="none" stroke="#222"/>')
    for point in points:
        x, y = at(point.intensity, point.tflops)
        tip = html.escape(f"{point.name}: {point.tflops:.2f} TFLOP/s; {point.label}")
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colors[point.name]}">'
            f"<title>{tip}</title></circle>"
        )
    for index, (name, color) in enumerate(colors.items()):
        y = margin + 16 * index
        parts.append(f'<circle cx="{margin + 14}" cy="{y}" r="4" fill="{color}"/>')
        parts.append(f'<text x="{margin + 24}" y="{y + 4}">{html.escape(name)}</text>')
    parts.append(
        f'<text x="{width / 2}" y="{height - 14}" text-anchor="middle">operations per byte</text>'
        f'<text x="14" y="{height / 2}" text-anchor="middle" '
        f'transform="rotate(-90 14 {height / 2})">TFLOP/s</text></svg>'
    )
    return "\n".join(parts)


def _ratio_svg(rows: Sequence[Row]) -> str:
    colors = _color_of(_names(roofline_points(rows)))
    label_width, bar_width, step = 520, 420, 18
    scale = bar_width / max(1.25, *(row.ratio for row in rows))
    height = step * len(rows) + 24
    width = label_width + bar_width + 60
    parts = [f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}">']
    for index, row in enumerate(rows):
        y = index * step
        length = row.ratio * scale
        label = html.escape(f"{row.label()} / {row.peer}")
        parts.append(
            f'<text x="{label_width - 8}" y="{y + 13}" text-anchor="end">{label}</text>'
            f'<rect x="{label_width}" y="{y + 3}" width="{length:.1f}" height="{step - 6}" '
            f'fill="{colors[row.peer]}"/>'
            f'<text x="{label_width + length + 5:.1f}" y="{y + 13}">{row.ratio:.2f}</text>'
        )
    one = label_width + scale
    parts.append(f'<path d="M{one:.1f} 0V{height - 20}" stroke="#222"/></svg>')
    return "\n".join(parts)


def _table(rows: Sequence[Row]) -> str:
    parts = [
        "<table><tr><th>shape</th><th>us</th><th>rate</th><th>floor us</th><th>peer</th>"
        "<th>peer us</th><th>ratio</th></tr>"
    ]
    for row in rows:
        unit = "TFLOP/s" if row.work.unit == "tflops" else "TB/s"
        cells = (
            row.label(),
            f"{row.us:.2f}",
            f"{row.work.rate(row.us):.2f} {unit}",
            f"{row.floor:.2f}",
            row.peer,
            f"{row.peer_us:.2f}",
            f"{row.ratio:.3f}",
        )
        parts.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
    return "\n".join([*parts, "</table>"])
