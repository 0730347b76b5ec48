"""Building blocks of the decoder."""

from astrai.model.components.attention import GQA
from astrai.model.components.linear import Linear, StackedLinear
from astrai.model.components.mlp import MLP
from astrai.model.components.norm import RMSNorm
from astrai.model.components.rotary import RotaryTable

__all__ = ["GQA", "MLP", "Linear", "RMSNorm", "RotaryTable", "StackedLinear"]
