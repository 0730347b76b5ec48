"""One call, one kernel: the CUDA kernels as functions, without fallback or policy."""

from astrai.extension.ops.attention import TensorLayout, attn_decode, attn_prefill
from astrai.extension.ops.rotary import rotary_emb, rotary_embed

__all__ = ["TensorLayout", "attn_decode", "attn_prefill", "rotary_emb", "rotary_embed"]
