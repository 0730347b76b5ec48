"""Small random Llama models for tests, in the forms that the loaders read."""

from __future__ import annotations

import pathlib

import torch

from astrai.model import Decoder, LoadedModel, ModelConfig

# The matrices are so small that a second thread costs more than it brings.
torch.set_num_threads(1)

CONFIG = ModelConfig(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=112,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    max_position=48,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    eos_token_ids=(96,),
)


def decoder(config: ModelConfig = CONFIG, seed: int = 0) -> Decoder:
    """A decoder with random weights, large enough that attention and position matter."""
    torch.manual_seed(seed)
    model = Decoder(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.normal_(std=0.2)
            elif name.endswith("norm.weight"):
                weight.uniform_(0.5, 1.5)
    return model


def loaded(seed: int = 0) -> LoadedModel:
    """The decoder without tokenizer and template."""
    return LoadedModel(decoder(seed=seed), None, None)


def write_gguf(
    path: pathlib.Path,
    model: Decoder,
    *,
    metadata: dict | None = None,
    quantize: str | None = None,
    leave_out: str | None = None,
) -> None:
    """Writes a decoder's weights as a GGUF file.

    Args:
        path: The file.
        model: What to write.
        metadata: Further string or number pairs; a value None takes a pair away.
        quantize: Name of a GGML type for the matrices; None writes fp32.
        leave_out: A tensor not to write.
    """
    import gguf

    config = model.config
    pairs = {
        "llama.block_count": config.num_layers,
        "llama.context_length": config.max_position,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_heads,
        "llama.attention.head_count_kv": config.num_kv_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.rope.freq_base": config.rope_theta,
        "llama.rope.dimension_count": config.head_dim,
        "llama.vocab_size": config.vocab_size,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.eos_token_id": config.eos_token_ids[0],
        **(metadata or {}),
    }
    writer = gguf.GGUFWriter(path, pairs.pop("general.architecture", "llama"))
    for key, value in pairs.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    writer.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(config.vocab_size)])
    for name, weight in model.weights().items():
        short = _gguf_name(name)
        if short == leave_out:
            continue
        values = weight.detach().float().numpy()
        if quantize and values.ndim == 2:
            kind = gguf.GGMLQuantizationType[quantize]
            writer.add_tensor(short, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(short, values)
    if config.rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", torch.tensor(config.rope_factors).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str) -> str:
    for ours, theirs in (
        ("embed_tokens", "token_embd"),
        ("lm_head", "output"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.", "attn_"),
        ("mlp.", "ffn_"),
        ("_proj", ""),
        ("layers.", "blk."),
    ):
        name = name.replace(ours, theirs)
    return "output_norm.weight" if name == "norm.weight" else name
