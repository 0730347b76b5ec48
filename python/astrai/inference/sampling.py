"""Choice of the next tokens of a batch, on the device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

_MASK64 = 2**64 - 1


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
        logprobs: Whether the log-probability of each chosen token is wanted.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    logprobs: bool = False

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


class Sample(NamedTuple):
    """A chosen token.

    Attributes:
        token: Its id; without meaning if ``top`` is not finite.
        top: The largest logit. NaN or +inf tells of a broken model, -inf of a row in which every
            token is ruled out.
        logprob: log softmax(logits)[token], whatever temperature, top_k and top_p are; NaN if it
            was not asked for.
    """

    token: int
    top: float
    logprob: float


def uniform(seed: int, index: int) -> float:
    """The ``index``-th random number of a seed, a multiple of 2**-48 in [0, 1).

    SplitMix64 (Steele, Lea and Flood 2014), whose state after n steps is known without taking them:
    a request draws the same numbers alone, in any batch, and after it was put off.
    """
    state = (_mix(seed & _MASK64) + (index + 1) * 0x9E3779B97F4A7C15) & _MASK64
    return (_mix(state) >> 16) / 2**48


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


class Likeliest(NamedTuple):
    """Logits and the largest of each row.

    Attributes:
        logits: ``[batch, vocab]``.
        top: ``[batch]``, the largest logit.
        tokens: int64 ``[batch]``, where it is; of equal ones, the first.
    """

    logits: torch.Tensor
    top: torch.Tensor
    tokens: torch.Tensor


def likeliest(logits: torch.Tensor) -> Likeliest:
    """What greedy choice needs of logits, ``[batch, vocab]``: fit to be captured in a graph."""
    return Likeliest(logits, *logits.max(dim=-1))


class Choice:
    """Tokens chosen on the device, and their copy to the host, which is under way.

    Args:
        tokens: int64 ``[batch]``.
        top: ``[batch]``, the largest logits.
        logprobs: ``[batch]``, or None if no row wants them.
        wanted: Whether each row wants its log-probability.

    Attributes:
        tokens: The tokens on the device. The next replay of the graph that they come from
            overwrites them.
    """

    def __init__(
        self,
        tokens: torch.Tensor,
        top: torch.Tensor,
        logprobs: torch.Tensor | None,
        wanted: Sequence[bool],
    ) -> None:
        self.tokens = tokens
        self._wanted = wanted
        self._tokens, self._top, self._logprobs = (
            None if x is None else x.to("cpu", non_blocking=True) for x in (tokens, top, logprobs)
        )
        self._copied = torch.cuda.Event() if tokens.is_cuda else None
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(tokens.device))

    def read(self) -> list[Sample]:
        """Waits for the copy; returns a sample for each row."""
        if self._copied is not None:
            self._copied.synchronize()
        logprobs = [math.nan] * len(self._wanted)
        if self._logprobs is not None:
            found = self._logprobs.tolist()
            logprobs = [x if w else math.nan for x, w in zip(found, self._wanted, strict=True)]
        columns = (self._tokens.tolist(), self._top.tolist(), logprobs)
        return [Sample(*row) for row in zip(*columns, strict=True)]


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> list[Sample]:
    """Chooses one token in each row.

    Args:
        logits: ``[batch, vocab]``, any floating dtype and device.
        params: How to choose, for each row.
        uniforms: Each row's random number in [0, 1); unused in greedy rows. A row's result depends
            on nothing but its own logits, params and number.

    Raises:
        ValueError: Shapes do not fit together.
    """
    batch = len(params)
    if logits.dim() != 2 or logits.shape[0] != batch or not logits.numel():
        raise ValueError(
            f"sample: logits must be [{batch}, vocab], got shape {tuple(logits.shape)}"
        )
    if len(uniforms) != batch:
        raise ValueError(f"sample: uniforms must have {batch} numbers, got {len(uniforms)}")
    return choose(likeliest(logits), params, uniforms).read()


def choose(rows: Likeliest, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> Choice:
    """Does what ``sample`` does, but waits for nothing."""
    logits, top, tokens = rows
    drawn = [row for row, p in enumerate(params) if p.temperature > 0]
    if drawn:
        settings = _to_device(
            [[row, *_setting(params[row], logits.shape[1]), uniforms[row]] for row in drawn],
            logits.device,
        )
        index = settings[:, 0].long()
        cut = any(params[row].top_k or params[row].top_p < 1 for row in drawn)
        tokens = tokens.index_copy(0, index, _draw(logits[index], settings[:, 1:], cut))
    logprobs = None
    if any(p.logprobs for p in params):
        wide = logits.float()
        logprobs = wide.gather(1, tokens[:, None])[:, 0] - wide.logsumexp(-1)
    return Choice(tokens, top, logprobs, [p.logprobs for p in params])


def _setting(params: SamplingParams, vocab: int) -> tuple[float, float, float]:
    # A mass above 1 is never reached: no rounding of the sums can then cut a token off.
    mass = params.top_p if params.top_p < 1 else 2.0
    # A temperature that is 0 in fp32 would divide 0 by 0.
    temperature = max(params.temperature, torch.finfo(torch.float32).tiny)
    return temperature, float(params.top_k or vocab), mass


def _to_device(values: list[list[float]], device: torch.device) -> torch.Tensor:
    host = torch.tensor(values, dtype=torch.float64)
    if device.type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host


def _draw(logits: torch.Tensor, settings: torch.Tensor, cut: bool) -> torch.Tensor:
    """Draws from rows by inverting the distribution function, in the order of the vocabulary.

    That order, and not that of the probabilities: two tokens that change places in the latter
    because one logit was rounded otherwise would change the answer.

    Args:
        logits: ``[rows, vocab]``. Rows without a finite maximum give some token.
        settings: fp64 ``[rows, 4]``: temperature, top_k, top_p, uniform number.
        cut: Whether any row has a top_k or top_p.
    """
    temperature, top_k, top_p, number = (column[:, None] for column in settings.unbind(1))
    logits = logits.float()
    # The largest is taken off first: a tiny temperature must not overflow to inf - inf.
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature.float()
    if cut:
        logits, order = logits.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(logits.shape[1], device=logits.device)
        logits = logits.masked_fill(rank >= top_k, -math.inf)
    probs = torch.softmax(logits, dim=-1, dtype=torch.float64)
    if cut:
        before = probs.cumsum(-1) - probs  # the mass in front of each; the first always stays
        probs = probs.masked_fill(before >= top_p, 0.0)
        probs = torch.zeros_like(probs).scatter_(1, order, probs)
    mass = probs.cumsum(-1)
    # The number is at most 1 - 2**-48, so the product is below the whole mass also when rounded.
    tokens = (mass <= number * mass[:, -1:]).sum(-1)
    return tokens.clamp_(max=logits.shape[1] - 1)  # rows of NaN
