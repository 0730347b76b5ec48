"""Policy: which implementation a call takes, KV cache reads and writes, and the torch fallbacks."""

from astrai.extension.backend.attention import (
    ATTN_BACKEND,
    AttentionBackend,
    AttentionBackendFactory,
    CudaBackend,
    FlashAttnBackend,
    TorchNativeBackend,
    attention,
    attn_backend,
    get_backend,
)
from astrai.extension.backend.reference import attention_reference
from astrai.extension.backend.rotary import Rotary, apply_rotary_emb, get_rotary_emb, rotary_embed

__all__ = [
    "ATTN_BACKEND",
    "AttentionBackend",
    "AttentionBackendFactory",
    "CudaBackend",
    "FlashAttnBackend",
    "Rotary",
    "TorchNativeBackend",
    "apply_rotary_emb",
    "attention",
    "attention_reference",
    "attn_backend",
    "get_backend",
    "get_rotary_emb",
    "rotary_embed",
]
