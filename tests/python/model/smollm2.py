"""SmolLM2-135M-Instruct for tests: its GGUF file, and the model, ours and transformers'."""

from __future__ import annotations

import copy
import functools
import pathlib

import torch

from astrai.model import LoadedModel, load
from tools.demo import model_file

# Several tests run at a time: more threads than free cores would make each step wait for the
# slowest.
torch.set_num_threads(1)

PROMPTS = (
    "The quick brown fox jumps over the lazy dog. In 1815, Napoleon was",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "Water boils at 100 degrees Celsius at sea level. At higher altitudes the pressure of the air "
    "is lower, and therefore water boils at a temperature that is",
)


def path() -> pathlib.Path:
    """The GGUF file; fails with a sentence where there is none."""
    return model_file.find()


@functools.cache
def ours(dtype: torch.dtype = torch.float32, device: str = "cpu") -> LoadedModel:
    """The model as ``astrai.model`` loads it."""
    return load(path(), dtype=dtype, device=device)


@functools.cache
def reference() -> torch.nn.Module:
    """The model as transformers loads it from the same file, fp32 on the CPU."""
    # transformers refuses GGUF files without the package accelerate, although on the CPU and
    # without a device map it does not use it.
    import transformers.modeling_utils as modeling

    asked, modeling.is_accelerate_available = (
        modeling.is_accelerate_available,
        lambda *_, **__: True,
    )
    try:
        model = modeling_class().from_pretrained(
            path().parent, gguf_file=path().name, dtype=torch.float32
        )
    finally:
        modeling.is_accelerate_available = asked
    return model.eval()


@functools.cache
def reference_bf16() -> torch.nn.Module:
    """The reference in bf16, as from_pretrained(dtype=torch.bfloat16) gives it."""
    model = copy.deepcopy(reference()).to(torch.bfloat16)
    # from_pretrained leaves the rotary frequencies in fp32, which `.to` has just rounded.
    model.model.rotary_emb = copy.deepcopy(reference().model.rotary_emb)
    return model


@functools.cache
def reference_tokenizer():
    """The tokenizer as transformers makes it from the same file."""
    import transformers

    return transformers.AutoTokenizer.from_pretrained(path().parent, gguf_file=path().name)


def modeling_class():
    """The class of transformers for the model, without progress bars."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    return transformers.LlamaForCausalLM


def relative_error(value: torch.Tensor, expected: torch.Tensor) -> float:
    """||value - expected|| / ||expected||, in fp64."""
    expected = expected.double().cpu()
    return ((value.double().cpu() - expected).norm() / expected.norm()).item()


@torch.no_grad()
def logits(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    """Logits of a whole prompt, fp32 on the CPU, ``[len(ids), vocab]``, of either model."""
    device = next(model.parameters()).device
    out = model(torch.tensor([ids], device=device))
    return (out if isinstance(out, torch.Tensor) else out.logits)[0].float().cpu()
