"""Contexts and environment variables."""

import asyncio
import contextvars
import threading
import warnings

import pytest
import torch

import astrai.extension  # noqa: F401 - registers the family attention
from astrai.extension import dispatch
from astrai.extension.dispatch import (
    env_mode,
    env_selection,
    get_override,
    op_backend,
    register_env_alias,
    resolve,
)


def chosen(n=2):
    return resolve("toy", n).record.name


def test_contexts_nest_and_are_left_on_exceptions(toy):
    with op_backend(toy="wide"):
        assert get_override("toy").name == "wide"
        with pytest.raises(KeyError), op_backend(toy="small"):
            assert chosen() == "small"
            raise KeyError
        assert chosen() == "wide"
    assert get_override("toy") is None
    assert chosen() == "small"


def test_inner_context_keeps_the_families_it_does_not_name(toy):
    with op_backend(toy="wide"), op_backend(attention="torch_native"):
        assert chosen() == "wide"
        assert get_override("attention").name == "torch_native"


def test_one_context_object_is_reentrant_and_a_decorator(toy):
    context = op_backend(toy="wide")
    with context, op_backend(toy="small"), context:
        assert chosen() == "wide"
    assert get_override("toy") is None

    @op_backend(toy="wide")
    def call():
        return chosen()

    assert call() == "wide" and call() == "wide"
    assert chosen() == "small"


def test_one_exit_too_many_is_an_error():
    def leave():
        with pytest.raises(RuntimeError, match="as often as entered"):
            dispatch.pop_choices()

    contextvars.Context().run(leave)


def test_unknown_name_enters_nothing(toy):
    with pytest.raises(ValueError):
        dispatch.push_choices({"toy": "wide", "attention": "nothing"})
    assert get_override("toy") is None


def test_context_belongs_to_its_thread(toy):
    seen = []
    with op_backend(toy="wide"):
        thread = threading.Thread(target=lambda: seen.append(chosen()))
        thread.start()
        thread.join()
        assert chosen() == "wide"
    assert seen == ["small"]


def test_context_belongs_to_its_task(toy):
    async def task(name, log):
        with op_backend(toy=name):
            for _ in range(3):
                await asyncio.sleep(0)
                log.append(chosen() == name)

    async def main():
        log = []
        await asyncio.gather(task("wide", log), task("rough", log), task("small", log))
        return log

    assert asyncio.run(main()) == [True] * 9


def test_env_selection_reads_at_every_call(toy, monkeypatch):
    assert env_selection("toy") is None
    monkeypatch.setenv("ASTR_OPS", " toy = wide ,")
    assert env_selection("toy") == "wide"
    monkeypatch.setenv("ASTR_OPS", "toy=small")
    assert env_selection("toy") == "small"
    monkeypatch.delenv("ASTR_OPS")
    assert env_selection("toy") is None


def test_profile_is_not_a_selection_by_name(toy, monkeypatch):
    monkeypatch.setenv("ASTR_OPS", "profile=reference")
    assert env_selection("toy") is None
    assert resolve("toy", 2).origin == "profile"
    x = torch.zeros(1, 2, 2, 64)
    assert resolve("attention", x, x, x).origin == "profile"


def test_alias_comes_after_astr_ops(toy, monkeypatch):
    register_env_alias("toy", "TOY_BACKEND", {"narrow": "small"})
    monkeypatch.setenv("TOY_BACKEND", "wide")
    assert env_selection("toy") == "wide"
    monkeypatch.setenv("TOY_BACKEND", "narrow")
    assert env_selection("toy") == "small"
    monkeypatch.setenv("ASTR_OPS", "toy=rough")
    assert env_selection("toy") == "rough"
    with pytest.raises(ValueError, match="Unknown family"):
        register_env_alias("nothing", "X")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("toy", "entry must be 'family=implementation', got 'toy'"),
        ("=wide", "entry must be"),
        ("toy=", "entry must be"),
        ("ghost=wide", "unknown family 'ghost'"),
        ("toy=fast", "toy implementation must be one of .*got 'fast'"),
        ("profile=fast", r"profile must be one of \['reference'\], got 'fast'"),
    ],
)
def test_bad_entries_warn_once_and_are_dropped(toy, monkeypatch, value, message):
    monkeypatch.setenv("ASTR_OPS", value)
    with pytest.warns(RuntimeWarning, match=message):
        assert chosen() == "small"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen() == "small"
        monkeypatch.setenv("ASTR_OPS", value + ",toy=wide")
        assert chosen() == "wide"


def test_good_entries_survive_beside_bad_ones(toy, monkeypatch):
    monkeypatch.setenv("ASTR_OPS", "ghost=1,toy=wide,oops")
    with pytest.warns(RuntimeWarning):
        assert chosen() == "wide"


def test_bad_name_in_astr_ops_falls_to_the_alias(toy, monkeypatch):
    register_env_alias("toy", "TOY_BACKEND")
    monkeypatch.setenv("ASTR_OPS", "toy=fast")
    monkeypatch.setenv("TOY_BACKEND", "wide")
    with pytest.warns(RuntimeWarning, match="got 'fast'"):
        assert chosen() == "wide"


def test_records_that_come_later_are_seen(toy, monkeypatch):
    monkeypatch.setenv("ASTR_OPS", "toy=late")
    with pytest.warns(RuntimeWarning, match="got 'late'"):
        assert chosen() == "small"
    toy.extra.append(toy.record("late", dispatch.Spec.always(), 50))
    dispatch.refresh_family("toy")
    assert chosen() == "late"


@pytest.mark.parametrize(
    ("value", "mode"),
    [(None, "auto"), ("", "auto"), ("0", "0"), ("1", "1"), ("auto", "auto"), (" AUTO ", "auto")],
)
def test_env_mode(monkeypatch, value, mode):
    if value is None:
        monkeypatch.delenv("ASTRAI_TOY", raising=False)
    else:
        monkeypatch.setenv("ASTRAI_TOY", value)
    assert env_mode("ASTRAI_TOY") == mode


def test_invalid_env_mode_warns_once(monkeypatch):
    monkeypatch.setenv("ASTRAI_TOY", "yes")
    with pytest.warns(RuntimeWarning, match="ASTRAI_TOY: .*got 'yes': using auto"):
        assert env_mode("ASTRAI_TOY") == "auto"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert env_mode("ASTRAI_TOY") == "auto"
