"""The operators written out in torch: their definition, and their implementation on the CPU.

Any device; float64 inputs are computed in float64, all others in float32. Arguments are taken to be
good.
"""

from astrai.extension.ops.reference.dense import (
    Features,
    Lengths,
    Step,
    attention,
    cleared,
    expand_mask,
    merge_states,
    permitted,
    storable,
)
from astrai.extension.ops.reference.packed import (
    PaddedKeys,
    Requests,
    packed_attention,
    q_work_map,
    varlen_attention,
)
from astrai.extension.ops.reference.paged import PagedCache, paged_attention, quantised, store
from astrai.extension.ops.reference.rotary import rope_append, rotate, rotate_by_table

__all__ = [
    "Features",
    "Lengths",
    "PaddedKeys",
    "PagedCache",
    "Requests",
    "Step",
    "attention",
    "cleared",
    "expand_mask",
    "merge_states",
    "packed_attention",
    "paged_attention",
    "permitted",
    "q_work_map",
    "quantised",
    "rope_append",
    "rotate",
    "rotate_by_table",
    "storable",
    "store",
    "varlen_attention",
]
