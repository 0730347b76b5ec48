"""Text generation on top of ``astrai.model``: KV cache, sampling, streaming engine."""

from astrai.inference.cache import InferenceWorkspace, KVCache, PagePool
from astrai.inference.engine import Engine, Generation
from astrai.inference.sampling import SamplingParams, sample

__all__ = [
    "Engine",
    "Generation",
    "InferenceWorkspace",
    "KVCache",
    "PagePool",
    "SamplingParams",
    "sample",
]
