"""Generation of text: many requests at a time, in steps, each streamed to its reader."""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
import time
from collections.abc import Iterable, Mapping, Sequence

import torch

from astrai.extension import (
    attn_paged_decode_workspace_size,
    attn_paged_prefill_workspace_size,
    is_available,
)
from astrai.inference.cache import TaskCacheManager
from astrai.inference.graphs import CudaGraphContext
from astrai.inference.pool import PagePool
from astrai.inference.request import Generation, Request
from astrai.inference.runner import ModelRunner
from astrai.inference.sampling import Choice, Likeliest, Sample, SamplingParams, choose
from astrai.inference.scheduler import Plan, Scheduler
from astrai.inference.workspace import InferenceWorkspace
from astrai.model import LoadedModel, ModelConfig


def _integer(value: object, what: str) -> int:
    """An integer of any kind (numpy's, a 0-d tensor's), but nothing that would be rounded."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{what} must be of integers, got {value!r}") from None


@dataclasses.dataclass
class EngineStats:
    """What an engine has done so far.

    Attributes:
        steps: Steps with work.
        prefill_tokens: Tokens of prompts computed (also those computed anew after a preemption).
        prefill_seconds: Time of the steps that computed any.
        decode_tokens: Tokens chosen in the other steps, so that decode_tokens / decode_seconds is
            the decode speed.
        decode_seconds: Time of those.
        generated_tokens: Tokens chosen in all steps.
        cached_tokens: Tokens of prompts that were in the pool already.
        preemptions: How often a request gave its pages up to an older one.
    """

    steps: int = 0
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    generated_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0


@dataclasses.dataclass
class _Flight:
    """A step that the device is at work on.

    Attributes:
        plan: What it computes.
        chosen: The requests that get a token.
        choice: The tokens, or None if there are none.
    """

    plan: Plan
    chosen: list[Request]
    choice: Choice | None


def _attention_bytes(config: ModelConfig, device: torch.device, batch: int, max_q_len: int) -> int:
    """Bytes that attention kernels may need for partial results; 0 where none will run."""
    kernels = ("attn_paged_decode", "attn_paged_prefill")
    if device.type != "cuda" or not all(map(is_available, kernels)):
        return 0
    heads = (config.num_heads, config.num_kv_heads, config.head_dim)
    try:
        return max(
            attn_paged_decode_workspace_size(batch, *heads, device=device),
            attn_paged_prefill_workspace_size(batch, max_q_len, *heads, device=device),
        )
    except (ValueError, RuntimeError):  # heads, or a device, that the kernels do not take
        return 0


class Engine:
    """Answers prompts with a model.

    Requests share the model's steps (continuous batching) and a paged KV cache; see ``Scheduler``.
    An engine belongs to one thread.

    Args:
        model: Decoder and tokenizer, as ``astrai.model.load`` gives them.
        max_seq_len: Tokens of prompt and answer together that a request may have; None means the
            model's whole context.
        max_batch_size: Requests that run at a time; more wait.
        n_tokens: Tokens that the cache holds, of all requests together; None means max_seq_len: one
            request of full length, or many short ones.
        page_size: Tokens of a page of the cache: a power of two up to 256.
        max_batch_tokens: Tokens that one step computes at most; longer prompts take several steps.
        prefix_cache: Whether full pages are kept and reused by prompts that begin alike.
        cache_dtype: Type of the cache; None means the model's. ``torch.float8_e4m3fn`` halves a
            16-bit one.
        k_scale: Dequantisation step of the keys of a float8 cache; None there means 1.
        v_scale: Likewise for values.
        cuda_graphs: Whether decode steps on a GPU are captured and replayed.
        run_ahead: Whether a decode step is started before the last one's tokens have been read, so
            that the device never waits for the host; of requests that turn out to have ended, its
            tokens are dropped. None: on a GPU.

    Attributes:
        pool: Owner of K and V.
        workspace: Index buffers of the model calls.
        stats: What was done so far.

    Raises:
        ValueError: ``max_seq_len`` is more than the model's context, or another number is out of
            range.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        max_seq_len: int | None = None,
        max_batch_size: int = 16,
        n_tokens: int | None = None,
        page_size: int = 16,
        max_batch_tokens: int = 2048,
        prefix_cache: bool = True,
        cache_dtype: torch.dtype | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        cuda_graphs: bool = True,
        run_ahead: bool | None = None,
    ) -> None:
        config = model.decoder.config
        if max_seq_len is None:
            max_seq_len = config.max_position
        if not 1 <= max_seq_len <= config.max_position:
            raise ValueError(
                f"Engine: max_seq_len must be 1 to {config.max_position} (the model's context), "
                f"got {max_seq_len}"
            )
        if max_batch_tokens < max_batch_size:
            raise ValueError(
                f"Engine: max_batch_tokens must be at least max_batch_size {max_batch_size}, got "
                f"{max_batch_tokens}"
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
            dtype if cache_dtype is None else cache_dtype,
            page_size,
            max_seq_len if n_tokens is None else n_tokens,
            prefix_cache=prefix_cache,
            k_scale=k_scale,
            v_scale=v_scale,
        )
        self.workspace = InferenceWorkspace(
            max_batch_size,
            max_seq_len,
            config.num_heads,
            config.head_dim,
            device,
            dtype,
            max_tokens=max_batch_tokens,
            page_size=page_size,
            attention_bytes=_attention_bytes(
                config, device, max_batch_size, min(max_seq_len, max_batch_tokens)
            ),
        )
        self.stats = EngineStats()
        self._tasks = TaskCacheManager(self.pool)
        self._scheduler = Scheduler(self._tasks, max_batch_tokens)
        graphs = CudaGraphContext(cuda_graphs) if device.type == "cuda" else None
        self._runner = ModelRunner(model.decoder, self._tasks, self.workspace, graphs)
        self._run_ahead = device.type == "cuda" if run_ahead is None else run_ahead
        self._flight: _Flight | None = None
        self._numbers = itertools.count()
        self._stepping = False
        self._given_up: list[Request] = []

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
        stop: str | Sequence[str] = (),
    ) -> Generation:
        """Continues a prompt.

        All arguments are checked at once; the request joins the others as the result is first
        iterated over (``submit``: at once).

        Args:
            prompt: Text, or token ids.
            sampling: How tokens are chosen; None is greedy.
            max_tokens: Most tokens to make; None means until the context is full.
            stop_ids: Tokens that end the answer (themselves not part of it); None means the model's
                own.
            stop: Text that ends the answer, or several of them; itself not part of it.

        Returns:
            The answer, to iterate over: pieces of text, none of which splits a character. Without a
            tokenizer the pieces are empty, one per token; read ``token_ids``. Logits that are not
            finite raise ValueError there, for this request alone.

        Raises:
            TypeError: A token id or ``max_tokens`` is no integer.
            ValueError: The prompt is empty, holds an unknown token, or does not fit the context or
                the cache together with ``max_tokens``.
        """
        return Generation(
            self, self._request("generate", prompt, sampling, max_tokens, stop_ids, stop)
        )

    def submit(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        stop_ids: Sequence[int] | None = None,
        stop: str | Sequence[str] = (),
    ) -> Generation:
        """As ``generate``, but the request takes part in all steps from now on.

        Keep the result: a request ends when its Generation is dropped.
        """
        request = self._request("submit", prompt, sampling, max_tokens, stop_ids, stop)
        self._enqueue(request)
        return Generation(self, request)

    def generate_batch(
        self,
        prompts: Iterable[str | Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        max_tokens: int | None = None,
        stop_ids: Sequence[int] | None = None,
        stop: str | Sequence[str] = (),
    ) -> list[Generation]:
        """Continues several prompts together, to the end.

        Args:
            prompts: The prompts.
            sampling: For all prompts, or one for each.
            max_tokens: As ``generate``.
            stop_ids: As ``generate``.
            stop: As ``generate``.

        Returns:
            The finished answers, in the order of the prompts. One whose logits were not finite has
            the finish_reason "error".

        Raises:
            TypeError, ValueError: As ``generate``, before anything is computed.
        """
        where, prompts = "generate_batch", list(prompts)
        if sampling is None or isinstance(sampling, SamplingParams):
            sampling = [sampling] * len(prompts)
        if len(sampling) != len(prompts):
            raise ValueError(
                f"Engine.{where}: sampling must be one for all or one for each of the "
                f"{len(prompts)} prompts, got {len(sampling)}"
            )
        answers = [
            Generation(self, self._request(where, prompt, choice, max_tokens, stop_ids, stop))
            for prompt, choice in zip(prompts, sampling, strict=True)
        ]
        for answer in answers:
            self._enqueue(answer._request)
        while any(answer.finish_reason is None for answer in answers):
            self.step()
        for answer in answers:
            if answer.finish_reason != "error":
                answer.read()
        return answers

    def step(self) -> bool:
        """Gets the tokens of one run of the model, for the requests whose turn it is.

        Returns:
            Whether any request is still under way.
        """
        start = time.perf_counter()
        self._stepping = True
        try:
            flight = self._flight
            if flight is None or all(request.finish_reason for request in flight.chosen):
                flight = self._flight = self._launch(self._scheduler.schedule())
            if flight is not None:
                self._flight = self._launch_next(flight)
                self._land(flight, start)
        finally:
            self._stepping = False
            while self._given_up:
                self._scheduler.remove(self._given_up.pop())
        return bool(self._scheduler.running or self._scheduler.waiting)

    def _launch(self, plan: Plan, last: _Flight | None = None) -> _Flight | None:
        """Starts to compute a plan, if there is work in it.

        Args:
            plan: The plan.
            last: The step under way, whose tokens the plan's requests are to go on from.
        """
        chosen, parts = list(plan.decode), []
        if plan.decode:
            newest = None
            if last is not None:
                row_of = {request: row for row, request in enumerate(last.chosen)}
                newest = (last.choice.tokens, [row_of[request] for request in plan.decode])
            parts.append(self._runner.decode(plan.decode, newest))
        if plan.prefill:
            parts.append(self._runner.prefill(plan.prefill))
            chosen += [chunk.request for chunk in plan.prefill if chunk.last]
        if not parts:
            return None
        if not chosen:
            return _Flight(plan, [], None)
        rows = parts[0]
        if len(parts) > 1:
            rows = Likeliest(*map(torch.cat, zip(*parts, strict=True)))
        choice = choose(
            rows,
            [request.sampling for request in chosen],
            [request.next_uniform() for request in chosen],
        )
        for request in chosen:
            request.in_flight += 1
        return _Flight(plan, chosen, choice)

    def _launch_next(self, flight: _Flight) -> _Flight | None:
        """Starts the step after the one under way, if that can be done without its tokens."""
        if not self._run_ahead or flight.choice is None:
            return None
        return self._launch(Plan(self._scheduler.ahead(flight.chosen), []), flight)

    def _land(self, flight: _Flight, start: float) -> None:
        """Waits for a step's tokens, and gives them to those requests that are still under way."""
        samples = [] if flight.choice is None else flight.choice.read()
        wanted = sum(request.finish_reason is None for request in flight.chosen)
        self._book(flight.plan, wanted, time.perf_counter() - start)
        for chunk in flight.plan.prefill:
            chunk.request.computed = chunk.end
        for request in flight.chosen:
            request.in_flight -= 1
        for request, result in zip(flight.chosen, samples, strict=True):
            if request.finish_reason is None:
                self._accept(request, result)

    def _accept(self, request: Request, result: Sample) -> None:
        request.computed = len(request.tokens)
        if math.isfinite(result.top):
            request.accept(result)
            # Only now: K and V that lead to finite logits are fit to be shared.
            self._tasks.task_record_hashes(request, request.tokens, request.computed)
        else:
            request.finish_reason = "error"
            request.error = ValueError(
                f"sample: logits must be finite, got a largest logit of {result.top}"
            )
        if request.finish_reason is not None:
            self._scheduler.remove(request)

    def _book(self, plan: Plan, tokens: int, seconds: float) -> None:
        stats = self.stats
        stats.steps += 1
        stats.generated_tokens += tokens
        stats.cached_tokens = self._scheduler.cached_tokens
        stats.preemptions = self._scheduler.preemptions
        if plan.prefill:
            stats.prefill_tokens += sum(chunk.end - chunk.start for chunk in plan.prefill)
            stats.prefill_seconds += seconds
        else:
            stats.decode_tokens += tokens
            stats.decode_seconds += seconds
        for request in (*plan.decode, *(chunk.request for chunk in plan.prefill)):
            if request.finish_reason is None:
                request.spend(seconds)

    def _enqueue(self, request: Request) -> None:
        """Gives a request to the scheduler, once."""
        if request.number is None and request.finish_reason is None:
            request.number = next(self._numbers)
            self._scheduler.add(request)

    def _cancel(self, request: Request) -> None:
        if request.finish_reason is None:
            request.finish_reason = "closed"
            if self._stepping:  # the garbage collector came upon its Generation
                self._given_up.append(request)
            else:
                self._scheduler.remove(request)

    def _request(
        self,
        method: str,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None,
        max_tokens: int | None,
        stop_ids: Sequence[int] | None,
        stop: str | Sequence[str],
    ) -> Request:
        """Checks a request's arguments."""
        where = f"Engine.{method}"
        config = self.model.decoder.config
        ids = (
            self._tokenizer(method).encode(prompt)
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
        if max_tokens is not None:
            max_tokens = _integer(max_tokens, f"{where}: max_tokens")
            if max_tokens < 1:
                raise ValueError(f"{where}: max_tokens must be at least 1, got {max_tokens}")
        # The last token made needs no cache slot: nothing is computed after it.
        capacity = self.pool.capacity
        room = capacity - len(ids) + 1
        if room < 1 or (max_tokens is not None and max_tokens > room):
            what = "context" if capacity == self.max_seq_len else "KV cache"
            wanted = "" if max_tokens is None else f" and max_tokens {max_tokens}"
            raise ValueError(
                f"{where}: prompt and max_tokens must fit the {what} of {capacity} tokens, got a "
                f"prompt of {len(ids)} tokens{wanted}; shorten the prompt or make fewer tokens"
            )
        stops = [stop] if isinstance(stop, str) else list(stop)
        if not all(isinstance(text, str) and text for text in stops):
            raise ValueError(f"{where}: stop must be strings that are not empty, got {stop!r}")
        tokenizer = self._tokenizer(method) if stops else self.model.tokenizer
        limit, reason = (room, "context") if max_tokens is None else (max_tokens, "length")
        return Request(
            ids,
            sampling or SamplingParams(),
            limit=limit,
            limit_reason=reason,
            stop_ids=frozenset(
                config.eos_token_ids
                if stop_ids is None
                else (_integer(t, f"{where}: stop_ids") for t in stop_ids)
            ),
            stop_strings=stops,
            stream=None if tokenizer is None else tokenizer.stream(),
        )

    def _tokenizer(self, method: str):
        if self.model.tokenizer is None:
            raise ValueError(
                f"Engine.{method}: the model must have a tokenizer, got none; pass token ids and "
                "no stop strings"
            )
        return self.model.tokenizer
