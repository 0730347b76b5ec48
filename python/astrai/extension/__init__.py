"""CUDA kernels for language models, and the policy that chooses between them and their fallbacks.

``attention``, ``apply_rotary_emb`` and ``rotary_embed`` run anywhere and choose an implementation
for each call; ``attn_decode``, ``attn_prefill`` and the rest of ``astrai.extension.ops`` run one
CUDA kernel or raise. ``explain(family, ...)`` says which implementation a call would take and why;
see ``astrai.extension.dispatch``.
"""

from astrai.extension.backend import (
    ATTN_BACKEND,
    AttentionBackend,
    AttentionBackendFactory,
    CudaBackend,
    FlashAttnBackend,
    Rotary,
    TorchNativeBackend,
    apply_rotary_emb,
    attention,
    attn_backend,
    get_backend,
    get_rotary_emb,
    rotary_embed,
)
from astrai.extension.dispatch import (
    ExplicitSelectionError,
    ImplRecord,
    Resolution,
    Spec,
    axis,
    explain,
    explain_plan,
    op_backend,
    register_env_alias,
    register_family,
    resolve,
    resolve_plan,
    tensor_axes,
)
from astrai.extension.errors import DtypeError, ShapeError
from astrai.extension.loader import KERNEL_NAMES, is_available
from astrai.extension.ops.attention import (
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
from astrai.extension.ops.rotary import rope_append_kv

__all__ = [
    "ATTN_BACKEND",
    "KERNEL_NAMES",
    "AttentionBackend",
    "AttentionBackendFactory",
    "CudaBackend",
    "DtypeError",
    "ExplicitSelectionError",
    "FlashAttnBackend",
    "ImplRecord",
    "Resolution",
    "Rotary",
    "ShapeError",
    "Spec",
    "TorchNativeBackend",
    "apply_rotary_emb",
    "attention",
    "attn_backend",
    "attn_decode",
    "attn_decode_workspace_size",
    "attn_paged_decode",
    "attn_paged_decode_workspace_size",
    "attn_paged_prefill",
    "attn_paged_prefill_workspace_size",
    "attn_prefill",
    "attn_prefill_workspace_size",
    "attn_varlen",
    "axis",
    "build_q_work_map",
    "explain",
    "explain_plan",
    "get_backend",
    "get_rotary_emb",
    "is_available",
    "merge_states",
    "op_backend",
    "register_env_alias",
    "register_family",
    "resolve",
    "resolve_plan",
    "rope_append_kv",
    "rotary_embed",
    "tensor_axes",
]
