"""One measured row of a benchmark: its bounds and its JSON form. Needs neither GPU nor torch."""

from __future__ import annotations

import datetime
import json
from dataclasses import dataclass, field
from typing import Any

# One H200: the read bandwidth that the best kernel reaches, and the datasheet's tensor-core peaks.
BANDWIDTH_TBPS = 4.65
PEAK_TFLOPS = {"bfloat16": 989.0, "float16": 989.0, "float8_e4m3fn": 1979.0, "float8_e5m2": 1979.0}

FIELDS = (
    "op",
    "shape",
    "dtype",
    "variant",
    "us",
    "tflops",
    "tbps",
    "peer",
    "peer_us",
    "ratio",
    "floor_us",
    "gpu",
    "torch",
    "date",
)


def floor_us(num_bytes: float, flops: float, dtype: str) -> float:
    """Returns the least time of a call in microseconds.

    Args:
      num_bytes: bytes that must be read or written at least once.
      flops: floating-point operations.
      dtype: of the operands, a key of PEAK_TFLOPS.
    """
    return max(num_bytes / BANDWIDTH_TBPS, flops / PEAK_TFLOPS[dtype]) / 1e6


@dataclass(frozen=True)
class Work:
    """What one call must do, whoever does it."""

    num_bytes: float
    flops: float
    unit: str  # "tflops" or "tbps": in which rate the field counts this operator

    def rate(self, us: float) -> float:
        """Returns TFLOP/s or TB/s of a call that takes `us` microseconds."""
        return (self.flops if self.unit == "tflops" else self.num_bytes) / us / 1e6


@dataclass(frozen=True)
class Row:
    """Ours against one peer, measured side by side."""

    op: str
    shape: dict[str, Any]
    dtype: str
    variant: str
    us: float
    work: Work
    peer: str
    peer_us: float
    gpu: str
    torch: str
    date: str = field(
        default_factory=lambda: datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    )

    @property
    def ratio(self) -> float:
        """Returns peer_us / us: above 1, ours is ahead."""
        return self.peer_us / self.us

    @property
    def floor(self) -> float:
        """Returns floor_us of this row."""
        return floor_us(self.work.num_bytes, self.work.flops, self.dtype)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields that --json writes, in their order, with one of tflops and tbps."""
        values = {
            "op": self.op,
            "shape": self.shape,
            "dtype": self.dtype,
            "variant": self.variant,
            "us": round(self.us, 3),
            self.work.unit: round(self.work.rate(self.us), 3),
            "peer": self.peer,
            "peer_us": round(self.peer_us, 3),
            "ratio": round(self.ratio, 4),
            "floor_us": round(self.floor, 3),
            "gpu": self.gpu,
            "torch": self.torch,
            "date": self.date,
        }
        return {name: values[name] for name in FIELDS if name in values}

    def to_json(self) -> str:
        """Returns one line of JSON."""
        return json.dumps(self.to_dict())

    def label(self) -> str:
        """Returns a short name of the shape for charts and tables."""
        shape = " ".join(f"{key}={value}" for key, value in self.shape.items())
        return f"{self.op} {self.variant} {shape}".replace("  ", " ")


def parse_shape(text: str, defaults: dict[str, Any]) -> dict[str, Any]:
    """Reads one shape of --shapes, such as "batch=4,kv_len=8192"; keys left out take the default.

    A value is read as the type of its default (bool: true or false).

    Raises:
      ValueError: on a key that is not in `defaults` or a value of another type.
    """
    shape = dict(defaults)
    for item in text.split(","):
        key, separator, value = (part.strip() for part in item.partition("="))
        if not separator or key not in defaults:
            raise ValueError(
                f"--shapes: {item.strip()!r} must be key=value with a key of "
                f"{', '.join(defaults)}, got {text!r}"
            )
        kind = type(defaults[key])
        try:
            if kind is bool:
                shape[key] = {"true": True, "1": True, "false": False, "0": False}[value.lower()]
            else:
                shape[key] = kind(value)
        except (KeyError, ValueError):
            raise ValueError(
                f"--shapes: {key} must be of type {kind.__name__}, got {value!r}"
            ) from None
    return shape
