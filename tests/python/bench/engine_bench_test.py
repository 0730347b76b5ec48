"""bench_engine on a small model and a CPU: both sides answer alike, and the work is counted."""

import dataclasses
import functools
import math
import types

import pytest
from absl import flags

from tools.bench import bench_engine, engine_models, harness
from tools.bench.bench_engine import KernelTime

torch = pytest.importorskip("torch")

TINY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "max_position": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
KERNELS = {"gemm": KernelTime(3.0, 7.0), "other": KernelTime(1.0, 1.0)}
SHAPE = {"model": "tiny", "batch": 3, "prompt": 20, "new_tokens": 6}


@pytest.fixture(autouse=True)
def parsed_flags():
    flags.FLAGS(["test"])
    yield
    flags.FLAGS.unparse_flags()


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(engine_models.MODELS, "tiny", TINY)
    torch.manual_seed(torch.seed() % 2**31)
    model = engine_models.ours("tiny", "cpu")
    with torch.no_grad():  # large enough that bf16 does not make ties
        for weight in model.decoder.parameters():
            if weight.dim() == 2:
                weight.normal_(std=0.3)
    return dataclasses.replace(model, decoder=model.decoder.float())


def test_both_sides_give_the_same_tokens(tiny):
    pytest.importorskip("transformers")
    prompts = bench_engine.random_prompts(SHAPE)
    engine = bench_engine.make_engine(tiny, SHAPE)
    mine = bench_engine.run_engine(engine, prompts, SHAPE["new_tokens"])
    peer = engine_models.theirs(tiny.decoder)
    theirs = bench_engine.run_transformers(
        peer, prompts, SHAPE["new_tokens"], compiled=False, most_tokens=20
    )
    assert [len(tokens) for tokens in mine.tokens] == [6, 6, 6]
    assert mine.tokens == theirs.tokens
    logits_of = functools.partial(bench_engine.transformers_logits, peer)
    first = bench_engine.compare_first_tokens(mine, theirs, prompts, logits_of)
    assert first == bench_engine.FirstTokens(equal=3)
    assert [int(logits_of(p).argmax()) for p in prompts] == [t[0] for t in theirs.tokens]
    # The prompts are one step; the rest of the tokens one each.
    assert len(mine.steps) == len(theirs.steps) == 5
    assert 0 < sum(mine.steps) < mine.seconds


def test_first_tokens_are_compared_by_their_logits():
    logits = torch.tensor([0.0, 5.0, 4.9375, 4.9])  # units of 1 / 32 in bf16
    runs = [bench_engine.Run([[token]] * 1, 1.0, []) for token in (1, 2, 3)]
    peer = bench_engine.Run([[1]], 1.0, [])
    found = [bench_engine.compare_first_tokens(r, peer, [[7]], lambda _: logits) for r in runs]
    assert found == [
        bench_engine.FirstTokens(equal=1),
        bench_engine.FirstTokens(tied=1),
        bench_engine.FirstTokens(different=1),
    ]


def test_the_peer_shares_all_but_q_and_k(tiny):
    pytest.importorskip("transformers")
    peer = engine_models.theirs(tiny.decoder)
    ours = {weight.data_ptr() for weight in tiny.decoder.weights().values()}
    own = [name for name, w in peer.named_parameters() if w.data_ptr() not in ours]
    assert len(own) == 2 * TINY["num_layers"]
    assert all(".q_proj." in name or ".k_proj." in name for name in own)


def test_parameters_are_those_of_the_decoder(tiny):
    matrices = sum(w.numel() for w in tiny.decoder.parameters() if w.dim() == 2)
    assert engine_models.matrix_parameters(TINY) == matrices  # the head is the embedding table


def test_llama_3_8b_has_its_size():
    parameters = engine_models.matrix_parameters(engine_models.MODELS["Llama-3-8B"])
    assert parameters == pytest.approx(8.03e9 - 128256 * 4096, rel=1e-3)
    assert engine_models.kv_bytes_per_token(engine_models.MODELS["Llama-3-8B"]) == 128 << 10


def test_a_decode_step_reads_weights_and_keys():
    shape = {"model": "Llama-3-8B", "batch": 8, "prompt": 1024, "new_tokens": 128}
    step = engine_models.engine_work({**shape, "part": "decode_step"})
    weights = 2 * engine_models.matrix_parameters(engine_models.MODELS["Llama-3-8B"])
    assert step.num_bytes == weights + 8 * 1088 * (128 << 10)
    whole = engine_models.engine_work({**shape, "part": "generate"})
    assert whole.num_bytes == weights + 127 * step.num_bytes
    prefill = whole.flops - 127 * step.flops
    assert prefill == pytest.approx(8 * 1024 * 2 * (7.5e9 - 0.5e9), rel=0.05)


def run(first=1, seconds=1.0, steps=(0.1,)):
    return bench_engine.Run([[first]], seconds, list(steps))


def test_turns_are_mirrored_and_the_first_run_does_not_count():
    log = []

    def candidate(name, times):
        times = iter(times)

        def call(new_tokens):
            log.append(f"{name}{new_tokens}")
            return run(seconds=next(times))

        return call

    found = bench_engine.take_turns(
        {"astrai": candidate("a", [99, 1, 2, 3, 4]), "peer": candidate("b", [99, 5, 6, 7, 8])},
        50,
        4,
    )
    assert log == ["a6", "b6", *["a50", "b50", "b50", "a50"] * 2]
    assert found["astrai"].seconds() == 2.5
    assert found["peer"].seconds() == 6.5


def test_a_peer_that_fails_is_left_out(capsys):
    def broken(new_tokens):
        raise OSError("no compiler")

    found = bench_engine.take_turns({"astrai": run, "transformers": broken}, 9, 2)
    assert list(found) == ["astrai"]
    assert "transformers does not run here: no compiler" in capsys.readouterr().err
    with pytest.raises(OSError, match="no compiler"):
        bench_engine.take_turns({"astrai": broken}, 9, 2)


def test_without_decode_steps_there_is_no_row_of_them():
    assert math.isnan(bench_engine.Runs([run(steps=())]).step_seconds())
    shape = {**SHAPE, "model": "Llama-3-8B", "part": "decode_step"}
    assert list(bench_engine._rows(shape, {"astrai": float("nan"), "peer": 1.0})) == []


def test_the_kernels_share_of_a_step_is_printed():
    kernels = {"gemm": KernelTime(60.0, 4.0), "attention": KernelTime(20.0, 1.0)}
    lines = bench_engine.kernel_table(kernels, 100.0)
    assert lines[0] == "  5 kernels: 80.0 of 100.0 us of a step (80%)"
    assert lines[1].split() == ["60.00", "us", "75.0%", "4.0", "x", "gemm"]


def test_an_unknown_model_is_refused():
    flags.FLAGS(["test", "--only_shapes", "--shapes=model=GPT"])
    with pytest.raises(ValueError, match=r"model must be one of SmolLM2-135M, Llama-3-8B, got GPT"):
        list(bench_engine.generate())


def test_rows_are_chosen_by_model_and_batch(monkeypatch):
    def shapes(*arguments):
        flags.FLAGS.unparse_flags()
        flags.FLAGS(["test", *arguments])
        return [(row["model"], row["batch"]) for row in bench_engine.generate()]

    monkeypatch.setattr(bench_engine, "measure_shape", lambda shape: iter([shape]))
    llama, demo = "Llama-3-8B", "SmolLM2-135M"
    assert shapes() == [(model, batch) for model in (llama, demo) for batch in (1, 8, 64)]
    assert shapes("--quick") == [(llama, 1), (demo, 1)]
    assert shapes("--model", demo, "--batch=1", "--batch=64") == [(demo, 1), (demo, 64)]
    assert shapes("--model", llama, "--quick") == [(llama, 1)]


def test_only_the_goals_shape_is_compiled():
    peers = {
        (shape["model"], shape["batch"]): bench_engine.peers_of({**bench_engine.DEFAULTS, **shape})
        for shape in bench_engine.TABLE
    }
    assert peers.pop(("Llama-3-8B", 1)) == ["transformers", "transformers_eager"]
    assert set(map(tuple, peers.values())) == {("transformers_eager",)} and len(peers) == 5
    flags.FLAGS.unparse_flags()
    flags.FLAGS(["test", "--peer=transformers"])
    assert bench_engine.peers_of(SHAPE) == ["transformers"]


def test_all_rows_of_a_shape(tiny, monkeypatch, capsys):
    pytest.importorskip("transformers")
    flags.FLAGS(["test", "--peer=transformers_eager", "--turns=2"])
    monkeypatch.setattr(harness, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a CPU")
    monkeypatch.setattr(engine_models, "ours", lambda name, device: tiny)
    monkeypatch.setattr(bench_engine, "profile_steps", lambda *_: KERNELS)
    bench_engine._models.cache_clear()
    rows = list(bench_engine.measure_shape({**SHAPE, "new_tokens": 12}))
    bench_engine._models.cache_clear()
    assert [(row.variant, row.peer) for row in rows] == [
        ("generate", "transformers_eager"),
        ("decode_step", "transformers_eager"),
        ("kernels", "astrai_step"),
    ]
    generate, step, kernels = rows
    assert generate.us > 11 * step.us * 0.5
    assert kernels.us == 4.0
    assert kernels.peer_us == step.us
    printed = capsys.readouterr().out
    assert "tiny batch 3, astrai: " in printed
    assert "  a decode step reads weights and keys at " in printed
    assert "the first token is that of ours in 3 of 3 requests" in printed


class FakeProfile:
    """Stands for torch's profiler, which needs a GPU."""

    def __init__(self, activities):
        self.entered = 0

    def __enter__(self):
        self.entered += 1
        return self

    def __exit__(self, *problem):
        pass

    def key_averages(self):
        events = {"gemm": 70.0, "aten::mm": 0.0}
        return [
            types.SimpleNamespace(key=k, self_device_time_total=v, count=14)
            for k, v in events.items()
        ]


def test_steps_are_profiled_only_while_all_requests_decode(tiny, monkeypatch):
    monkeypatch.setattr(torch.profiler, "profile", FakeProfile)
    engine = bench_engine.make_engine(tiny, {**SHAPE, "new_tokens": 12})
    prompts = bench_engine.random_prompts(SHAPE)
    # The prompts' step and the warm ones give 5 tokens; the other 7 are profiled.
    assert bench_engine.profile_steps(engine, prompts, 12) == {"gemm": KernelTime(10.0, 2.0)}
    assert engine.stats.steps == 12
    assert not engine.step()  # the requests are gone
    # Answers that end before all steps are warm leave nothing to profile.
    assert bench_engine.profile_steps(engine, prompts, 3) == {}
