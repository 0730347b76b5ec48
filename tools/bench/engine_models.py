"""The models that bench_engine runs: their shape, ours, and transformers' with the same weights."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from tools.bench.results import Work

# Keys as in astrai.model.ModelConfig.
MODELS: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_layers": 30,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 64,
        "max_position": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
    "Llama-3-8B": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_layers": 32,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "max_position": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
}
# The one whose weights the demo has; the others are random.
DEMO = "SmolLM2-135M"


def matrix_parameters(model: Mapping[str, Any]) -> int:
    """Returns the parameters that each token is multiplied with: no embedding table, no norms."""
    hidden, dim = model["hidden_size"], model["head_dim"]
    heads = 2 * model["num_heads"] + 2 * model["num_kv_heads"]  # of q and out, of k and v
    layer = hidden * dim * heads + 3 * hidden * model["intermediate_size"]
    return model["num_layers"] * layer + hidden * model["vocab_size"]


def kv_bytes_per_token(model: Mapping[str, Any]) -> int:
    """Returns bytes of K and V of one token in 16 bits."""
    return 2 * 2 * model["num_layers"] * model["num_kv_heads"] * model["head_dim"]


def engine_work(shape: Mapping[str, Any]) -> Work:
    """Returns what must be done at least: each step reads the weights and the keys so far.

    A decode step stands in the middle of the answer. The whole call is the prompts' one pass over
    the weights and a decode step for each token but the first.
    """
    model = MODELS[shape["model"]]
    batch, prompt, steps = shape["batch"], shape["prompt"], shape["new_tokens"] - 1
    parameters = matrix_parameters(model)
    length = prompt + shape["new_tokens"] / 2
    width = model["num_layers"] * model["num_heads"] * model["head_dim"]
    step_bytes = 2 * parameters + batch * length * kv_bytes_per_token(model)
    step_flops = batch * (2 * parameters + 4 * width * length)
    if shape["part"] != "generate":
        return Work(num_bytes=step_bytes, flops=step_flops, unit="tbps")
    head = model["hidden_size"] * model["vocab_size"]  # only of the last token of each prompt
    tokens = batch * prompt
    prefill = 2 * tokens * (parameters - head) + 2 * batch * head + 2 * tokens * width * prompt
    return Work(
        num_bytes=2 * parameters + steps * step_bytes,
        flops=prefill + steps * step_flops,
        unit="tbps",
    )


def ours(name: str, device: str) -> Any:
    """Returns the LoadedModel in bf16: the demo's, or one of its shape with random weights."""
    import torch

    from astrai.model import LoadedModel, load
    from tools.demo import model_file

    if name == DEMO:
        try:
            return load(model_file.find(), dtype=torch.bfloat16, device=device)
        except FileNotFoundError as error:
            print(f"{name}: random weights instead, {error}", file=sys.stderr)
    return LoadedModel(_random_decoder(MODELS[name], device), None, None)


def _random_decoder(model: Mapping[str, Any], device: str) -> Any:
    import torch

    from astrai.model import Decoder, ModelConfig

    with torch.device("meta"):
        decoder = Decoder(ModelConfig(**model)).to(torch.bfloat16)
    decoder = decoder.to_empty(device=device).eval()
    if model["tie_word_embeddings"]:
        decoder.lm_head.weight = decoder.embed_tokens.weight
    with torch.no_grad():
        for weight in decoder.parameters():
            if weight.dim() == 2:
                weight.normal_(std=0.02)
            else:
                weight.fill_(1.0)
    return decoder


def theirs(decoder: Any) -> Any:
    """Returns transformers' LlamaForCausalLM with SDPA and the weights of a decoder of ours.

    The rows of q and k are copies, since transformers has rotary pairs (i, i + head_dim / 2) where
    ours has neighbours; the other tensors are shared.
    """
    import torch
    import transformers

    config, weights = decoder.config, {}
    for name, weight in decoder.weights().items():
        key = name if name.startswith("lm_head.") else f"model.{name}"
        for part, heads in ((".q_proj.", config.num_heads), (".k_proj.", config.num_kv_heads)):
            if part in name:
                rows = weight.reshape(heads, config.head_dim // 2, 2, *weight.shape[1:])
                weight = rows.transpose(1, 2).reshape(weight.shape)
        weights[key] = weight.detach()
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    shape = transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=config.tie_word_embeddings,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.device(decoder.device):
        model = transformers.AutoModelForCausalLM.from_config(
            shape, dtype=decoder.dtype, attn_implementation="sdpa"
        )
    model.load_state_dict(weights, assign=True)
    return model.eval()
