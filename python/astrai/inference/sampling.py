"""Choice of the next token from its logits."""

from __future__ import annotations

import dataclasses
import math

import torch


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen.

    Attributes:
        temperature: 0 takes the likeliest token (greedy); above 0 draws from softmax(logits /
            temperature).
        top_k: Draw from the k likeliest tokens only; 0 means all.
        top_p: Draw from the smallest set of likeliest tokens whose probabilities sum to at least
            this (nucleus sampling, Holtzman et al. 2020); 1 means all. Applied after top_k.
        seed: Start of the random numbers; None takes a fresh one each time.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(
                f"SamplingParams: temperature must be finite and 0 or more, got {self.temperature}"
            )
        if self.top_k < 0:
            raise ValueError(f"SamplingParams: top_k must be 0 or more, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(
                f"SamplingParams: top_p must be above 0 and at most 1, got {self.top_p}"
            )

    def generator(self) -> torch.Generator:
        """Random numbers, on the CPU so that a seed means the same on every device."""
        generator = torch.Generator("cpu")
        if self.seed is None:
            generator.seed()
        else:
            generator.manual_seed(self.seed)
        return generator


def sample(logits: torch.Tensor, params: SamplingParams, generator: torch.Generator) -> int:
    """Chooses a token.

    Args:
        logits: ``[vocab]``, any floating dtype and device.
        params: How to choose.
        generator: CPU generator; not used if ``params.temperature`` is 0.

    Raises:
        ValueError: A logit is NaN or +inf (a broken model), or all are -inf: no token could be
            chosen honestly.
    """
    if logits.dim() != 1 or logits.numel() == 0:
        raise ValueError(f"sample: logits must be [vocab], got shape {tuple(logits.shape)}")
    if params.temperature == 0:
        best = logits.argmax()
        top, token = torch.stack(
            (logits[best].double(), best.double())
        ).tolist()  # one copy from the device
        if not math.isfinite(top):  # argmax takes a NaN or +inf for the largest
            raise ValueError(f"sample: logits must be finite, got a largest logit of {top}")
        return int(token)
    wide = logits.detach().to("cpu", torch.float32)
    top = wide.max().item()
    if not math.isfinite(top):
        raise ValueError(f"sample: logits must be finite, got a largest logit of {top}")
    # The largest is taken off first: a tiny temperature must not overflow to inf - inf.
    scaled = (wide - top) / max(params.temperature, torch.finfo(torch.float32).tiny)
    order = scaled.argsort(descending=True, stable=True)
    if params.top_k:
        order = order[: params.top_k]
    probs = torch.softmax(scaled[order], dim=-1)
    if params.top_p < 1:
        before = probs.cumsum(-1) - probs  # the mass in front of each token; the first always stays
        keep = int((before < params.top_p).sum())
        order, probs = order[:keep], probs[:keep]
    return int(order[torch.multinomial(probs, 1, generator=generator)])
