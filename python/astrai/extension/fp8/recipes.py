"""Formats of forward and backward, and the rules by which tensors get their scales.

A scale is spoken of as the dequantisation *step*, ``max|x| / largest code``: codes times step give
the tensor back. Larger margins mean larger steps, so more headroom and fewer bits in use.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from astrai.extension.ops._fp8_arguments import FP8_MAX

__all__ = [
    "FP8_MAX",
    "BlockScaling",
    "DelayedScaling",
    "DynamicScaling",
    "FP8Format",
    "FP8Recipe",
    "RowwiseScaling",
]


class FP8Format(str, Enum):
    """Which format tensors take; HYBRID is e4m3 forward and e5m2 for gradients."""

    E4M3 = "e4m3"
    E5M2 = "e5m2"
    HYBRID = "hybrid"

    def fwd(self) -> str:
        """Format of activations and weights."""
        return "e5m2" if self is FP8Format.E5M2 else "e4m3"

    def bwd(self) -> str:
        """Format of gradients."""
        return "e4m3" if self is FP8Format.E4M3 else "e5m2"


@dataclass(frozen=True)
class FP8Recipe:
    """How a tensor gets its step. One of the classes below."""


@dataclass(frozen=True)
class _WithMargin(FP8Recipe):
    """One step for each tensor, which a margin enlarges."""

    # As text, so that compiled code guards on this very number: numbers that differ between calls
    # become variables of its graph.
    _divisor: str = field(init=False, repr=False, compare=False, default="")

    def __post_init__(self) -> None:
        margin = self.margin
        if not isinstance(margin, (int, float)) or not -64 <= margin <= 64:
            raise ValueError(
                f"{type(self).__name__}: margin must be a number in [-64, 64], got {margin!r}"
            )
        object.__setattr__(self, "_divisor", repr(2.0**-margin))

    @property
    def pow2_margin(self) -> float:
        """What a step is divided by."""
        return float(self._divisor)


@dataclass(frozen=True)
class DynamicScaling(_WithMargin):
    """One step for each tensor, from the tensor itself: a pass for the amax, a pass for the cast.

    Attributes:
        margin: The step is multiplied by ``2 ** margin``.
    """

    margin: float = 0.0


@dataclass(frozen=True)
class DelayedScaling(_WithMargin):
    """One step for each tensor, from the amaxes of earlier training steps: one pass.

    Micikevicius et al., "FP8 Formats for Deep Learning", 2022; section 3.1 and NVIDIA's
    TransformerEngine. Each weight has a ring of amaxes for its input, itself and the gradient of
    its output. The first use of a ring takes the step from the tensor at hand.

    Attributes:
        history_len: Amaxes that a ring remembers.
        margin: The step is multiplied by ``2 ** margin``.
        amax: "max" of the ring, or the "most_recent".
    """

    history_len: int = 16
    margin: float = 0.0
    amax: str = "max"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.history_len, int) or self.history_len < 1:
            raise ValueError(
                "DelayedScaling: history_len must be an integer of at least 1, got "
                f"{self.history_len!r}"
            )
        if self.amax not in ("max", "most_recent"):
            raise ValueError(
                f"DelayedScaling: amax must be 'max' or 'most_recent', got {self.amax!r}"
            )


@dataclass(frozen=True)
class RowwiseScaling(FP8Recipe):
    """One step for each row of an operand along the summed dimension, from the tensor itself."""


@dataclass(frozen=True)
class BlockScaling(FP8Recipe):
    """A step for 128 elements of activations and gradients, and for 128 x 128 of weights.

    DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.3.
    """
