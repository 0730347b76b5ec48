"""safetensors loader against transformers, on small random models that the test writes."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from astrai.model import ModelConfig, load
from tests.python.model import smollm2, tiny

IDS = [3, 77, 12, 12, 95, 0, 41, 8, 60]
SHAPE = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def save(folder, shards: str = "5GB", dtype: torch.dtype = torch.float32, **changes):
    """Writes a random model of transformers; returns it."""
    import transformers

    torch.manual_seed(1)
    config = transformers.LlamaConfig(**{**SHAPE, **changes})
    model = smollm2.modeling_class()(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # transformers' start is too small to tell heads apart
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
    model.save_pretrained(folder, max_shard_size=shards)
    return model


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": 1},
        {"num_key_value_heads": 4, "tie_word_embeddings": True},
        {"head_dim": 32},
        {"attention_bias": True, "mlp_bias": True},
        {"rope_theta": 500000.0},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_scaling": LLAMA3},
    ],
    ids=["gqa", "mqa", "mha-tied", "wide-heads", "biases", "theta", "linear-rope", "llama3-rope"],
)
def test_logits_equal_transformers(tmp_path, changes):
    expected = smollm2.logits(save(tmp_path, **changes), IDS)
    got = smollm2.logits(load(tmp_path).decoder, IDS)
    assert expected.std() > 0.1
    assert smollm2.relative_error(got, expected) <= 2e-6


def test_sharded_checkpoint(tmp_path):
    expected = smollm2.logits(save(tmp_path, shards="50KB"), IDS)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert smollm2.relative_error(smollm2.logits(load(tmp_path).decoder, IDS), expected) <= 2e-6
    next(tmp_path.glob("*-00002-*.safetensors")).unlink()
    with pytest.raises(FileNotFoundError, match=r"index\.json names model-00002"):
        load(tmp_path)


def test_bf16_checkpoint(tmp_path):
    save(tmp_path, dtype=torch.bfloat16)
    wide = smollm2.logits(load(tmp_path).decoder, IDS)
    theirs = smollm2.modeling_class().from_pretrained(tmp_path, dtype=torch.float32)
    assert smollm2.relative_error(wide, smollm2.logits(theirs, IDS)) <= 2e-6
    narrow = load(tmp_path, dtype=torch.bfloat16).decoder
    assert narrow.dtype == torch.bfloat16
    assert 1e-4 < smollm2.relative_error(smollm2.logits(narrow, IDS), wide) < 0.03


def test_config_of_both_transformers_generations():
    old = {
        **SHAPE,
        "model_type": "llama",
        "rms_norm_eps": 1e-6,
        "rope_theta": 5e5,
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "eos_token_id": [7, 8],
    }
    new = {
        **{key: value for key, value in old.items() if not key.startswith("rope_")},
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
    }
    a, b = ModelConfig.from_hf(old), ModelConfig.from_hf(new)
    assert a.rope_theta == b.rope_theta == 5e5
    assert a.rope_scaling["rope_type"] == b.rope_scaling["rope_type"] == "linear"
    assert a.rope_scaling["factor"] == b.rope_scaling["factor"] == 2.0
    assert a.eos_token_ids == (7, 8) and a.head_dim == 16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type must be one of .* got 'gpt2'"),
        ({"sliding_window": 128}, "sliding_window must be null"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu'"),
        ({"num_key_value_heads": 3}, "num_heads must be a multiple of num_kv_heads, got 4 and 3"),
        ({"vocab_size": None}, "vocab_size must be in the config"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type must be 'linear' or 'llama3'"),
        ({"vocab_size": 98}, r"\.weight must have shape \(98, 64\), got \(97, 64\)"),
        ({"num_hidden_layers": 3}, "must hold all weights"),
        ({"num_hidden_layers": 1}, "must belong to the model"),
        ({"num_hidden_layers": 10**9}, "must hold weights of 1000000000 layers"),
        ({"vocab_size": "97"}, "vocab_size must be an integer"),
        ({"rope_theta": -1.0}, "rope_theta must be positive"),
        (
            {"rope_scaling": {"rope_type": "linear"}},
            "factor of rope_type 'linear' must be positive",
        ),
        ({"rope_scaling": {"rope_type": "llama3"}}, "must be positive, got None"),
    ],
)
def test_unsuitable_configs_are_refused(tmp_path, changes, message):
    save(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config.pop("rope_parameters", None)
    file.write_text(json.dumps({**config, **changes}))
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_folders_that_lack_a_file_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"must hold config\.json"):
        load(tmp_path)
    save(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ValueError, match="readable safetensors"):
        load(tmp_path)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match=r"must hold model\.safetensors"):
        load(tmp_path)


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": "../model.safetensors"}}']
)
def test_wrong_index_is_refused(tmp_path, text):
    save(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path.parent / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match="must hold a weight_map of tensor names to file names"):
        load(tmp_path)


def test_config_that_is_no_object_is_refused(tmp_path):
    save(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="must hold a JSON object, got list"):
        load(tmp_path)


def test_quantised_weights_are_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    save(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name] = weights[name].to(torch.float8_e4m3fn)
    save_file(weights, file)
    with pytest.raises(
        ValueError, match=r"must be float32, bfloat16 or .* got torch\.float8_e4m3fn"
    ):
        load(tmp_path)


def test_tokenizer_json(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    save(tmp_path)
    assert load(tmp_path).tokenizer is None
    rust = Tokenizer(models.WordLevel({"<s>": 0, "hello": 1, "world": 2}, unk_token="<s>"))
    rust.pre_tokenizer = pre_tokenizers.Whitespace()
    rust.add_special_tokens(["<s>"])
    rust.save(str(tmp_path / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": {"content": "world"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    model = load(tmp_path)
    assert model.tokenizer.encode("hello world") == [1, 2]
    assert (model.tokenizer.bos_id, model.tokenizer.eos_id) == (0, 2)
    assert model.chat_template.render([{"role": "user", "content": "hello"}]) == "<s>hello"
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"must be a tokenizer\.json"):
        load(tmp_path)


def test_decoder_checks_its_arguments():
    model = tiny.decoder()
    with pytest.raises(ValueError, match=r"must be \[batch, seq\] without a cache"):
        model(torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="at most 48 tokens per row"):
        model(torch.zeros(1, 49, dtype=torch.long))
    with pytest.raises(ValueError, match="select must be None"):
        model(torch.zeros(1, 4, dtype=torch.long), select=torch.tensor([0]))


def test_gradients_flow_without_a_cache():
    model = tiny.decoder(dataclasses.replace(tiny.CONFIG, num_layers=1))
    model(torch.tensor([IDS])).float().square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
