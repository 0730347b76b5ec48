"""CUDA kernels for language models: ``astrai.extension``, and a decoder and engine built on it."""

__version__ = "0.1.0"
