"""GGUF loader on small files that the test writes: configuration, dequantisation, damaged files."""

from __future__ import annotations

import copy
import dataclasses

import gguf
import pytest
import torch

from astrai.model import load
from astrai.model.gguf_file import GGUFFile
from tests.python.model import tiny

IDS = torch.tensor([[5, 1, 90, 33, 33, 2, 71]])


def test_weights_come_back(tmp_path):
    model, seen = tiny.decoder(), []
    tiny.write_gguf(tmp_path / "m.gguf", model)
    loaded = load(tmp_path / "m.gguf", progress=lambda done, total: seen.append((done, total)))
    config = dataclasses.replace(loaded.decoder.config, rms_norm_eps=1e-5)
    assert config == tiny.CONFIG and not config.tie_word_embeddings
    assert loaded.chat_template is None and loaded.tokenizer.vocab_size == 97
    for name, weight in model.weights().items():
        assert torch.equal(loaded.decoder.weights()[name], weight), name
    total = len(model.weights())
    assert seen == [(i, total) for i in range(1, total + 1)]
    with torch.no_grad():
        torch.testing.assert_close(loaded.decoder(IDS), model(IDS))


def test_bf16_is_the_fp32_weights_rounded(tmp_path):
    tiny.write_gguf(tmp_path / "m.gguf", tiny.decoder())
    loaded = load(tmp_path / "m.gguf", dtype=torch.bfloat16).decoder
    cast = copy.deepcopy(tiny.decoder()).to(torch.bfloat16)
    for name, weight in loaded.weights().items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, cast.weights()[name]), name
    with torch.no_grad():
        assert torch.equal(loaded(IDS), cast(IDS)), "the rotary table must stay fp32 in .to(bf16)"


def test_tied_embedding(tmp_path):
    tiny.write_gguf(tmp_path / "m.gguf", tiny.decoder(), leave_out="output.weight")
    decoder = load(tmp_path / "m.gguf").decoder
    assert decoder.config.tie_word_embeddings
    assert decoder.lm_head.weight is decoder.embed_tokens.weight


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "F16", "BF16"])
def test_quantised_types_are_dequantised_as_gguf_does(tmp_path, kind):
    config = dataclasses.replace(tiny.CONFIG, intermediate_size=128)
    model = tiny.decoder(config)
    tiny.write_gguf(tmp_path / "m.gguf", model, quantize=kind)
    loaded = load(tmp_path / "m.gguf").decoder
    number = gguf.GGMLQuantizationType[kind]
    for name, weight in model.weights().items():
        values = weight.detach().numpy()
        if values.ndim == 2:
            values = gguf.dequantize(gguf.quantize(values, number), number)
        assert torch.equal(loaded.weights()[name], torch.tensor(values)), name


def test_rope_factors_divide_the_frequencies(tmp_path):
    factors = tuple(1.0 + i for i in range(16))
    config = dataclasses.replace(tiny.CONFIG, rope_factors=factors)
    tiny.write_gguf(tmp_path / "m.gguf", tiny.decoder(config))
    loaded = load(tmp_path / "m.gguf").decoder
    assert loaded.config.rope_factors == factors
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS), tiny.decoder(config)(IDS))
        assert not torch.allclose(loaded(IDS), tiny.decoder()(IDS), rtol=1e-2)


def test_damaged_files_are_refused(tmp_path):
    whole, part = tmp_path / "m.gguf", tmp_path / "part.gguf"
    tiny.write_gguf(whole, tiny.decoder())
    data = whole.read_bytes()
    for size in (0, 3, 20, 200, 2000, len(data) // 2, len(data) - 4000):
        part.write_bytes(data[:size])
        with pytest.raises(ValueError, match="readable GGUF file"):
            load(part)
    part.write_bytes(b"PK\x03\x04" + data[4:])
    with pytest.raises(ValueError, match="readable GGUF file"):
        load(part)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load(tmp_path / "none.gguf")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "bert"}, "architecture must be 'llama', got 'bert'"),
        ({"llama.block_count": None}, "llama.block_count must be in the metadata"),
        ({"llama.rope.dimension_count": 16}, "must be the head dim 32, got 16"),
        ({"llama.rope.scaling.type": "yarn"}, "must be 'none' or 'linear', got 'yarn'"),
        ({"llama.expert_count": 8}, "expert_count must be 0, got 8"),
        ({"llama.attention.head_count_kv": 3}, "num_heads must be a multiple"),
        ({"llama.feed_forward_length": 100}, "must have shape"),
        ({"llama.block_count": 3}, "must hold all weights"),
        ({"llama.block_count": 1}, "must belong to the model"),
        ({"llama.block_count": 10**9}, "must hold weights of 1000000000 layers, got 21 tensors"),
        ({"llama.attention.head_count": "4"}, "num_heads must be an integer"),
        ({"llama.rope.freq_base": 0.0}, "rope_theta must be positive"),
    ],
)
def test_unsuitable_models_are_refused(tmp_path, metadata, message):
    tiny.write_gguf(tmp_path / "m.gguf", tiny.decoder(), metadata=metadata)
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "m.gguf")


def test_missing_weight_is_named(tmp_path):
    tiny.write_gguf(tmp_path / "m.gguf", tiny.decoder(), leave_out="blk.1.attn_k.weight")
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.k_proj\.weight"):
        load(tmp_path / "m.gguf")


def test_dtype_is_checked(tmp_path):
    with pytest.raises(TypeError, match=r"float32, bfloat16 or float16, got torch\.int8"):
        load(tmp_path, dtype=torch.int8)


def test_metadata_is_plain_python(tmp_path):
    tiny.write_gguf(tmp_path / "m.gguf", tiny.decoder())
    metadata = GGUFFile(tmp_path / "m.gguf").metadata
    assert metadata["llama.block_count"] == 2
    assert metadata["tokenizer.ggml.tokens"][:2] == ["t0", "t1"]
