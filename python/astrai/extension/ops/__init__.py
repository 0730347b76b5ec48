"""One call, one kernel: the CUDA kernels as functions, without fallback or policy."""

from astrai.extension.ops.attention import (
    TensorLayout,
    attn_decode,
    attn_decode_workspace_size,
    attn_paged_decode,
    attn_paged_decode_workspace_size,
    attn_paged_prefill,
    attn_paged_prefill_workspace_size,
    attn_prefill,
    attn_prefill_workspace_size,
    attn_varlen,
    build_q_work_map,
    merge_states,
)
from astrai.extension.ops.rotary import rope_append_kv, rotary_emb, rotary_embed

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
    "rope_append_kv",
    "rotary_emb",
    "rotary_embed",
]
