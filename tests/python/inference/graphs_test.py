"""Padded batch sizes, and graph calls that run eagerly."""

from __future__ import annotations

import torch

from astrai.inference import CudaGraphContext
from astrai.inference.graphs import padded_batch_size


def test_padded_batch_sizes_are_few_and_near():
    sizes = {padded_batch_size(n, 256) for n in range(1, 257)}
    assert sorted(sizes)[:8] == [1, 2, 4, 8, 16, 24, 32, 40] and len(sizes) == 4 + 7 + 12
    for limit in (1, 3, 16, 100, 256):
        for n in range(1, limit + 1):
            size = padded_batch_size(n, limit)
            assert n <= size <= min(limit, 2 * n)
            assert padded_batch_size(size, limit) == size


def test_disabled_graphs_run_eagerly_each_time():
    graphs = CudaGraphContext()
    graphs.set_enabled(False)
    calls = []

    def model(x):
        calls.append(x)
        return x + 1

    for n in range(3):
        assert graphs.forward(model, key=1, x=torch.tensor(n)) == n + 1
    assert len(calls) == 3 and not graphs.has_graph(1)
