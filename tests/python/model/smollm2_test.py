"""SmolLM2-135M-Instruct against transformers, both from the same GGUF file, on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch

from astrai.inference import Engine
from tests.python.model import smollm2

STEPS = 64


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = smollm2.ours().tokenizer
    return [tokenizer.encode(prompt) for prompt in smollm2.PROMPTS]


def test_config_says_what_transformers_reads():
    config, theirs = smollm2.ours().decoder.config, smollm2.reference().config
    assert config.vocab_size == theirs.vocab_size == 49152
    assert config.hidden_size == theirs.hidden_size
    assert config.intermediate_size == theirs.intermediate_size
    assert config.num_layers == theirs.num_hidden_layers == 30
    assert (config.num_heads, config.num_kv_heads) == (9, 3)
    assert config.head_dim == theirs.head_dim == 64
    assert config.max_position == theirs.max_position_embeddings
    assert config.rms_norm_eps == pytest.approx(theirs.rms_norm_eps)
    assert config.rope_theta == theirs.rope_parameters["rope_theta"] == 100000.0
    assert config.tie_word_embeddings and config.eos_token_ids == (2,)


def test_every_weight_equals_transformers():
    ours = smollm2.ours().decoder
    theirs = smollm2.reference().state_dict()
    heads = {"q_proj": ours.config.num_heads, "k_proj": ours.config.num_kv_heads}
    for name, weight in ours.weights().items():
        expected = theirs["model." + name if name != "lm_head.weight" else name]
        for projection, count in heads.items():
            if projection in name:  # theirs pairs row i with i + head_dim / 2, ours neighbours
                weight = weight.view(count, -1, 2, weight.shape[-1]).transpose(1, 2)
                weight = weight.reshape(expected.shape)
        assert torch.equal(weight, expected), name


@pytest.mark.parametrize("index", range(len(smollm2.PROMPTS)))
def test_fp32_logits_of_the_whole_prompt(prompts, index):
    ids = prompts[index]
    ours = smollm2.logits(smollm2.ours().decoder, ids)
    expected = smollm2.logits(smollm2.reference(), ids)
    assert ours.shape == expected.shape == (len(ids), 49152)
    assert smollm2.relative_error(ours, expected) <= 1e-4
    worst = ((ours - expected).norm(dim=-1) / expected.norm(dim=-1)).max().item()
    assert worst <= 1e-4, "a single position is off"


@pytest.mark.parametrize("index", [0, 3])
def test_fp32_greedy_tokens_with_kv_cache(prompts, index):
    ids = prompts[index]
    engine = Engine(smollm2.ours(), max_seq_len=len(ids) + STEPS)
    answer = engine.generate(ids, max_tokens=STEPS, stop_ids=())
    answer.read()
    with torch.no_grad():
        model, cache, feed, expected = smollm2.reference(), None, torch.tensor([ids]), []
        for _ in range(STEPS):
            out = model(feed, past_key_values=cache, use_cache=True)
            cache, feed = out.past_key_values, out.logits[:, -1:].argmax(-1)
            expected.append(feed.item())
    assert len(set(expected)) > 10, "the reference must say something"
    assert answer.token_ids == expected


def test_bf16_error_against_transformers_own_bf16(prompts):
    ours = copy.deepcopy(smollm2.ours().decoder).to(torch.bfloat16)
    theirs = smollm2.reference_bf16()
    exact = [smollm2.logits(smollm2.reference(), ids) for ids in prompts]

    def error(model: torch.nn.Module) -> float:
        got = torch.cat([smollm2.logits(model, ids) for ids in prompts])
        return smollm2.relative_error(got, torch.cat(exact))

    our_error, their_error = error(ours), error(theirs)
    print(f"relative error in bf16: ours {our_error:.5f}, transformers {their_error:.5f}")
    assert 1e-4 < their_error < 0.1, "the reference is not a bf16 model"
    assert our_error <= 1.3 * their_error


def test_chat_answers_in_english_and_stops():
    engine = Engine(smollm2.ours(), max_seq_len=256)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    pieces = list(answer := engine.chat(messages, max_tokens=64))
    assert "".join(pieces) == answer.text
    assert "Paris" in answer.text and "<|im_end|>" not in answer.text
    assert answer.finish_reason == "stop" and 2 not in answer.token_ids
    assert engine.pool.free_rows == engine.pool.max_batch_size
