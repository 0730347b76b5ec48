"""Line charts as PNG, without a plotting library."""

from __future__ import annotations

import itertools
import math
import pathlib
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 960, 400  # of one panel
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 20, 40, 50
_ZOOM = 2  # pixels of a dot of the font

# Distinct in lightness too (Okabe and Ito's palette).
COLORS = (
    (0, 0, 0),
    (0, 114, 178),
    (213, 94, 0),
    (0, 158, 115),
    (204, 121, 167),
    (86, 180, 233),
)
_GRID, _TEXT = (224, 224, 224), (64, 64, 64)

# 3 x 5 dots: a number for each row, from the top.
_FONT = {
    "0": "75557", "1": "26227", "2": "71747", "3": "71717", "4": "55711", "5": "74717",
    "6": "74757", "7": "71111", "8": "75757", "9": "75717", "a": "25755", "b": "65656",
    "c": "34443", "d": "65556", "e": "74647", "f": "74644", "g": "34553", "h": "55755",
    "i": "72227", "j": "11152", "k": "55655", "l": "44447", "m": "57755", "n": "65555",
    "o": "25552", "p": "65644", "q": "25573", "r": "65655", "s": "34216", "t": "72222",
    "u": "55557", "v": "55552", "w": "55775", "x": "55255", "y": "55222", "z": "71247",
    ".": "00002", "-": "00700", "%": "51245", ":": "02020", ",": "00024", "/": "11244",
    "(": "12221", ")": "42224", "+": "02720",
}  # fmt: skip


class Canvas:
    """An RGB image to draw on; white at first."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._pixels = bytearray(b"\xff" * (3 * width * height))

    def dot(self, x: int, y: int, color: Sequence[int], size: int = 1) -> None:
        """Fills a square whose upper left corner is (x, y); what lies outside is cut off."""
        left, right = max(x, 0), min(x + size, self.width)
        if left >= right:
            return
        for row in range(max(y, 0), min(y + size, self.height)):
            at = 3 * (row * self.width + left)
            self._pixels[at : at + 3 * (right - left)] = bytes(color) * (right - left)

    def line(
        self, start: tuple[float, float], end: tuple[float, float], color: Sequence[int], size: int
    ) -> None:
        """Draws a straight line."""
        length = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1.0)
        for i in range(int(length) + 1):
            x, y = (a + (b - a) * i / length for a, b in zip(start, end, strict=True))
            self.dot(round(x), round(y), color, size)

    def text(self, x: int, y: int, text: str, color: Sequence[int] = _TEXT) -> None:
        """Writes in small letters, the upper left corner at (x, y)."""
        for letter in text.lower():
            for row, bits in enumerate(_FONT.get(letter, "00000")):
                for column in range(3):
                    if int(bits) & 4 >> column:
                        self.dot(x + _ZOOM * column, y + _ZOOM * row, color, _ZOOM)
            x += 4 * _ZOOM

    def pixel(self, x: int, y: int) -> tuple[int, ...]:
        """The colour at (x, y)."""
        at = 3 * (y * self.width + x)
        return tuple(self._pixels[at : at + 3])

    def png(self) -> bytes:
        """The image as a PNG file (ISO/IEC 15948)."""
        stride = 3 * self.width
        rows = (self._pixels[i : i + stride] for i in range(0, len(self._pixels), stride))
        data = zlib.compress(b"".join(b"\0" + bytes(row) for row in rows), 9)
        header = struct.pack(">IIBBBBB", self.width, self.height, 8, 2, 0, 0, 0)
        chunks = ((b"IHDR", header), (b"IDAT", data), (b"IEND", b""))
        return b"\x89PNG\r\n\x1a\n" + b"".join(
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
            for kind, body in chunks
        )


def width_of(text: str) -> int:
    """Pixels that a text takes."""
    return 4 * _ZOOM * len(text) - _ZOOM


def ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Round numbers between two bounds."""
    step = 10.0 ** math.floor(math.log10((high - low) / count))
    step = next(step * f for f in (1, 2, 5, 10) if (high - low) / (step * f) <= count)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


@dataclass(frozen=True)
class Panel:
    """One chart.

    Attributes:
        title: Above it, with the unit of the values.
        curves: Values over 1, 2, ... by name; those that are not finite interrupt the line.
        names: Whether the curves' names are written beside their colours.
    """

    title: str
    curves: Mapping[str, Sequence[float]]
    names: bool = True


def draw(panels: Sequence[Panel], x_label: str) -> Canvas:
    """Draws charts below each other.

    Args:
        panels: See there; a name has the same colour in all of them.
        x_label: Below the last one.
    """
    canvas = Canvas(WIDTH, HEIGHT * len(panels))
    names = list(dict.fromkeys(name for panel in panels for name in panel.curves))
    colors = {name: COLORS[i % len(COLORS)] for i, name in enumerate(names)}
    for i, panel in enumerate(panels):
        _draw_panel(canvas, HEIGHT * i, panel, colors)
    canvas.text((WIDTH - width_of(x_label)) // 2, canvas.height - 18, x_label)
    return canvas


def _draw_panel(
    canvas: Canvas, above: int, panel: Panel, colors: Mapping[str, Sequence[int]]
) -> None:
    finite = [y for ys in panel.curves.values() for y in ys if math.isfinite(y)] or [0.0]
    low, high = min(finite), max(finite)
    margin = 0.05 * (high - low) or 0.5
    low, high = low - margin, high + margin
    last = max(2, *(len(ys) for ys in panel.curves.values()))
    top, bottom = above + _TOP, above + HEIGHT - _BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        across, up = (x - 1) / (last - 1), (y - low) / (high - low)
        return _LEFT + across * (WIDTH - _LEFT - _RIGHT), bottom - up * (bottom - top)

    for y in ticks(low, high):
        canvas.line(place(1, y), place(last, y), _GRID, 1)
        label = f"{y:.4g}"
        canvas.text(_LEFT - 10 - width_of(label), round(place(1, y)[1]) - 5, label)
    for x in ticks(1, last):
        canvas.line(place(x, low), place(x, high), _GRID, 1)
        label = f"{x:.4g}"
        canvas.text(round(place(x, low)[0]) - width_of(label) // 2, bottom + 8, label)
    canvas.text(_LEFT, above + 16, panel.title)
    for i, (name, ys) in enumerate(panel.curves.items()):
        points = [place(x, y) if math.isfinite(y) else None for x, y in enumerate(ys, 1)]
        for a, b in itertools.pairwise(points):
            if a is not None and b is not None:
                canvas.line(a, b, colors[name], 2)
        if panel.names:
            row = top + 10 + 16 * i
            canvas.line((WIDTH - 220, row + 4), (WIDTH - 190, row + 4), colors[name], 3)
            canvas.text(WIDTH - 180, row, name)


def write(canvas: Canvas, path: pathlib.Path) -> None:
    """Writes the PNG file."""
    path.write_bytes(canvas.png())
