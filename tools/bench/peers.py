"""The peers of attention: torch's SDPA, and FlashInfer and FlashAttention-4 where installed.

The latter are taken from the folder ASTRAI_PEERS (of `pip install --target`), or from what Python
finds anyway. Their functions raise ImportError where the package is not there. Started as a
program, this lets FlashInfer compile itself, which takes it about a minute for each kernel:

    python -m tools.bench.peers
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

VARIABLE = "ASTRAI_PEERS"
_WORKSPACE_BYTES = 512 << 20

_state: dict[str, Any] = {}


def find() -> None:
    """Puts the folder of ASTRAI_PEERS behind all others that modules are searched in."""
    folder = os.environ.get(VARIABLE)
    if folder and folder not in sys.path:
        # A .pth file does not act in such a folder.
        sys.path += [folder, str(pathlib.Path(folder, "nvidia_cutlass_dsl", "dsl_packages"))]


def missing() -> list[str]:
    """Returns a sentence for each peer that cannot be imported."""
    found = []
    for name, load in (("FlashInfer", flashinfer), ("FlashAttention-4", flash_attention_4)):
        try:
            load()
        except Exception as error:  # a peer may be there but broken
            found.append(f"{name} is not measured: {_first_line(error)}")
    return found


def installed(load: Callable[[], Any]) -> Any:
    """Returns what `load` (flashinfer or flash_attention_4) gives, or None where it raises."""
    try:
        return load()
    except Exception:  # `missing` says why
        return None


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else repr(error)


def flashinfer() -> Any:
    """Returns the module flashinfer."""
    import torch

    find()
    # Or it would compile for every GPU that it knows.
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
        os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    import flashinfer

    return flashinfer


def flash_attention_4() -> Callable[..., Any]:
    """Returns flash_attn_func of FlashAttention-4: [B, L, H, D] in and out."""
    find()
    from flash_attn.cute import flash_attn_func

    def call(*args: Any, **kwargs: Any) -> Any:
        result = flash_attn_func(*args, **kwargs)
        return result[0] if isinstance(result, tuple) else result

    return call


def sdpa(backend: Any, q: Any, k: Any, v: Any, **kwargs: Any) -> Callable[[], Any]:
    """Returns a call of torch's attention on one backend alone."""
    from torch.nn.attention import sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def call():
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, **kwargs)

    return call


def _workspace() -> Any:
    """The memory that all of FlashInfer's plans share: one is used at a time."""
    import torch

    if "workspace" not in _state:
        _state["workspace"] = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    return _state["workspace"]


def flashinfer_pages(block_table: Any, lengths: Sequence[int], page_size: int) -> tuple:
    """Returns FlashInfer's form of a block table: (indptr, indices, last page's length)."""
    import torch

    counts = [-(-length // page_size) for length in lengths]
    rows = [block_table[row, :count] for row, count in enumerate(counts)]
    indptr = torch.tensor([0, *counts]).cumsum(0)
    last = torch.tensor([(length - 1) % page_size + 1 for length in lengths])
    return tuple(x.to(block_table.device, torch.int32) for x in (indptr, torch.cat(rows), last))


def flashinfer_decode(
    block_table: Any, lengths: Sequence[int], page_size: int, q: Any, kv_heads: int
) -> Callable[..., Any]:
    """Plans a decode; returns run(q, (k_cache, v_cache)) for q [B, H, D] and 4-D caches."""
    wrapper = flashinfer().BatchDecodeWithPagedKVCacheWrapper(
        _workspace(), "NHD", use_tensor_cores=True
    )
    pages = flashinfer_pages(block_table, lengths, page_size)
    heads = (q.shape[-2], kv_heads, q.shape[-1])
    wrapper.plan(*pages, *heads, page_size, q_data_type=q.dtype, kv_data_type=q.dtype)
    return wrapper.run


def flashinfer_prefill(
    block_table: Any,
    lengths: Sequence[int],
    page_size: int,
    q: Any,
    kv_heads: int,
    qo_indptr: Any,
    causal: bool,
    backend: str,
) -> Callable[..., Any]:
    """Plans a prefill; returns run(q, (k_cache, v_cache)) for packed q [T, H, D].

    The backend is "fa3" (Hopper's) or "fa2", which splits the keys of few queries.
    """
    wrapper = flashinfer().BatchPrefillWithPagedKVCacheWrapper(_workspace(), "NHD", backend=backend)
    pages = flashinfer_pages(block_table, lengths, page_size)
    heads = (q.shape[-2], kv_heads, q.shape[-1])
    wrapper.plan(qo_indptr, *pages, *heads, page_size, causal=causal, q_data_type=q.dtype)
    return wrapper.run


def flashinfer_rope_append(
    positions: Any, cos_sin_cache: Any, interleaved: bool, head_dim: int, pages: tuple, batch: Any
) -> Callable[..., Any]:
    """Returns run(q, k, v, (k_cache, v_cache)): rotates q and k in place, then appends k and v.

    `pages` is as flashinfer_pages gives it, `batch` the request of each token.
    """
    module = flashinfer()
    indptr, indices, last = pages

    def run(q: Any, k: Any, v: Any, caches: tuple) -> Any:
        module.rope.apply_rope_with_cos_sin_cache_inplace(
            positions, q.flatten(1), k.flatten(1), head_dim, cos_sin_cache, not interleaved
        )
        module.page.append_paged_kv_cache(k, v, batch, positions, caches, indices, indptr, last)
        return q

    return run


# ---- Compilation --------------------------------------------------------------------------------


def _compile_decode(head_dim: int) -> None:
    import torch

    q, caches, table = _example(head_dim)
    flashinfer_decode(table, [32], 16, q, 8)(q, caches)
    torch.cuda.synchronize()


def _compile_prefill(backend: str) -> None:
    import torch

    q, caches, table = _example(128)
    qo_indptr = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
    flashinfer_prefill(table, [32], 16, q, 8, qo_indptr, True, backend)(q, caches)
    torch.cuda.synchronize()


def _compile_rope() -> None:
    import torch

    q, caches, table = _example(128)
    one = torch.zeros(1, dtype=torch.int32, device="cuda")
    angles = torch.rand(32, 128, device="cuda")
    pages = flashinfer_pages(table, [32], 16)
    k = torch.randn(1, 8, 128, device="cuda", dtype=q.dtype)
    flashinfer_rope_append(one, angles, False, 128, pages, one)(q, k, k.clone(), caches)
    torch.cuda.synchronize()


def _example(head_dim: int) -> tuple:
    import torch

    def random(*shape: int) -> Any:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    table = torch.arange(2, device="cuda", dtype=torch.int32)[None]
    caches = (random(2, 16, 8, head_dim), random(2, 16, 8, head_dim))
    return random(1, 32, head_dim), caches, table


_COMPILATIONS: dict[str, Callable[[], None]] = {
    "decode-128": lambda: _compile_decode(128),
    "decode-256": lambda: _compile_decode(256),
    "prefill-fa3": lambda: _compile_prefill("fa3"),
    "rope": _compile_rope,
}


def main(argv: Sequence[str]) -> int:
    """Compiles what is named, or all of it: each in a process of its own, side by side."""
    if argv:
        for name in argv:
            start = time.monotonic()
            _COMPILATIONS[name]()
            print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
        return 0
    processes = [
        subprocess.Popen([sys.executable, "-m", "tools.bench.peers", name])
        for name in _COMPILATIONS
    ]
    return max(abs(process.wait()) for process in processes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
