"""The fp8 formats by their definition: values of all codes, and rounding by search among them."""

from __future__ import annotations

import math

import torch

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}


def value(code: int, fmt: str) -> float:
    """The number that a code stands for (OCP 8-bit floating point specification)."""
    mantissa_bits, bias = {"e4m3": (3, 7), "e5m2": (2, 15)}[fmt]
    sign = -1.0 if code & 0x80 else 1.0
    exponent = (code & 0x7F) >> mantissa_bits
    mantissa = code & ((1 << mantissa_bits) - 1)
    if fmt == "e4m3" and code & 0x7F == 0x7F:
        return math.nan
    if fmt == "e5m2" and exponent == 31:
        return math.nan if mantissa else sign * math.inf
    fraction = mantissa / (1 << mantissa_bits)
    if exponent == 0:
        return sign * fraction * 2.0 ** (1 - bias)
    return sign * (1 + fraction) * 2.0 ** (exponent - bias)


def nearest(x: torch.Tensor, fmt: str) -> torch.Tensor:
    """Codes (uint8) of float64 numbers: the nearest value, ties to the even code; saturating.

    NaN becomes 0x7f.
    """
    magnitudes = torch.tensor(
        [value(code, fmt) for code in range(128) if math.isfinite(value(code, fmt))],
        dtype=torch.float64,
    )
    size = x.abs().clamp(max=LARGEST[fmt]).nan_to_num(0.0)
    above = torch.searchsorted(magnitudes, size).clamp(max=len(magnitudes) - 1)
    below = (above - 1).clamp(min=0)
    up, down = magnitudes[above] - size, size - magnitudes[below]
    take_below = (down < up) | ((down == up) & (below % 2 == 0))
    codes = torch.where(take_below, below, above)
    codes = torch.where(torch.signbit(x), codes + 128, codes)
    return torch.where(torch.isnan(x), 0x7F, codes).to(torch.uint8)


def assert_same_codes(got: torch.Tensor, want: torch.Tensor) -> None:
    """Every code equal, but for NaN, which may have either sign."""
    a, b = got.view(torch.uint8), want.view(torch.uint8)
    both_nan = torch.isnan(got.float()) & torch.isnan(want.view(got.dtype).float())
    different = (a != b) & ~both_nan
    assert not different.any(), f"{int(different.sum())} of {a.numel()} codes differ"
