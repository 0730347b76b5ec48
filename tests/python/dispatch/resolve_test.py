"""Resolution order: explicit > context > env > profile > chain > fallback, and who is strict."""

import pytest

from astrai.extension import dispatch
from astrai.extension.dispatch import ExplicitSelectionError, op_backend, resolve


def names(resolution):
    return resolution.record.name, resolution.origin


def test_chain_takes_the_first_match_by_priority(toy):
    assert names(resolve("toy", 2)) == ("small", "chain")
    assert names(resolve("toy", 9)) == ("wide", "chain")
    assert names(resolve("toy", 3, flag=True)) == ("wide", "chain")


def test_fallback_comes_last_whatever_its_priority(toy):
    assert names(resolve("toy", 0)) == ("plain", "fallback")


def test_unavailable_is_passed_over_and_asked_every_time(toy):
    toy.loaded["small"] = False
    assert names(resolve("toy", 2)) == ("wide", "chain")
    toy.loaded["small"] = True
    assert names(resolve("toy", 2)) == ("small", "chain")


def test_unfaithful_is_taken_only_when_named(toy, monkeypatch):
    toy.loaded.update(wide=False, small=False)
    assert names(resolve("toy", 2)) == ("plain", "fallback")
    assert names(resolve("toy", 2, explicit="rough")) == ("rough", "explicit")
    monkeypatch.setenv("ASTR_OPS", "toy=rough")
    assert names(resolve("toy", 2)) == ("rough", "env")


def test_order_of_precedence(toy, monkeypatch):
    monkeypatch.setenv("ASTR_OPS", "profile=reference")
    assert names(resolve("toy", 2)) == ("plain", "profile")
    monkeypatch.setenv("ASTR_OPS", "profile=reference,toy=wide")
    assert names(resolve("toy", 2)) == ("wide", "env")
    with op_backend(toy="small"):
        assert names(resolve("toy", 2)) == ("small", "context")
        assert names(resolve("toy", 2, explicit="rough")) == ("rough", "explicit")
    assert names(resolve("toy", 2)) == ("wide", "env")


@pytest.mark.parametrize("unavailable", [False, True])
def test_explicit_and_context_are_strict(toy, unavailable):
    toy.loaded["small"] = not unavailable
    n = 2 if unavailable else 9
    reason = "not available" if unavailable else r"needs n in \{1, 2, 3, 4\}, got 9"
    pattern = f"^Explicitly-set backend small cannot handle this toy call: .*{reason}"
    with pytest.raises(ExplicitSelectionError, match=pattern):
        resolve("toy", n, explicit="small")
    with op_backend(toy="small"), pytest.raises(RuntimeError, match=pattern):
        resolve("toy", n)


def test_environment_is_soft(toy, monkeypatch):
    monkeypatch.setenv("ASTR_OPS", "toy=small")
    assert names(resolve("toy", 2)) == ("small", "env")
    assert names(resolve("toy", 9)) == ("wide", "chain")
    assert names(resolve("toy", 0)) == ("plain", "fallback")
    toy.loaded["small"] = False
    assert names(resolve("toy", 2)) == ("wide", "chain")


def test_choice_by_record_and_by_object(toy):
    record = dispatch.get_family("toy").records["wide"]
    assert resolve("toy", 5, explicit=record).record is record
    assert resolve("toy", 5, explicit=record.obj).record is record
    with op_backend(toy=record.obj):
        assert resolve("toy", 5).record is record


def test_unknown_names_are_value_errors(toy):
    with pytest.raises(ValueError, match="Unknown toy implementation: 'fast'"):
        resolve("toy", 1, explicit="fast")
    with pytest.raises(ValueError, match="Unknown toy implementation: 'fast'"):
        op_backend(toy="fast")
    with pytest.raises(ValueError, match="Unknown family: 'nothing'"):
        resolve("nothing", 1)
    with pytest.raises(ValueError, match="Unknown family: 'nothing'"):
        op_backend(nothing="fast")
    with pytest.raises(ValueError, match="Unknown toy implementation"):
        resolve("toy", 1, explicit=object())


def test_no_fallback_for_a_call_it_cannot_take():
    dispatch.register_family(
        "narrow",
        lambda n: {"n": n},
        lambda: [dispatch.ImplRecord("narrow", "one", len, dispatch.axis("n").eq(1))],
        "one",
    )
    try:
        assert names(resolve("narrow", 1)) == ("one", "fallback")
        with pytest.raises(RuntimeError, match=r"No narrow implementation.*needs n == 1, got 2"):
            resolve("narrow", 2)
        assert dispatch.explain("narrow", 2).split("\n")[-1].startswith("=> ERROR: No narrow")
    finally:
        dispatch.unregister_family("narrow")


def test_registration_checks_its_records():
    record = dispatch.ImplRecord("other", "a", len, dispatch.Spec.always())
    with pytest.raises(ValueError, match="must have family 'fam', got 'other'"):
        dispatch.register_family("fam", dict, lambda: [record], "a")
    twin = dispatch.ImplRecord("fam", "a", len, dispatch.Spec.always())
    with pytest.raises(ValueError, match="unique, got 'a' twice"):
        dispatch.register_family("fam", dict, lambda: [twin, twin], "a")
    with pytest.raises(ValueError, match="fallback of 'fam' must be one of"):
        dispatch.register_family("fam", dict, lambda: [twin], "b")
    assert "fam" not in dispatch.family_names()


def test_provider_is_not_asked_per_call(toy):
    before = toy.provided
    for n in range(10):
        resolve("toy", n)
    assert toy.provided == before
    dispatch.refresh_family("toy")
    assert toy.provided == before + 1


def test_explain_reads_as_resolve_decides(toy):
    toy.loaded["wide"] = False
    assert dispatch.explain("toy", 9) == "\n".join(
        [
            "toy: n=9, flag=False",
            "small: reject (needs n in {1, 2, 3, 4}, got 9)",
            "wide: SKIP (not available on this machine)",
            "rough: SKIP (taken only when named)",
            "plain: MATCH",
            "=> plain (origin=fallback)",
        ]
    )
    assert dispatch.explain("toy", 2).endswith("=> small (origin=chain)")
    assert dispatch.explain("toy", 2, explicit="rough").endswith("=> rough (origin=explicit)")
    with op_backend(toy="small"):
        last = dispatch.explain("toy", 9).split("\n")[-1]
    assert last.startswith("=> ERROR: Explicitly-set backend small")
    assert (
        dispatch.explain("toy", 2, explicit="fast").split("\n")[-1].startswith("=> ERROR: Unknown")
    )


def test_plans_cover_several_families(toy):
    plan = {"toy": (9,)}
    assert {k: names(v) for k, v in dispatch.resolve_plan(plan).items()} == {
        "toy": ("wide", "chain")
    }
    assert names(dispatch.resolve_plan({"toy": {"n": 0}})["toy"]) == ("plain", "fallback")
    both = dispatch.resolve_plan({"toy": ((2,), {"flag": True})})
    assert names(both["toy"]) == ("wide", "chain")
    assert dispatch.explain_plan(plan) == dispatch.explain("toy", 9)
