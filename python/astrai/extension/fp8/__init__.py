"""Training and inference of linear layers in fp8: regions, recipes and their state.

``fp8_autocast`` is what to start from; ``astrai.extension.ops.fp8`` has the kernels.
"""

from astrai.extension.fp8.autocast import fp8_autocast, fp8_enabled
from astrai.extension.fp8.cache import fp8_weights_changed
from astrai.extension.fp8.linear import fp8_linear_forward
from astrai.extension.fp8.override import fp8_linear_enable, fp8_linear_enabled
from astrai.extension.fp8.recipes import (
    FP8_MAX,
    BlockScaling,
    DelayedScaling,
    DynamicScaling,
    FP8Format,
    FP8Recipe,
    RowwiseScaling,
)
from astrai.extension.fp8.state_dict import (
    FP8State,
    fp8_load_state_dict,
    fp8_state,
    fp8_state_dict,
)
from astrai.extension.fp8.weights import (
    fp8_name_weights,
    fp8_opt_in,
    fp8_opt_out,
    fp8_prepare,
)

__all__ = [
    "FP8_MAX",
    "BlockScaling",
    "DelayedScaling",
    "DynamicScaling",
    "FP8Format",
    "FP8Recipe",
    "FP8State",
    "RowwiseScaling",
    "fp8_autocast",
    "fp8_enabled",
    "fp8_linear_enable",
    "fp8_linear_enabled",
    "fp8_linear_forward",
    "fp8_load_state_dict",
    "fp8_name_weights",
    "fp8_opt_in",
    "fp8_opt_out",
    "fp8_prepare",
    "fp8_state",
    "fp8_state_dict",
    "fp8_weights_changed",
]
