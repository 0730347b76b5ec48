"""The Llama decoder in regions: training, checkpointing, compiled, inference."""

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from astrai.extension.fp8 import DelayedScaling, fp8_autocast, fp8_opt_out, fp8_state
from astrai.model import Decoder, ModelConfig
from tests.python.fp8.layers import RECIPES, names, relative, same

CONFIG = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position=32,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
)


def decoder():
    torch.manual_seed(0)
    return Decoder(CONFIG).bfloat16()


def tokens():
    return torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(1))


def loss_of(model, ids):
    logits = model(ids[:, :-1])
    return cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


@pytest.mark.parametrize("recipe", RECIPES, ids=names)
def test_training_is_close_to_bf16(recipe):
    ids = tokens()

    def train(enabled):
        model = decoder()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses = []
        for _ in range(6):
            optimizer.zero_grad()
            with fp8_autocast(enabled, recipe):
                loss = loss_of(model, ids)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    got, want = train(True), train(False)
    assert got != want and want[-1] < want[0] - 0.1
    for a, b in zip(got, want, strict=True):
        assert abs(a - b) < 0.02 * b


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_layers(use_reentrant):
    recipe = DelayedScaling(history_len=4)

    def train(checkpointed):
        model = decoder()
        if checkpointed:
            for layer in model.layers:
                plain = layer.forward
                layer.forward = lambda *args, plain=plain: checkpoint(
                    plain, *args, use_reentrant=use_reentrant
                )
        for _ in range(2):
            model.zero_grad()
            with fp8_autocast(recipe=recipe):
                loss = loss_of(model, tokens())
            loss.backward()
        weight = model.layers[0].self_attn.o_proj.weight
        return loss, weight.grad, fp8_state().rings(weight, recipe)

    got, want = train(True), train(False)
    assert torch.equal(got[0], want[0])
    assert same(got[1], want[1])
    torch.testing.assert_close(got[2], want[2], rtol=0, atol=0)


def test_every_projection_takes_fp8_without_autograd_too():
    model = decoder()
    ids = tokens()
    with fp8_autocast():
        want = model(ids)
        with torch.no_grad():
            got = model(ids)
    assert torch.equal(got, want)
    assert 0 < relative(got, model(ids)) < 0.1


def test_autocast_with_and_without_autograd():
    torch.manual_seed(0)
    model = Decoder(CONFIG)
    ids = tokens()
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16), fp8_autocast(enabled):
            want = model(ids)
            with torch.no_grad():
                got = model(ids)
        assert relative(got, want) < 0.01


def test_compiled():
    model = decoder()
    fp8_opt_out(model, "lm_head.*")
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with fp8_autocast():
        got, want = loss_of(compiled, tokens()), loss_of(model, tokens())
    torch.testing.assert_close(got, want, rtol=1e-2, atol=0)
    torch._dynamo.reset()
