"""Text generation on top of ``astrai.model``: paged KV cache, scheduler, sampling, engine."""

from astrai.inference.cache import TaskCacheManager
from astrai.inference.engine import Engine, EngineStats
from astrai.inference.graphs import CudaGraphContext
from astrai.inference.pages import PageAllocator
from astrai.inference.pool import KVCache, PagePool
from astrai.inference.request import Generation
from astrai.inference.sampling import Sample, SamplingParams, sample
from astrai.inference.workspace import InferenceWorkspace

__all__ = [
    "CudaGraphContext",
    "Engine",
    "EngineStats",
    "Generation",
    "InferenceWorkspace",
    "KVCache",
    "PageAllocator",
    "PagePool",
    "Sample",
    "SamplingParams",
    "TaskCacheManager",
    "sample",
]
