"""Llama-family decoder over ``astrai.extension``, with safetensors and GGUF loaders."""

from astrai.model.chat_template import ChatTemplate
from astrai.model.components import GQA, MLP, Linear, RMSNorm
from astrai.model.config import ModelConfig
from astrai.model.decoder import Decoder
from astrai.model.loader import LoadedModel, load
from astrai.model.tokenizer import Tokenizer

__all__ = [
    "GQA",
    "MLP",
    "ChatTemplate",
    "Decoder",
    "Linear",
    "LoadedModel",
    "ModelConfig",
    "RMSNorm",
    "Tokenizer",
    "load",
]
