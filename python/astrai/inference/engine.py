"""Generation of text with a KV cache, one request at a time, streamed."""

from __future__ import annotations

import operator
import time
from collections.abc import Iterator, Mapping, Sequence

import torch

from astrai.inference.cache import InferenceWorkspace, PagePool
from astrai.inference.sampling import SamplingParams, sample
from astrai.model import LoadedModel
from astrai.model.tokenizer import TextStream


def _integer(value: object, what: str) -> int:
    """An integer of any kind (numpy's, a 0-d tensor's), but nothing that would be rounded."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{what} must be of integers, got {value!r}") from None


class Generation:
    """An answer under way: iterate over it for its text, piece by piece.

    Breaking off the iteration, or ``close``, ends the request and frees its cache.

    Attributes:
        prompt_ids: Tokens of the prompt.
        token_ids: Tokens made so far, the final stop token (if any) not among them.
        text: The text given out so far.
        finish_reason: None while under way; "stop" (a stop token came), "length" (max_tokens
            reached), "context" (the context is full) or "closed" (broken off).
        prefill_seconds: Time to the prompt's logits, or None before that.
        decode_seconds: Time spent on all later tokens.
        decode_steps: Model calls in that time.
    """

    def __init__(self, prompt_ids: list[int], steps: Iterator[str]) -> None:
        self.prompt_ids = prompt_ids
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self.prefill_seconds: float | None = None
        self.decode_seconds = 0.0
        self.decode_steps = 0
        self._steps = steps

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._steps)

    def close(self) -> None:
        """Ends the request early. Does nothing if it has ended."""
        self._steps.close()
        if self.finish_reason is None:
            self.finish_reason = "closed"

    def read(self) -> str:
        """Runs to the end; returns the whole text."""
        for _ in self:
            pass
        return self.text

    @property
    def tokens_per_second(self) -> float | None:
        """Decode speed, without the prompt; None if no token was decoded."""
        return self.decode_steps / self.decode_seconds if self.decode_seconds else None


class Engine:
    """Answers prompts with a model.

    Args:
        model: Decoder and tokenizer, as ``astrai.model.load`` gives them.
        max_seq_len: Tokens of prompt and answer together that the cache holds; None means the
            model's whole context.
        max_batch_size: Requests that may be under way at a time.

    Raises:
        ValueError: ``max_seq_len`` is more than the model's context.
    """

    def __init__(
        self, model: LoadedModel, *, max_seq_len: int | None = None, max_batch_size: int = 1
    ) -> None:
        config = model.decoder.config
        if max_seq_len is None:
            max_seq_len = config.max_position
        if not 1 <= max_seq_len <= config.max_position:
            raise ValueError(
                f"Engine: max_seq_len must be 1 to {config.max_position} (the model's context), "
                f"got {max_seq_len}"
            )
        self.model = model
        self.max_seq_len = max_seq_len
        device, dtype = model.decoder.device, model.decoder.dtype
        self.pool = PagePool(
            config.num_layers,
            config.num_kv_heads,
            config.head_dim,
            max_batch_size,
            max_seq_len,
            device,
            dtype,
        )
        self.workspace = InferenceWorkspace(
            max_batch_size, max_seq_len, config.num_heads, config.head_dim, device, dtype
        )

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        sampling: SamplingParams | None = None,
        **options,
    ) -> Generation:
        """Answers a conversation (by the model's chat template); options as ``generate``."""
        if self.model.chat_template is None:
            raise ValueError(
                "Engine.chat: the model must have a chat template, got none; use generate"
            )
        prompt = self.model.chat_template.render(messages)
        return self.generate(
            self._tokenizer("chat").encode(prompt, add_special_tokens=False), sampling, **options
        )

    def generate(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        stop_ids: Sequence[int] | None = None,
    ) -> Generation:
        """Continues a prompt.

        All arguments are checked at once; the model runs as the result is iterated over.

        Args:
            prompt: Text, or token ids.
            sampling: How tokens are chosen; None is greedy.
            max_tokens: Most tokens to make; None means until the context is full.
            stop_ids: Tokens that end the answer (themselves not part of it); None means the model's
                own.

        Returns:
            The answer, to iterate over: pieces of text, none of which splits a character. Without a
            tokenizer the pieces are empty, one per token; read ``token_ids``.

        Raises:
            TypeError: A token id or ``max_tokens`` is no integer.
            ValueError: The prompt is empty, holds an unknown token, or does not fit the context
                together with ``max_tokens``.
            RuntimeError: As many requests as the engine holds are under way (raised by the first
                iteration).
        """
        where = "Engine.generate"
        config = self.model.decoder.config
        ids = (
            self._tokenizer("generate").encode(prompt)
            if isinstance(prompt, str)
            else [_integer(t, f"{where}: prompt") for t in prompt]
        )
        if not ids:
            raise ValueError(f"{where}: prompt must have at least one token, got none")
        unknown = [t for t in ids if not 0 <= t < config.vocab_size]
        if unknown:
            raise ValueError(
                f"{where}: prompt must hold token ids below {config.vocab_size}, got {unknown[0]}"
            )
        if max_tokens is not None and _integer(max_tokens, f"{where}: max_tokens") < 1:
            raise ValueError(f"{where}: max_tokens must be at least 1, got {max_tokens}")
        # The last token made needs no cache slot: nothing is computed after it.
        room = self.max_seq_len - len(ids) + 1
        if room < 1 or (max_tokens is not None and max_tokens > room):
            wanted = "" if max_tokens is None else f" and max_tokens {max_tokens}"
            raise ValueError(
                f"{where}: prompt and max_tokens must fit the context of {self.max_seq_len} "
                "tokens, "
                f"got a prompt of {len(ids)} tokens{wanted}; shorten the prompt or make fewer "
                "tokens"
            )
        limit, reason = (room, "context") if max_tokens is None else (max_tokens, "length")
        stops = frozenset(
            config.eos_token_ids
            if stop_ids is None
            else (_integer(t, f"{where}: stop_ids") for t in stop_ids)
        )
        sampling = sampling or SamplingParams()
        # The generator function must know the object it reports to, which in turn iterates over it.
        answer = Generation(ids, iter(()))
        answer._steps = self._run(answer, sampling, limit, reason, stops)
        return answer

    def _run(
        self,
        answer: Generation,
        sampling: SamplingParams,
        limit: int,
        limit_reason: str,
        stops: frozenset[int],
    ) -> Iterator[str]:
        stream = self.model.tokenizer.stream() if self.model.tokenizer else None
        random = sampling.generator()
        row = self.pool.alloc_row()
        try:
            start = time.perf_counter()
            token = sample(self._step(row, answer.prompt_ids, 0), sampling, random)
            answer.prefill_seconds = time.perf_counter() - start
            while token not in stops:
                answer.token_ids.append(token)
                last = len(answer.token_ids) == limit
                yield from self._give(answer, stream, token)
                if last:
                    answer.finish_reason = limit_reason
                    break
                start = time.perf_counter()
                position = len(answer.prompt_ids) + len(answer.token_ids) - 1
                token = sample(self._step(row, [token], position), sampling, random)
                answer.decode_seconds += time.perf_counter() - start
                answer.decode_steps += 1
            else:
                answer.finish_reason = "stop"
            rest = stream.end() if stream else ""
            if rest:
                answer.text += rest
                yield rest
        finally:
            if answer.finish_reason is None:
                answer.finish_reason = "closed"
            self.pool.free_row(row)

    @staticmethod
    def _give(answer: Generation, stream: TextStream | None, token: int) -> Iterator[str]:
        if stream is None:
            yield ""
            return
        piece = stream.put(token)
        if piece:
            answer.text += piece
            yield piece

    @torch.no_grad()
    def _step(self, row: int, ids: list[int], position: int) -> torch.Tensor:
        """Appends ``ids`` at ``position`` of a row; returns the logits after the last."""
        fwd = "prefill" if position == 0 else "decode"
        cache = self.pool.bind_tasks(
            [row], [position + len(ids)], self.workspace, start_pos=0 if fwd == "prefill" else None
        )
        logits = self.model.decoder(
            self.workspace.fill_input_ids(ids),
            positions=self.workspace.fill("position_ids", range(position, position + len(ids))),
            kv_cache=cache,
            fwd=fwd,
            select=torch.tensor([len(ids) - 1], device=self.pool.k_buffer.device),
        )
        return logits[0]

    def _tokenizer(self, method: str):
        if self.model.tokenizer is None:
            raise ValueError(
                f"Engine.{method}: the model must have a tokenizer, got none; pass token ids to "
                "generate"
            )
        return self.model.tokenizer
