"""A request on its way through the engine, and the handle by which its answer is read."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from astrai.inference.sampling import Sample, SamplingParams, uniform
from astrai.model.tokenizer import TextStream

if TYPE_CHECKING:
    from astrai.inference.engine import Engine


class StopStrings:
    """Ends a stream of text in front of the first of some strings.

    Text that might be the beginning of one of them is held back until that is decided.

    Args:
        strings: The strings; none of them empty.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._held = ""

    def put(self, text: str) -> tuple[str, bool]:
        """Adds text. Returns what may be shown now, and whether a string has come."""
        text = self._held + text
        found = [at for at in map(text.find, self._strings) if at >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        keep = max((_overlap(text, string) for string in self._strings), default=0)
        shown = len(text) - keep
        self._held = text[shown:]
        return text[:shown], False

    def end(self) -> str:
        """The text still held back, which has turned out to be no stop string."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, string: str) -> int:
    """Length of the longest end of ``text`` that ``string`` begins with, but is not all of it."""
    for length in range(min(len(text), len(string) - 1), 0, -1):
        if text.endswith(string[:length]):
            return length
    return 0


class Request:
    """The engine's side of an answer.

    Attributes:
        tokens: The prompt, and the tokens made so far.
        prompt_length: Tokens of the prompt.
        computed: How many of the tokens have their K and V in the pool.
        in_flight: Tokens chosen on the device that the host has not read yet.
        number: Place in the order of arrival; None before it was given to the engine.
        finish_reason: See ``Generation``.
        error: What the reader of the answer is to be told, or None.
        pieces: Text that the reader has not taken yet.
        samples: Tokens chosen so far, stop tokens among them.
        logprobs: Log-probabilities of the answer's tokens, if asked for.
        cached_tokens: Tokens of the prompt that were found in the pool.
        prefill_seconds: Time of the steps up to the first token that this request took part in.
        decode_seconds: Time of the later ones.
    """

    def __init__(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        limit: int,
        limit_reason: str,
        stop_ids: frozenset[int],
        stop_strings: Sequence[str],
        stream: TextStream | None,
    ) -> None:
        self.tokens = list(prompt_ids)
        self.prompt_length = len(prompt_ids)
        self.sampling = sampling
        self.computed = 0
        self.in_flight = 0
        self.number: int | None = None
        self.finish_reason: str | None = None
        self.error: Exception | None = None
        self.pieces: deque[str] = deque()
        self.samples = 0
        self.logprobs: list[float] = []
        self.cached_tokens = 0
        self.prefill_seconds = 0.0
        self.decode_seconds = 0.0
        self._limit = limit
        self._limit_reason = limit_reason
        self._stop_ids = stop_ids
        self._stop_strings = StopStrings(stop_strings)
        self._stream = stream
        self._seed = secrets.randbits(64) if sampling.seed is None else sampling.seed

    @property
    def generated(self) -> int:
        """Tokens made so far."""
        return len(self.tokens) - self.prompt_length

    @property
    def length(self) -> int:
        """Tokens of prompt and answer, those in flight included."""
        return len(self.tokens) + self.in_flight

    @property
    def remaining(self) -> int:
        """Tokens that it may still make after those in flight."""
        return self._limit - self.generated - self.in_flight

    @property
    def uncomputed(self) -> int:
        """Tokens whose K and V are not in the pool yet."""
        return len(self.tokens) - self.computed

    def next_uniform(self) -> float:
        """The random number for the next token."""
        return uniform(self._seed, self.generated + self.in_flight)

    def spend(self, seconds: float) -> None:
        """Books the time of a step in which this request took part."""
        if self.samples:
            self.decode_seconds += seconds
        else:
            self.prefill_seconds += seconds

    def accept(self, sample: Sample) -> None:
        """Takes the next token; sets ``finish_reason`` if it is the last."""
        self.samples += 1
        if sample.token in self._stop_ids:
            self._finish("stop")
            return
        self.tokens.append(sample.token)
        if self.sampling.logprobs:
            self.logprobs.append(sample.logprob)
        if self._stream is None:
            self.pieces.append("")
        elif self._show(self._stream.put(sample.token)):
            self.finish_reason = "stop"
            return
        if self.generated == self._limit:
            self._finish(self._limit_reason)

    def _show(self, text: str) -> bool:
        """Passes text on to the reader; returns whether a stop string has come."""
        shown, stopped = self._stop_strings.put(text)
        if shown:
            self.pieces.append(shown)
        return stopped

    def _finish(self, reason: str) -> None:
        """Ends the answer, with the text that was held back."""
        self.finish_reason = reason
        if self._stream is not None:
            if self._show(self._stream.end()):
                self.finish_reason = "stop"
            elif rest := self._stop_strings.end():
                self.pieces.append(rest)


class Generation:
    """An answer under way: iterate over it for its text, piece by piece.

    Iterating makes the engine step, for all its requests, until there is a piece of this one.
    ``close`` ends the request and frees its cache, and so does dropping the object, as happens when
    a loop over it is broken off.

    Attributes:
        text: The text given out so far.
    """

    def __init__(self, engine: Engine, request: Request) -> None:
        self.text = ""
        self._engine = engine
        self._request = request

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        request = self._request
        self._engine._enqueue(request)
        while True:
            if request.pieces:
                piece = request.pieces.popleft()
                self.text += piece
                return piece
            if request.error is not None:
                error, request.error = request.error, None
                raise error
            if request.finish_reason is not None:
                raise StopIteration
            self._engine.step()

    def __del__(self) -> None:
        # Not set if __init__ was never reached.
        if hasattr(self, "_request"):
            self.close()

    def close(self) -> None:
        """Ends the request early; text not taken yet is dropped. Does nothing if it has ended."""
        self._engine._cancel(self._request)
        self._request.pieces.clear()

    def read(self) -> str:
        """Runs to the end; returns the whole text."""
        for _ in self:
            pass
        return self.text

    @property
    def prompt_ids(self) -> list[int]:
        """Tokens of the prompt."""
        return self._request.tokens[: self._request.prompt_length]

    @property
    def token_ids(self) -> list[int]:
        """Tokens made so far.

        A final stop token is not among them; the tokens that a stop string came with are.
        """
        return self._request.tokens[self._request.prompt_length :]

    @property
    def logprobs(self) -> list[float] | None:
        """Log-probability of each of ``token_ids``, or None if they were not asked for."""
        return list(self._request.logprobs) if self._request.sampling.logprobs else None

    @property
    def finish_reason(self) -> str | None:
        """Why the answer has ended; None while it is under way.

        "stop" (a stop token or string came), "length" (max_tokens reached), "context" (the context
        is full), "closed" (broken off) or "error" (iterating raises it).
        """
        return self._request.finish_reason

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that another request had left in the cache."""
        return self._request.cached_tokens

    @property
    def prefill_seconds(self) -> float | None:
        """Time of the engine's steps for the prompt, or None before its first token."""
        return self._request.prefill_seconds if self._request.samples else None

    @property
    def decode_seconds(self) -> float:
        """Time of the engine's steps for all later tokens."""
        return self._request.decode_seconds

    @property
    def decode_steps(self) -> int:
        """Tokens chosen in that time."""
        return max(0, self._request.samples - 1)

    @property
    def tokens_per_second(self) -> float | None:
        """Decode speed, without the prompt; None if no token was decoded."""
        return self.decode_steps / self.decode_seconds if self.decode_seconds else None
