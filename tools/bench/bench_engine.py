"""The engine's tokens per second against transformers' generate with SDPA and a static cache.

    python -m tools.bench.bench_engine --quick --json engine.jsonl

Both answer the same prompts of random tokens greedily, with the same weights, in turns (A B B A).
Three rows for each shape: "generate", the whole call (tokens per second are batch * new_tokens over
it); "decode_step", the median step in which all requests decode; and "kernels", what the kernels of
such a step take, against the step. The peer "transformers" compiles its decode step, as it does by
itself with a static cache; "transformers_eager" is told not to. Compiling takes most of a minute:
only the shapes of COMPILED have that peer, unless --peer asks for it.

All shapes take about 100 s on an H200; shapes that would begin later than --seconds are left out.
"""

from __future__ import annotations

import functools
import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from absl import flags

from tools.bench import engine_models, harness
from tools.bench.results import BANDWIDTH_TBPS, Row

_PEERS = flags.DEFINE_multi_enum(
    "peer",
    None,
    ["transformers", "transformers_eager"],
    "What to measure against; may be given several times. Without it, what compiles in time.",
)
_MODELS = flags.DEFINE_multi_enum(
    "model",
    None,
    sorted(engine_models.MODELS),
    "Measures the table's rows of this model alone; may be given several times.",
)
_BATCHES = flags.DEFINE_multi_integer(
    "batch", None, "Measures the table's rows of this batch alone; may be given several times."
)
_TURNS = flags.DEFINE_integer("turns", 2, "How often each generates; even.", 2)

DEFAULTS: dict[str, Any] = {
    "model": "Llama-3-8B",
    "batch": 1,
    "prompt": 1024,
    "new_tokens": 128,
}
# The goal's shape first: if the time runs out, the others are missing.
TABLE = [
    {"model": model, "batch": batch}
    for model in ("Llama-3-8B", engine_models.DEMO)
    for batch in (1, 8, 64)
]
QUICK = [shape for shape in TABLE if shape["batch"] == 1]
COMPILED = [TABLE[0]]
PAGE_SIZE = 16
_SECONDS = 85.0
_PREFILL_TOKENS = 8192
# Each side's first answer is this long: a graph is captured in the second decode step of ours, in
# the third of a compiled model.
_WARM_TOKENS = 6
_WARM_STEPS = 4
_PROFILED_STEPS = 16
_TOP_KERNELS = 12


@dataclass
class Run:
    """One generate: its answers, and how long it and its decode steps took.

    Attributes:
        tokens: New tokens of each request.
        seconds: Time of the whole call.
        steps: Seconds of each step in which all requests decoded, and nothing else was done.
    """

    tokens: list[list[int]]
    seconds: float
    steps: list[float]


@dataclass
class Runs:
    """Several runs of one candidate."""

    runs: list[Run] = field(default_factory=list)

    def seconds(self) -> float:
        """Returns the median of the whole calls."""
        return statistics.median(run.seconds for run in self.runs)

    def step_seconds(self) -> float:
        """Returns the median of all decode steps; NaN if there was none."""
        steps = [step for run in self.runs for step in run.steps]
        return statistics.median(steps) if steps else float("nan")


def make_engine(model: Any, shape: dict[str, Any]) -> Any:
    """Returns an engine whose cache holds all requests to their end."""
    from astrai.inference import Engine

    length = shape["prompt"] + shape["new_tokens"]
    pages = -(-length // PAGE_SIZE) + 1
    return Engine(
        model,
        max_seq_len=length,
        max_batch_size=shape["batch"],
        n_tokens=shape["batch"] * pages * PAGE_SIZE,
        page_size=PAGE_SIZE,
        max_batch_tokens=max(_PREFILL_TOKENS, shape["batch"]),
        prefix_cache=False,  # the same prompts come again and again
    )


def run_engine(engine: Any, prompts: Sequence[Sequence[int]], new_tokens: int) -> Run:
    """Answers the prompts with our engine; a step ends when its tokens are on the host."""
    start = time.perf_counter()
    answers = [engine.submit(p, max_tokens=new_tokens, stop_ids=()) for p in prompts]
    steps, busy = [], True
    while busy:
        begin, before = time.perf_counter(), engine.stats.decode_tokens
        busy = engine.step()
        if engine.stats.decode_tokens - before == len(prompts):
            steps.append(time.perf_counter() - begin)
    seconds = time.perf_counter() - start
    return Run([list(answer.token_ids) for answer in answers], seconds, steps)


def run_transformers(
    model: Any,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    compiled: bool,
    most_tokens: int,
) -> Run:
    """Answers the prompts with transformers; it looks at every token before the next step.

    The cache is made for ``most_tokens`` new tokens, so that all calls take the same compiled step.
    """
    import torch

    ids = torch.tensor(prompts, device=model.device)
    times: list[float] = []

    def note_time(input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    _synchronize()
    start = time.perf_counter()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        cache_implementation="static",
        max_cache_len=ids.shape[1] + most_tokens,
        disable_compile=not compiled,
        stopping_criteria=[note_time],
    )
    tokens = out[:, ids.shape[1] :].tolist()
    seconds = time.perf_counter() - start
    return Run(tokens, seconds, [b - a for a, b in itertools.pairwise(times)])


def _synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def take_turns(
    candidates: dict[str, Callable[[int], Run]], new_tokens: int, turns: int
) -> dict[str, Runs]:
    """Runs the candidates in the order A B B A, after a short run of each that does not count.

    A peer that fails is left out with a line; the first candidate, ours, must run.

    Args:
      candidates: by name, what makes so many tokens.
      new_tokens: to make in each run that counts.
      turns: runs of each candidate.
    """
    ours, alive = next(iter(candidates)), {}
    for name, run in candidates.items():
        try:
            run(min(new_tokens, _WARM_TOKENS))
        except Exception as error:  # a peer brings its compiler along
            if name == ours:
                raise
            harness.note_peer_failure(name, error)
        else:
            alive[name] = Runs()
    names = list(alive)
    for _ in range(turns // 2):
        for index in harness.mirrored_order(len(names)):
            alive[names[index]].runs.append(candidates[names[index]](new_tokens))
    return alive


@dataclass
class FirstTokens:
    """How the first new tokens of two models compare, in numbers of requests.

    Attributes:
        equal: Both chose the same token.
        tied: The other model gives our token a logit at most two units in the last place of bf16
            below that of its own choice.
        different: Everything else.
    """

    equal: int = 0
    tied: int = 0
    different: int = 0


def compare_first_tokens(
    mine: Run,
    others: Run,
    prompts: Sequence[Sequence[int]],
    logits_of: Callable[[Sequence[int]], Any],
) -> FirstTokens:
    """Compares the first new tokens.

    Args:
      mine: our answers.
      others: the other model's.
      prompts: of both.
      logits_of: the other model's logits ``[vocab]`` after a prompt; called where tokens differ.
    """
    found = FirstTokens()
    for prompt, my_tokens, other_tokens in zip(prompts, mine.tokens, others.tokens, strict=True):
        if my_tokens[0] == other_tokens[0]:
            found.equal += 1
            continue
        logits = logits_of(prompt).float()
        top = float(logits.max())
        ulp = 2.0 ** (math.frexp(top)[1] - 8)  # of a bf16 number: 8 significant bits
        if top - float(logits[my_tokens[0]]) <= 2 * ulp:
            found.tied += 1
        else:
            found.different += 1
    return found


def transformers_logits(model: Any, prompt: Sequence[int]) -> Any:
    """Returns transformers' logits after a prompt, ``[vocab]``."""
    import torch

    with torch.no_grad():
        return model(torch.tensor([prompt], device=model.device)).logits[0, -1]


def profile_steps(
    engine: Any, prompts: Sequence[Sequence[int]], new_tokens: int
) -> dict[str, KernelTime]:
    """Returns what each kernel takes of a step in which all requests decode."""
    from torch.profiler import ProfilerActivity, profile

    answers = [engine.submit(p, max_tokens=new_tokens, stop_ids=()) for p in prompts]
    whole_steps = 0
    while whole_steps < _WARM_STEPS:
        before = engine.stats.decode_tokens
        engine.step()
        whole_steps += engine.stats.decode_tokens - before == len(prompts)
        if any(answer.finish_reason for answer in answers):
            return {}
    steps = min(_PROFILED_STEPS, new_tokens - max(len(answer.token_ids) for answer in answers))
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            engine.step()
        _synchronize()
    for answer in answers:
        answer.close()
    return {
        event.key: KernelTime(event.self_device_time_total / steps, event.count / steps)
        for event in profiler.key_averages()
        if event.self_device_time_total > 0
    }


@dataclass
class KernelTime:
    """A kernel's part in a decode step.

    Attributes:
        us: Microseconds that it runs.
        launches: How often.
    """

    us: float
    launches: float


@functools.lru_cache(maxsize=1)
def _models(name: str) -> tuple[Any, Any]:
    """Ours and transformers' model, or None in its place where it cannot be made."""
    model = engine_models.ours(name, harness.DEVICE)
    try:
        return model, engine_models.theirs(model.decoder)
    except Exception as error:  # not installed, or of another age
        harness.note_peer_failure("transformers", error)
        return model, None


def random_prompts(shape: dict[str, Any]) -> list[list[int]]:
    """Returns prompts of random tokens."""
    import torch

    size = (shape["batch"], shape["prompt"])
    return torch.randint(engine_models.MODELS[shape["model"]]["vocab_size"], size).tolist()


def measure_shape(shape: dict[str, Any]) -> Iterator[Row]:
    """Yields the rows of one model and batch."""
    gc.collect()  # the last shape's caches
    model, peer = _models(shape["model"])
    prompts, new_tokens = random_prompts(shape), shape["new_tokens"]
    engine = make_engine(model, shape)
    candidates = {"astrai": functools.partial(run_engine, engine, prompts)}
    for name in peers_of(shape) if peer is not None else ():
        candidates[name] = functools.partial(
            run_transformers,
            peer,
            prompts,
            compiled=name == "transformers",
            most_tokens=new_tokens,
        )
    found = take_turns(candidates, new_tokens, _TURNS.value)
    mine = found["astrai"]
    tokens = shape["batch"] * new_tokens
    for name, runs in found.items():
        print(
            f"{shape['model']} batch {shape['batch']}, {name}: {tokens / runs.seconds():.0f} "
            f"tokens/s, {runs.step_seconds() * 1e3:.3f} ms a decode step",
            flush=True,
        )
        if name != "astrai":
            first = compare_first_tokens(
                mine.runs[-1], runs.runs[-1], prompts, functools.partial(transformers_logits, peer)
            )
            print(
                f"  the first token is that of ours in {first.equal} of {len(prompts)} requests, "
                f"as good as ours in {first.tied}",
                flush=True,
            )
            if first.different:
                harness.note_failure(
                    f"the first token of {name} is another in {first.different} requests"
                )
    for part, us in (
        ("generate", {name: runs.seconds() * 1e6 for name, runs in found.items()}),
        ("decode_step", {name: runs.step_seconds() * 1e6 for name, runs in found.items()}),
    ):
        yield from _rows({**shape, "part": part}, us)
    step_us = mine.step_seconds() * 1e6
    moved = engine_models.engine_work({**shape, "part": "decode_step"}).rate(step_us)
    print(
        f"  a decode step reads weights and keys at {moved:.2f} TB/s, "
        f"{moved / BANDWIDTH_TBPS:.0%} of {BANDWIDTH_TBPS} TB/s",
        flush=True,
    )
    kernels = profile_steps(engine, prompts, new_tokens)
    if kernels:
        for line in kernel_table(kernels, step_us):
            print(line, flush=True)
        us = {"astrai": sum(kernel.us for kernel in kernels.values()), "astrai_step": step_us}
        yield from _rows({**shape, "part": "kernels"}, us)


def peers_of(shape: dict[str, Any]) -> list[str]:
    """Returns the peers that a shape is measured against."""
    if _PEERS.value is not None:
        return _PEERS.value
    compiled = any(shape.items() >= row.items() for row in COMPILED)
    return ["transformers", "transformers_eager"] if compiled else ["transformers_eager"]


def _rows(shape: dict[str, Any], us: dict[str, float]) -> Iterator[Row]:
    us = {name: time_us for name, time_us in us.items() if not math.isnan(time_us)}
    if "astrai" not in us:
        return
    work = engine_models.engine_work(shape)
    yield from harness.rows_of("engine", shape, "bfloat16", shape["part"], work, us)


def kernel_table(kernels: dict[str, KernelTime], step_us: float) -> list[str]:
    """Returns lines: the share of the kernels in a step, and those that take longest."""
    total = sum(kernel.us for kernel in kernels.values())
    launches = sum(kernel.launches for kernel in kernels.values())
    longest = sorted(kernels.items(), key=lambda item: -item[1].us)[:_TOP_KERNELS]
    return [
        f"  {launches:.0f} kernels: {total:.1f} of {step_us:.1f} us of a step "
        f"({total / step_us:.0%})",
        *(
            f"  {k.us:9.2f} us {k.us / total:5.1%} {k.launches:6.1f} x  {name[:100]}"
            for name, k in longest
        ),
    ]


def generate() -> Iterator[Row]:
    """Yields the rows of the shapes that the flags ask for."""
    wanted = (("model", _MODELS.value), ("batch", _BATCHES.value))
    tables = (
        [row for row in table if all(only is None or row[key] in only for key, only in wanted)]
        for table in (TABLE, QUICK)
    )
    shapes = harness.shapes_to_run(*tables, DEFAULTS)
    unknown = sorted({shape["model"] for shape in shapes} - set(engine_models.MODELS))
    if unknown:
        raise ValueError(
            f"--shapes: model must be one of {', '.join(engine_models.MODELS)}, got {unknown[0]}"
        )
    yield from harness.each("engine", shapes, measure_shape)


if __name__ == "__main__":
    flags.FLAGS.set_default("seconds", _SECONDS)
    harness.main(generate)
