"""Calls of a decoder with a KV cache, for the cache tests."""

from __future__ import annotations

import torch

from astrai.inference import InferenceWorkspace, PagePool
from astrai.model import Decoder


@torch.no_grad()
def run(
    model: Decoder,
    pool: PagePool,
    workspace: InferenceWorkspace,
    rows: list[int],
    texts: list[list[int]],
    start: int | None,
) -> torch.Tensor:
    """Feeds texts[b][start:] as a prefill, or each text's last token if ``start`` is None.

    Returns:
        Logits of all tokens fed, packed.
    """
    cache = pool.bind_tasks(rows, [len(t) for t in texts], workspace, start_pos=start)
    begins = [len(t) - 1 if start is None else start for t in texts]
    ids = [token for text, b in zip(texts, begins, strict=True) for token in text[b:]]
    positions = [p for text, b in zip(texts, begins, strict=True) for p in range(b, len(text))]
    return model(
        torch.tensor(ids, device=model.device),
        torch.tensor(positions, device=model.device),
        cache,
        "decode" if start is None else "prefill",
    )
