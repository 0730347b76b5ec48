"""Merging attention results; see ``ops.attention``."""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

from astrai.extension.ops import reference
from astrai.extension.ops._kernel import Kernel, require_tensor
from astrai.extension.ops._registration import define

_MERGE = Kernel("attn_decode", "merge_states")


def merge_states(
    o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint sets of keys, from the results over each.

    ``o = sum_i exp(lse_i) o_i / sum_i exp(lse_i)`` and lse the logarithm of that sum. A result
    whose lse is -inf has no weight, whatever it holds; two of them give 0 and -inf.

    Args:
        o_a: bf16, fp16 or fp32 CUDA tensor [..., head_dim]. A copy is made of any argument that is
            not contiguous.
        lse_a: fp32, the shape of o_a without its last dimension; natural logarithm.
        o_b: Like o_a.
        lse_b: Like lse_a.

    Returns:
        (o, lse), new, of the shapes and dtypes of o_a and lse_a.

    Raises:
        ValueError, TypeError, RuntimeError: As ``attn_decode``.
    """
    arguments = (o_a, lse_a, o_b, lse_b)
    if is_compiling() or not _MERGE.direct(*arguments):
        return torch.ops.astrai.merge_states(*arguments)
    for name, value in zip(("o_a", "lse_a", "o_b", "lse_b"), arguments, strict=True):
        require_tensor("merge_states", name, value)
    return _run(*arguments)


def _new_state(o_a, lse_a, o_b, lse_b):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (o_a, lse_a))


def _run(*arguments):
    out, lse = _new_state(*arguments)
    _MERGE.launch(*(x.contiguous() for x in arguments), out, lse)
    return out, lse


define(
    "merge_states(Tensor o_a, Tensor lse_a, Tensor o_b, Tensor lse_b) -> (Tensor, Tensor)",
    _run,
    _new_state,
    reference.merge_states,
)
