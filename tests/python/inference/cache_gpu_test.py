"""Ragged batches with a KV cache on the GPU, against the whole text on the CPU."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from astrai.inference import InferenceWorkspace, PagePool
from tests.python.inference.cache_calls import run
from tests.python.model import tiny


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (3, 1, 128), (2, 2, 256)])
def test_ragged_prefill_and_decode_equal_the_whole_text(heads, kv_heads, head_dim, dtype):
    config = dataclasses.replace(
        tiny.CONFIG, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim
    )
    exact = tiny.decoder(config).to(dtype).float()  # the weights that the GPU's model has
    model = copy.deepcopy(exact).to("cuda", dtype)
    pool = PagePool(config.num_layers, kv_heads, head_dim, 3, 40, "cuda", dtype)
    pool.k_buffer.fill_(float("nan"))  # what was never written must never be read
    pool.v_buffer.fill_(float("nan"))
    workspace = InferenceWorkspace(3, 40, heads, head_dim, "cuda", dtype)
    generator = torch.Generator().manual_seed(5)
    full = [torch.randint(0, 97, (n,), generator=generator).tolist() for n in (17, 9, 25)]
    whole = [exact(torch.tensor([text]))[0] for text in full]
    # what rounding alone does, without a cache and without our kernels
    rounded = copy.deepcopy(exact).to(dtype)
    scale = max(
        ((rounded(torch.tensor([t]))[0].float() - w).norm() / w.norm()).item()
        for t, w in zip(full, whole, strict=True)
    )
    rows, cut = [2, 0, 1], 6
    heads_of = [text[: len(text) - cut] for text in full]
    got = [run(model, pool, workspace, rows, heads_of, 0)]
    expected = [w[: len(h)] for w, h in zip(whole, heads_of, strict=True)]
    for step in range(1, cut + 1):
        texts = [t[: len(h) + step] for t, h in zip(full, heads_of, strict=True)]
        got.append(run(model, pool, workspace, rows, texts, None))
        expected.append(torch.stack([w[len(t) - 1] for w, t in zip(whole, texts, strict=True)]))
    got, expected = torch.cat(got).float().cpu(), torch.cat(expected)
    assert ((got - expected).norm() / expected.norm()).item() <= 1.5 * scale
