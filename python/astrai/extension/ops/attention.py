"""Attention on CUDA: one call is one kernel launch, or an error.

For query i and query head h of a sequence, with g = h // (q_heads // kv_heads):

    s[j] = scale * k_scale * q[i, h] . k[j, g]
    s[j] = softcap * tanh(s[j] / softcap)                                    if softcap > 0
    out[i, h] = v_scale * sum_j exp(s[j]) v[j, g] / (sum_j exp(s[j]) + exp(sinks[h]))
    lse[i, h] = log(sum_j exp(s[j]) + exp(sinks[h]))

over the keys j that the causal diagonal, the window and the mask all allow; without sinks their
term is absent. The diagonal is aligned to the bottom right, d = i + kv_len - q_len: causal rows see
``j <= d``, a window (left, right) shows ``d - left <= j <= d + right``. A query that sees no key
has ``out`` 0 and ``lse`` -inf, or with a sink ``lse`` = sink. Products accumulate in fp32. Method:
online softmax (Milakov and Gimelshein, 2018) in tiles (FlashAttention-2, Dao, 2023); decode splits
the keys over thread blocks (Flash-Decoding, Dao et al., 2023).

There is no autograd and no fallback here: ``astrai.extension.attention`` has the policy.
"""

from __future__ import annotations

from enum import IntEnum

from astrai.extension.ops._dense import attn_decode, attn_prefill, attn_varlen
from astrai.extension.ops._paged import attn_paged_decode, attn_paged_prefill, build_q_work_map
from astrai.extension.ops._states import merge_states
from astrai.extension.ops._workspace import (
    attn_decode_workspace_size,
    attn_paged_decode_workspace_size,
    attn_paged_prefill_workspace_size,
    attn_prefill_workspace_size,
)

__all__ = [
    "TensorLayout",
    "attn_decode",
    "attn_decode_workspace_size",
    "attn_paged_decode",
    "attn_paged_decode_workspace_size",
    "attn_paged_prefill",
    "attn_paged_prefill_workspace_size",
    "attn_prefill",
    "attn_prefill_workspace_size",
    "attn_varlen",
    "build_q_work_map",
    "merge_states",
]


class TensorLayout(IntEnum):
    """Order of the dimensions of q, k and v. The functions here take BLHD."""

    BHLD = 0  # [batch, heads, seq, head_dim]
    BLHD = 1  # [batch, seq, heads, head_dim]
