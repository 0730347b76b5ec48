"""Specs: what they accept, how they combine, and that a rejection names the term that failed."""

import pytest
import torch

from astrai.extension.dispatch import Spec, axis, tensor_axes


@pytest.mark.parametrize(
    ("spec", "accepted", "rejected"),
    [
        (axis("a").eq(3), [3, 3.0], [4, None]),
        (axis("a").is_(torch.bfloat16), [torch.bfloat16], [torch.float16, "bfloat16"]),
        (axis("a").in_(1, 2), [1, 2], [0, 3, None]),
        (axis("a").in_([1, 2]), [1, 2], [0, [1, 2]]),
        (axis("a").in_(range(8, 17, 8)), [8, 16], [12, 24]),
        (axis("a").at_least(80), [80, 90], [75, None]),
        (axis("a").none(), [None], [0, False]),
        (axis("a").not_none(), [0, False], [None]),
        (axis("a").truthy(), [True, 1, "x"], [False, 0, None]),
        (axis("a").falsy(), [False, 0, None], [True, 1]),
        (Spec.always(), [None, 1], []),
        (Spec.of(lambda axes: axes["a"] == 1, "a is one"), [1], [2]),
        (axis("a").in_(1, 2) & axis("a").in_(2, 3), [2], [1, 3]),
        (axis("a").eq(1) | axis("a").eq(3), [1, 3], [2]),
        (~axis("a").eq(1), [2, None], [1]),
        (~(axis("a").eq(1) & Spec.always()), [2], [1]),
    ],
)
def test_spec_accepts_exactly(spec, accepted, rejected):
    for value in accepted:
        assert spec.matches({"a": value}), (spec, value)
        assert spec.failures({"a": value}) == []
    for value in rejected:
        assert not spec.matches({"a": value}), (spec, value)
        assert spec.failures({"a": value})


def test_absent_axis_reads_as_none():
    assert axis("b").none().matches({"a": 1})
    assert not axis("b").truthy().matches({"a": 1})


def test_description_names_every_term():
    spec = axis("dtype").in_(torch.bfloat16, torch.float16) & axis("mask").none() & ~axis("m").eq(1)
    assert spec.description == "dtype in {bfloat16, float16} and mask is None and not (m == 1)"
    assert Spec.always().description == "always"
    assert (axis("a").eq(1) | axis("b").truthy()).description == "(a == 1 or b is true)"


def test_failures_name_only_what_failed_and_what_came():
    spec = axis("dtype").eq(torch.bfloat16) & axis("n").eq(4) & axis("cuda").truthy()
    axes = {"dtype": torch.float32, "n": 4, "cuda": False}
    assert spec.failures(axes) == [
        "needs dtype == bfloat16, got float32",
        "needs cuda is true, got False",
    ]


def test_a_function_may_say_why_not():
    spec = axis("n").eq(4) & Spec.unless(
        lambda axes: None if axes["m"] < 3 else f"m is {axes['m']}", "a small m"
    )
    assert spec.matches({"n": 4, "m": 2}) and not spec.matches({"n": 4, "m": 3})
    assert spec.failures({"n": 4, "m": 2}) == []
    assert spec.failures({"n": 5, "m": 3}) == ["needs n == 4, got 5", "m is 3"]
    assert spec.description == "n == 4 and a small m"


def test_and_is_not_changed_by_its_parts():
    first, second = axis("a").eq(1), axis("b").eq(2)
    both = first & second
    assert first.matches({"a": 1}) and not both.matches({"a": 1})
    assert first.description == "a == 1"


def test_combining_with_something_else_is_a_type_error():
    with pytest.raises(TypeError):
        axis("a").eq(1) & (lambda axes: True)
    with pytest.raises(TypeError, match="predicate must be callable, got str"):
        Spec.of("a", "b")


def test_tensor_axes():
    x = torch.zeros(2, dtype=torch.float16)
    with torch.no_grad():
        assert tensor_axes(x, heads=3) == {
            "dtype": torch.float16,
            "device_cuda": False,
            "grad_enabled": False,
            "heads": 3,
        }
    assert tensor_axes(x)["grad_enabled"] is True
