"""Asks a GGUF model one question through the installed astrai package and streams the answer.

Started by demo.py in the environment where the wheel is installed; knows nothing of Bazel.
"""

from __future__ import annotations

import sys
import time

import torch
from absl import app, flags

from astrai.extension import explain, resolve
from astrai.inference import Engine, SamplingParams
from astrai.model import load

_MODEL = flags.DEFINE_string("model", None, "The .gguf file.", required=True)
_PROMPT = flags.DEFINE_string("prompt", None, "What the model is asked.", required=True)
_SYSTEM = flags.DEFINE_string("system", None, "System message.")
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0: the likeliest token.", 0.0)
_TOP_P = flags.DEFINE_float("top_p", 1.0, "Nucleus of the draw.")
_TOP_K = flags.DEFINE_integer("top_k", 0, "Number of tokens drawn from; 0: all.", 0)
_SEED = flags.DEFINE_integer("seed", None, "Start of the random numbers.")
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 200, "Most tokens of the answer.", 1)
_DEVICE = flags.DEFINE_string("device", "auto", "auto, cpu, cuda or cuda:N.")
_DTYPE = flags.DEFINE_enum("dtype", "auto", ["auto", "fp32", "bf16", "fp16"], "Activations.")
_THREADS = flags.DEFINE_integer("threads", None, "CPU threads.", 1)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def choose_device(wanted: str) -> tuple[torch.device, str]:
    """The device, and why it is that one. Raises ValueError for one that is not there."""
    if torch.version.cuda is None:
        problem = f"torch {torch.__version__} is built without CUDA"
    elif not torch.cuda.is_available():
        problem = "torch finds no usable GPU"
    else:
        problem = ""
    if wanted == "auto":
        return torch.device("cpu" if problem else "cuda"), problem or "a GPU is there"
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise ValueError(f"--device must be auto, cpu, cuda or cuda:N, got {wanted}") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device must be auto, cpu, cuda or cuda:N, got {wanted}")
    if device.type == "cuda":
        if problem:
            raise ValueError(f"--device={wanted} cannot be had: {problem}")
        if (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"--device={wanted} is not there: {torch.cuda.device_count()} GPU(s)")
    return device, "asked for"


def describe_backends(engine: Engine) -> list[str]:
    """Which implementation each op of a decode step takes, and why none before it is used."""
    decoder, config = engine.model.decoder, engine.model.decoder.config
    row = engine.pool.alloc_row()
    try:
        cache = engine.pool.bind_tasks([row], [1], engine.workspace)
        with torch.no_grad():
            q, k = (
                torch.zeros(1, heads, config.head_dim, dtype=decoder.dtype, device=decoder.device)
                for heads in (config.num_heads, config.num_kv_heads)
            )
            angles = torch.zeros(1, config.head_dim // 2, 2, device=decoder.device)
            calls = {
                "attention": ((q, k, k), {"kv_cache": cache, "fwd": "decode", "is_causal": True}),
                "rotary": ((q, angles), {}),
            }
            lines = []
            for family, (args, options) in calls.items():
                name = resolve(family, *args, **options).record.name
                lines.append(f"{family}: {name}")
                for line in explain(family, *args, **options).splitlines():
                    if line.startswith(f"{name}:"):
                        break  # what stands after the chosen one was not needed
                    if ": SKIP" in line or ": reject" in line:
                        lines.append(f"    {line}")
    finally:
        engine.pool.free_row(row)
    return lines


def progress(done: int, total: int) -> None:
    """Shows how far loading is: in place on a terminal, else in quarters."""
    if sys.stdout.isatty():
        print(f"\r      weights {done}/{total}", end="\n" if done == total else "", flush=True)
    elif done * 4 // total != (done - 1) * 4 // total:
        print(f"      weights {done}/{total}", flush=True)


def main(argv: list[str]) -> int:
    """Answers; returns the exit code."""
    del argv
    try:
        device, why = choose_device(_DEVICE.value)
        sampling = SamplingParams(_TEMPERATURE.value, _TOP_K.value, _TOP_P.value, _SEED.value)
        name = (
            _DTYPE.value if _DTYPE.value != "auto" else "bf16" if device.type == "cuda" else "fp32"
        )
        if _THREADS.value:
            torch.set_num_threads(_THREADS.value)
        start = time.perf_counter()
        model = load(_MODEL.value, dtype=DTYPES[name], device=device, progress=progress)
        engine = Engine(model, max_seq_len=min(2048, model.decoder.config.max_position))
        print(f"      loaded in {time.perf_counter() - start:.1f} s", flush=True)
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        print(f"      answers on: {where}, {name} ({why})")
        for line in describe_backends(engine):
            print(f"      {line}")
        messages = [{"role": "user", "content": _PROMPT.value}]
        if _SYSTEM.value:
            messages.insert(0, {"role": "system", "content": _SYSTEM.value})
        print(f"\n> {_PROMPT.value}\n", flush=True)
        answer = engine.chat(messages, sampling, max_tokens=_MAX_TOKENS.value)
        for piece in answer:
            print(piece, end="", flush=True)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"chat: {error}", file=sys.stderr)
        return 1
    print("\n")
    if answer.finish_reason == "length":
        print(f"(cut off after --max_tokens={_MAX_TOKENS.value})")
    speed = f", {answer.tokens_per_second:.1f} tokens/s" if answer.tokens_per_second else ""
    print(
        f"{len(answer.prompt_ids)} prompt tokens in {answer.prefill_seconds:.2f} s, "
        f"{len(answer.token_ids)} tokens answered{speed}"
    )
    return 0


if __name__ == "__main__":
    app.run(main)
