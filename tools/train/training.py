"""Trains one model with one recipe; what does not depend on the recipe is the same each time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.nn.functional import cross_entropy

from astrai.extension import fp8_autocast, fp8_opt_out
from astrai.extension.fp8 import FP8Recipe
from astrai.model import Decoder, ModelConfig
from tools.train.corpus import VOCAB_SIZE, Corpus

_VALIDATION_BATCHES = 4
_WARMUP_SHARE = 0.1
_CLIP = 1.0

Progress = Callable[[int, float, float], None]
"""Called as progress(steps done, loss, tokens per second)."""


@dataclass(frozen=True)
class Setup:
    """What all runs share.

    Attributes:
        hidden: Width of the model; the feed-forward block is 8 / 3 as wide, in steps of 128.
        layers: Decoder blocks.
        heads: Query heads; half as many key/value heads.
        batch: Sequences of a step on each rank.
        length: Tokens of a sequence.
        steps: Optimizer steps.
        learning_rate: Its peak, after a warm-up of a tenth of the steps; cosine decay to a tenth.
        seed: Of weights and batches.
        device: Where it runs.
        rank: Of this process.
        world: Processes that train together, each on batches of its own.
    """

    hidden: int
    layers: int
    heads: int
    batch: int
    length: int
    steps: int
    learning_rate: float
    seed: int
    device: torch.device
    rank: int = 0
    world: int = 1

    def model_config(self) -> ModelConfig:
        """The decoder's shape."""
        return ModelConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=self.hidden,
            intermediate_size=math.ceil(self.hidden * 8 / 3 / 128) * 128,
            num_layers=self.layers,
            num_heads=self.heads,
            num_kv_heads=max(1, self.heads // 2),
            head_dim=self.hidden // self.heads,
            max_position=self.length,
            rms_norm_eps=1e-5,
            rope_theta=10000.0,
        )


@dataclass
class Curve:
    """What a run gave.

    Attributes:
        name: Of the recipe, or "bf16".
        losses: Of each step, in nats per byte.
        validation: Loss on text that was not trained on, evaluated in bf16.
        seconds: Of all steps.
    """

    name: str
    losses: list[float] = field(default_factory=list)
    validation: float = math.nan
    seconds: float = 0.0

    def final(self) -> float:
        """Mean of the last tenth of the steps' losses."""
        last = self.losses[-max(1, len(self.losses) // 10) :]
        return sum(last) / len(last)


def train(
    name: str, recipe: FP8Recipe | None, setup: Setup, corpus: Corpus, progress: Progress
) -> Curve:
    """Trains a fresh model.

    Weights are fp32, linear layers see them in bf16 (torch.autocast) or in fp8. The output
    projection stays in bf16, as is usual.

    Args:
        name: Of the curve.
        recipe: How linear layers are scaled; None for bf16.
        setup: See there.
        corpus: The text.
        progress: Told now and then; reading a loss waits for the device.
    """
    torch.manual_seed(setup.seed)
    model = Decoder(setup.model_config()).to(setup.device)
    fp8_opt_out(model, "lm_head.*")
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=setup.learning_rate,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        fused=setup.device.type == "cuda",
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, setup.steps))
    group = torch.distributed.group.WORLD if setup.world > 1 else None
    region = fp8_autocast(recipe is not None, recipe, fp8_group=group)
    generator = torch.Generator().manual_seed(setup.seed * setup.world + setup.rank)
    losses = []
    curve = Curve(name)
    start = time.perf_counter()
    shown = max(1, setup.steps // 40)
    for step in range(1, setup.steps + 1):
        ids = corpus.batch(corpus.train, setup.batch, setup.length, generator)
        with region:
            loss = loss_of(model, ids.to(setup.device, non_blocking=True))
        loss.backward()
        if setup.world > 1:
            average_gradients(model, setup.world)
        torch.nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if step % shown == 0 or step == setup.steps:
            value = losses[-1].item()
            tokens = step * setup.batch * setup.length * setup.world
            progress(step, value, tokens / (time.perf_counter() - start))
    curve.seconds = time.perf_counter() - start
    curve.losses = torch.stack(losses).tolist()
    curve.validation = validate(model, setup, corpus)
    return curve


def loss_of(model: Decoder, ids: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of each byte, given those before it."""
    with torch.autocast(ids.device.type, torch.bfloat16):
        logits = model(ids[:, :-1])
    return cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def validate(model: Decoder, setup: Setup, corpus: Corpus) -> float:
    """The loss on fixed pieces of text that was not trained on."""
    generator = torch.Generator().manual_seed(setup.seed)
    total = 0.0
    with torch.no_grad():
        for _ in range(_VALIDATION_BATCHES):
            ids = corpus.batch(corpus.validation, setup.batch, setup.length, generator)
            total += loss_of(model, ids.to(setup.device)).item()
    return total / _VALIDATION_BATCHES


def rate(step: int, steps: int) -> float:
    """Factor of the learning rate at a step."""
    warmup = max(1, round(steps * _WARMUP_SHARE))
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done))


def average_gradients(model: torch.nn.Module, world: int) -> None:
    """Gives all ranks the mean of their gradients."""
    for parameter in model.parameters():
        torch.distributed.all_reduce(parameter.grad)
        parameter.grad /= world
