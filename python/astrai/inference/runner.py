"""Model calls of a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from astrai.extension import resolve
from astrai.inference.cache import TaskCacheManager
from astrai.inference.graphs import CudaGraphContext, padded_batch_size
from astrai.inference.pool import KVCache
from astrai.inference.request import Request
from astrai.inference.sampling import Likeliest, likeliest
from astrai.inference.scheduler import Chunk
from astrai.inference.workspace import InferenceWorkspace
from astrai.model import Decoder


class ModelRunner:
    """Computes what a plan asks for.

    Args:
        decoder: The model.
        tasks: The pool's pages, by request.
        workspace: Index buffers of the calls.
        graphs: Decode steps are padded to a few batch sizes, and captured and replayed where the
            attention backend allows it. None: eager, and without padding.
    """

    def __init__(
        self,
        decoder: Decoder,
        tasks: TaskCacheManager,
        workspace: InferenceWorkspace,
        graphs: CudaGraphContext | None,
    ) -> None:
        self.graphs = graphs
        self._decoder = decoder
        self._tasks = tasks
        self._workspace = workspace
        config = decoder.config
        # What a decode step's attention looks like to the dispatcher.
        self._q, self._k = (
            torch.empty(1, heads, config.head_dim, dtype=decoder.dtype, device=decoder.device)
            for heads in (config.num_heads, config.num_kv_heads)
        )

    @torch.no_grad()
    def decode(
        self, requests: Sequence[Request], newest: tuple[torch.Tensor, Sequence[int]] | None = None
    ) -> Likeliest:
        """Computes each request's last token.

        Args:
            requests: The requests.
            newest: Their last tokens, if the host does not know them yet: as ``input_from`` of
                ``PagePool.bind_tasks``.

        Returns:
            The logits after each, valid until the next ``decode``.
        """
        batch = padded = len(requests)
        if self.graphs is not None:
            padded = padded_batch_size(batch, self._workspace.max_batch_size)
        cache = self._tasks.bind(
            requests,
            self._workspace,
            lens=[request.length for request in requests],
            input_ids=[request.tokens[-1] for request in requests] if newest is None else None,
            input_from=newest,
            pad_to=None if self.graphs is None else padded,
        )
        arguments = {
            "input_ids": self._workspace.input_ids[:padded],
            "positions": cache.positions,
            "kv_cache": cache,
            "fwd": "decode",
        }
        if self.graphs is not None:
            backend = self._backend(cache)
            if backend.supports_graph():
                key = (padded, backend.name)
                found = self.graphs.forward(self._likeliest, key=key, **arguments)
                return Likeliest(*(part[:batch] for part in found))
        return Likeliest(*(part[:batch] for part in self._likeliest(**arguments)))

    @torch.no_grad()
    def prefill(self, chunks: Sequence[Chunk]) -> Likeliest:
        """Computes chunks of requests; returns the logits after those that are their last."""
        cache = self._tasks.bind(
            [chunk.request for chunk in chunks],
            self._workspace,
            start_pos=[chunk.start for chunk in chunks],
            lens=[chunk.end for chunk in chunks],
            input_ids=[
                token for chunk in chunks for token in chunk.request.tokens[chunk.start : chunk.end]
            ],
        )
        # Only the last chunk may stop short of its request's end: the others are in front.
        done = sum(chunk.last for chunk in chunks)
        return self._likeliest(
            input_ids=self._workspace.input_ids[: cache.positions.numel()],
            positions=cache.positions,
            kv_cache=cache,
            fwd="prefill",
            select=cache.qo_indptr[1 : done + 1] - 1,
        )

    def _likeliest(self, **arguments) -> Likeliest:
        return likeliest(self._decoder(**arguments))

    def _backend(self, cache: KVCache):
        """The attention backend that a decode step takes now (contexts may have changed it)."""
        return resolve(
            "attention", self._q, self._k, self._k, kv_cache=cache, fwd="decode", is_causal=True
        ).record.obj
