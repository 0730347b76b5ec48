"""What a layer launches on a GPU, counted on the CPU: each operator that is no view is a launch."""

from __future__ import annotations

import collections

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from astrai.extension import CudaBackend
from astrai.inference import InferenceWorkspace, PagePool
from astrai.model.components import attention as attention_component
from astrai.model.components import norm as norm_component
from tests.python.model import smollm2, tiny

VIEWS = {"t", "view", "_unsafe_view", "split", "split_with_sizes", "slice", "select", "detach"}
VIEWS |= {"unflatten", "transpose", "expand", "unsqueeze"}


class Launches(TorchDispatchMode):
    """Counts operators by name, but for views."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name not in VIEWS:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@torch.library.custom_op("astrai_launches_test::rms_norm", mutates_args=())
def rms_norm(x: torch.Tensor, shape: list[int], weight: torch.Tensor, eps: float) -> torch.Tensor:
    """One operator, as torch's is on CUDA since 2.9; on a CPU it is made of others."""
    return torch.nn.functional.rms_norm(x, shape, weight, eps)


@pytest.fixture
def decoder(monkeypatch):
    """Takes the operators that CUDA tensors take; this project's have CPU implementations."""
    decoder = tiny.decoder().to(torch.bfloat16)
    with torch.no_grad():
        decoder(torch.tensor([[1]]))  # makes the rotary table

    dense = attention_component.attention

    def attention(q, k, v, kv_cache, layer_id, is_causal, fwd, rotary):
        if kv_cache is None:
            return dense(q, k, v, is_causal=is_causal, rotary=rotary)
        backend = CudaBackend()
        return backend.forward(q, k, v, kv_cache, layer_id, None, is_causal, fwd, rotary=rotary)

    monkeypatch.setattr(attention_component, "attention", attention)
    monkeypatch.setattr(norm_component, "rms_norm", rms_norm)
    return decoder


@torch.no_grad()
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "e4m3"])
def test_a_layer_launches_nothing_twice(decoder, page_size, dtype):
    config = tiny.CONFIG
    pool = PagePool(2, config.num_kv_heads, config.head_dim, 2, 48, "cpu", dtype, page_size, 96)
    workspace = InferenceWorkspace(2, 48, 4, 32, "cpu", torch.bfloat16, page_size=page_size)
    rows = [pool.alloc_row() for _ in range(2)]
    texts = [
        torch.randint(0, 96, (n,), generator=torch.Generator().manual_seed(n)) for n in (8, 21)
    ]
    whole = [decoder(text[None])[0] for text in texts]
    counts, errors = {}, []
    for fwd, lens, start in (("prefill", [7, 20], 0), ("decode", [8, 21], None)):
        parts = [slice(n - 1 if start is None else start, n) for n in lens]
        cache = pool.bind_tasks(rows, lens, workspace, start_pos=start)
        tokens = torch.cat([text[part] for text, part in zip(texts, parts, strict=True)])
        with Launches() as launches:
            logits = decoder(tokens, cache.positions, cache, fwd)
        counts[fwd] = launches.counts
        expected = torch.cat([out[part] for out, part in zip(whole, parts, strict=True)])
        errors.append(smollm2.relative_error(logits, expected))
    print(f"relative errors of prefill and decode: {errors}")
    assert max(errors) < (0.02 if dtype is torch.bfloat16 else 0.15)
    layer = {
        "rms_norm": 2,
        "mm": 2,  # q, k and v; gate and up
        "rope_append_kv": 1,
        "addmm_": 2,  # the output projections add to the residual
        "silu_": 1,
        "mul_": 1,
    }
    for fwd in ("prefill", "decode"):
        expected = collections.Counter({name: 2 * count for name, count in layer.items()})
        expected[f"attn_paged_{fwd}"] = 2
        expected.update(["embedding", "rms_norm", "mm"])  # around the layers
        assert counts[fwd] == expected, fwd
