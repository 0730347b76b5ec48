"""The tiny model with a tokenizer, and what it says without a cache, for the engine tests."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers

from astrai.inference import Engine
from astrai.inference.sampling import Likeliest, likeliest
from astrai.model import ChatTemplate, LoadedModel, Tokenizer
from tests.python.model import tiny

PROMPT = [5, 17, 80, 2]
STOP = 96


def byte_tokenizer() -> Tokenizer:
    """97 tokens: bytes that make two- and three-byte characters likely, and a stop token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    chosen = [pre_tokenizers.ByteLevel(False, False).pre_tokenize_str(c)[0][0] for c in "ab é€\n"]
    first = list(dict.fromkeys("".join(chosen)))
    tokens = first + [c for c in alphabet if c not in first][: 96 - len(first)]
    vocab = {token: i for i, token in enumerate(tokens)} | {"<stop>": 96}
    rust = RustTokenizer(models.BPE(vocab=vocab, merges=[]))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens(["<stop>"])
    return Tokenizer(rust, special_tokens={"eos_token": "<stop>"})


@torch.no_grad()
def greedy(model, prompt: list[int], steps: int) -> list[int]:
    """The same without any cache: the whole text again for each token."""
    text = list(prompt)
    for _ in range(steps):
        text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
    return text[len(prompt) :]


def speaking_model() -> LoadedModel:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    return LoadedModel(tiny.decoder(), byte_tokenizer(), template)


def poisoned(engine: Engine) -> Engine:
    """The engine with NaN in all its pages: what was never written must never be read."""
    engine.pool.k_buffer.fill_(float("nan"))
    engine.pool.v_buffer.fill_(float("nan"))
    return engine


def say(engine: Engine, *plans: list[int]) -> Engine:
    """Makes an engine's requests, in the order of arrival, say these tokens, whatever is asked."""
    rest: dict[int, list[int]] = {}

    def logits_of(requests, newest=None) -> Likeliest:
        logits = torch.zeros(len(requests), 97)
        for row, request in enumerate(requests):
            plan = rest.setdefault(request.number, list(plans[request.number]))
            logits[row, plan.pop(0)] = 1.0
        return likeliest(logits)

    engine._runner.decode = logits_of
    engine._runner.prefill = lambda chunks: logits_of([c.request for c in chunks if c.last])
    return engine


def is_clean(engine: Engine) -> bool:
    """Whether no request holds anything of the pool."""
    pages = engine.pool.pages
    return (
        engine.pool.free_rows == engine.pool.max_batch_size
        and pages.available == pages.n_pages
        and all(pages.holders(page) == 0 for page in range(pages.n_pages))
    )
