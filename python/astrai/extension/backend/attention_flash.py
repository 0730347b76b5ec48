"""Attention by the optional package flash-attn."""

from __future__ import annotations

import torch

from astrai.extension.backend import kv
from astrai.extension.backend.attention_base import (
    AttentionBackend,
    AttentionBackendFactory,
    AttentionResult,
)
from astrai.extension.backend.kv import PackedKVCache
from astrai.extension.backend.masks import UNLIMITED
from astrai.extension.dispatch import Spec, axis

try:
    from flash_attn import flash_attn_func

    _import_error = ""
except Exception as error:  # a flash-attn built for another torch fails with more than ImportError
    flash_attn_func = None
    _import_error = f"{type(error).__name__}: {error}"

MAX_HEAD_DIM = 256
MIN_CAPABILITY = 80

_works: dict[int, bool] = {}


@torch.compiler.assume_constant_result
def _works_on(device_index: int) -> bool:
    """Whether flash-attn runs on a device: tried once, with one small call.

    That the package imports does not say so: it may be built for other architectures.
    """
    found = _works.get(device_index)
    if found is None:
        try:
            x = torch.zeros(
                1, 1, 1, 64, dtype=torch.bfloat16, device=torch.device("cuda", device_index)
            )
            with torch.no_grad():
                flash_attn_func(x, x, x)
            found = True
        except Exception:  # whatever it is, this device is not for flash-attn
            found = False
        _works[device_index] = found
    return found


def _flash_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool,
    scale: float | None,
    return_lse: bool,
) -> AttentionResult:
    """``flash_attn_func`` on 4-D operands, with rows without keys as 0 and -inf."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    result = flash_attn_func(
        q, k, v, softmax_scale=scale, causal=is_causal, return_attn_probs=return_lse
    )
    if not return_lse:
        return result
    out, lse = result[0], result[1].transpose(1, 2)
    # flash-attn marks a row without keys by +inf.
    return out, lse.masked_fill(lse == float("inf"), float("-inf")).contiguous()


@AttentionBackendFactory.register("flash")
class FlashAttnBackend(AttentionBackend):
    """flash-attn, for calls without a mask. Takes training calls too: it has a backward pass."""

    priority = 20
    spec = (
        axis("device_cuda").truthy()
        & axis("dtype").in_(torch.bfloat16, torch.float16)
        & axis("head_dim").in_(*range(8, MAX_HEAD_DIM + 1, 8))
        & axis("group").at_least(1)
        & axis("mask").none()
        & axis("window").falsy()
        & axis("softcap").falsy()
        & axis("sinks").falsy()
        & Spec.of(
            lambda axes: axes["v_head_dim"] == axes["head_dim"], "v_head_dim that is head_dim"
        )
        & Spec.of(
            # flash-attn takes the maximum of the scores before it scales them.
            lambda axes: axes["scale"] is None or axes["scale"] > 0,
            "a scale above 0",
        )
        & axis("cache").in_(None, "contiguous")
        & axis("capability").at_least(MIN_CAPABILITY)
        & Spec.of(
            lambda axes: axes["rank"] == (4 if axes["cache"] is None else 3),
            "rank 4 without a KV cache, rank 3 with one",
        )
        & Spec.of(
            lambda axes: axes["call"][0].numel() > 0 and axes["call"][1].numel() > 0,
            "at least one query and one key",
        )
        & Spec.of(
            lambda axes: _works_on(axes["call"][0].device.index), "flash-attn runs on the device"
        )
    )

    @classmethod
    def available(cls) -> bool:
        """Whether flash-attn is installed and imports."""
        return flash_attn_func is not None

    @classmethod
    def why_unavailable(cls) -> str:
        """What importing flash-attn raised."""
        return _import_error

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: PackedKVCache | None,
        layer_id: int,
        attn_mask: torch.Tensor | None,
        is_causal: bool,
        fwd: str | None,
        *,
        scale: float | None = None,
        return_lse: bool = False,
        window: tuple[int, int] = UNLIMITED,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> AttentionResult:
        """See ``attention``.

        Raises:
            ValueError: There is a mask, which flash-attn cannot apply, or a window, softcap or
                sinks, which this backend does not pass on.
        """
        self._check_fwd(fwd)
        if attn_mask is not None:
            raise ValueError("attention: flash-attn cannot apply a custom attention mask")
        if tuple(window) != UNLIMITED or softcap > 0 or sinks is not None:
            raise ValueError("attention: the flash backend takes no window, softcap or sinks")
        if kv_cache is None:
            return _flash_call(q, k, v, is_causal, scale, return_lse)
        runs = kv.segments(kv_cache, q.shape[0], fwd)
        kv.append(kv_cache, layer_id, k, v)
        parts = []
        for run in runs:
            keys, values, _ = kv.keys_and_values(kv_cache, layer_id, run, q.dtype)
            query = q[run.q_start : run.q_end].unflatten(0, (run.count, run.q_len))
            parts.append(_flash_call(query, keys, values, is_causal, scale, return_lse))
        if return_lse:
            out = torch.cat([part.flatten(0, 1) for part, _ in parts])
            return out, torch.cat([lse.flatten(0, 1) for _, lse in parts])
        return torch.cat([part.flatten(0, 1) for part in parts])
