"""Runs a function in two processes that form a gloo group."""

from __future__ import annotations

import multiprocessing
import socket
import traceback
from collections.abc import Callable
from typing import Any

WORLD = 2
TIMEOUT_S = 100


def _child(function: Callable[..., Any], rank: int, port: int, pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        store = dist.TCPStore("127.0.0.1", port, WORLD, is_master=rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
        pipe.send((True, function(rank)))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        raise


def in_two_processes(function: Callable[[int], Any]) -> list[Any]:
    """What ``function(rank)`` returns in each of two processes.

    Args:
        function: Of a module that can be imported; returns what can be pickled.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    children, pipes = [], []
    for rank in range(WORLD):
        ours, theirs = context.Pipe()
        child = context.Process(target=_child, args=(function, rank, port, theirs), daemon=True)
        child.start()
        children.append(child)
        pipes.append(ours)
    results = []
    try:
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(TIMEOUT_S), f"rank {rank} sent nothing for {TIMEOUT_S} s"
            good, result = pipe.recv()
            assert good, f"rank {rank} failed:\n{result}"
            results.append(result)
    finally:
        for child in children:
            child.join(10)
            if child.is_alive():
                child.terminate()
    return results
