"""Host time that the choice of an implementation adds to a call."""

import timeit

import pytest
import torch

from astrai.extension import attn_backend, get_rotary_emb, resolve
from tests.python.backend.attention_cases import make_cache, packed_call

# Some ten times what it takes on an idle machine: what is to be caught is an import, a file access,
# a device query or a parse of the environment in every call, each of which costs more than this.
LIMIT_US = 50


def microseconds(function):
    number = 500
    return min(timeit.repeat(function, number=number, repeat=7)) / number * 1e6


@pytest.mark.parametrize("setting", ["default", "context", "env"])
def test_resolve_costs_microseconds(setting, monkeypatch, record_property):
    q = torch.zeros(1, 1, 8, 64, dtype=torch.bfloat16)
    k = torch.zeros(1, 32, 2, 64, dtype=torch.bfloat16)
    x, freqs = q[0], get_rotary_emb(64, 1)
    cache, keys, values = make_cache([8], [1])
    packed = packed_call(cache, keys, values, [1], 4, 0)

    calls = {
        "attention": lambda: resolve("attention", q, k, k, None, 0, None, True),
        "packed attention": lambda: resolve("attention", *packed, cache, 0, None, True, "decode"),
        "rotary": lambda: resolve("rotary", x, freqs),
    }
    if setting == "env":
        monkeypatch.setenv("ASTR_OPS", "attention=torch_native,rotary=torch")
        monkeypatch.setenv("ASTR_BACKEND", "cuda")

    def measure():
        return {name: microseconds(call) for name, call in calls.items()}

    if setting == "context":
        with attn_backend("torch_native"):
            took = measure()
    else:
        took = measure()
    for name, us in took.items():
        print(f"resolve {name}, {setting}: {us:.2f} us")
        record_property(f"{name} us", round(us, 2))
    assert max(took.values()) < LIMIT_US, took
