"""Specs: named conditions on the axes of a call, which combine with ``&``, ``|`` and ``~``.

An *axis* is one named fact about a call (``dtype``, ``device_cuda``, ``head_dim`` ...). A ``Spec``
says which calls an implementation can take, as a conjunction of terms, so that a rejection can name
the very term that failed instead of just saying no.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

Axes = Mapping[str, Any]


class Term(NamedTuple):
    """One condition. ``axis`` is the axis it reads, or None if it reads several.

    ``why_not``, if given, says in a sentence why axes do not meet it.
    """

    holds: Callable[[Axes], Any]
    description: str
    axis: str | None = None
    why_not: Callable[[Axes], str | None] | None = None


class Spec:
    """A condition on the axes of a call.

    Build specs with ``axis(name).eq(...)`` and its siblings, ``Spec.always()`` or ``Spec.of(fn,
    description)``; combine them with ``&``, ``|`` and ``~``. Specs are immutable. A predicate sees
    the mapping of axes and must not change anything: it runs on every resolution.
    """

    __slots__ = ("_holds", "_terms")

    def __init__(self, terms: Iterable[Term] = ()) -> None:
        self._terms = tuple(terms)
        # Kept beside the terms because matches() is on the path of every call.
        self._holds = tuple(term.holds for term in self._terms)

    @classmethod
    def always(cls) -> Spec:
        """The spec that takes every call."""
        return cls()

    @classmethod
    def of(cls, predicate: Callable[[Axes], Any], description: str) -> Spec:
        """A spec of one free predicate over all axes.

        Args:
            predicate: Takes the mapping of axes, returns true if the call is accepted.
            description: What is required, as ``explain`` prints it.
        """
        if not callable(predicate):
            raise TypeError(f"Spec.of: predicate must be callable, got {type(predicate).__name__}")
        return cls((Term(predicate, description),))

    @classmethod
    def unless(cls, why_not: Callable[[Axes], str | None], description: str) -> Spec:
        """A spec that accepts what a function has nothing to say against.

        Args:
            why_not: Takes the mapping of axes; returns None if the call is accepted, else why it is
                not, as ``explain`` prints it.
            description: What is required, in words.
        """
        return cls((Term(lambda axes: why_not(axes) is None, description, None, why_not),))

    @property
    def description(self) -> str:
        """What the spec requires, in words."""
        return " and ".join(term.description for term in self._terms) or "always"

    def matches(self, axes: Axes) -> bool:
        """Whether a call with these axes is accepted."""
        # A plain loop: a generator under all() costs three times as much.
        for holds in self._holds:  # noqa: SIM110
            if not holds(axes):
                return False
        return True

    def failures(self, axes: Axes) -> list[str]:
        """Why these axes are rejected, term by term, with the value that came; empty on a match."""
        out = []
        for term in self._terms:
            if term.holds(axes):
                continue
            if term.why_not is not None:
                out.append(str(term.why_not(axes)))
            else:
                got = "" if term.axis is None else f", got {show(axes.get(term.axis))}"
                out.append(f"needs {term.description}{got}")
        return out

    def __and__(self, other: Spec) -> Spec:
        if not isinstance(other, Spec):
            return NotImplemented
        return Spec(self._terms + other._terms)

    def __or__(self, other: Spec) -> Spec:
        if not isinstance(other, Spec):
            return NotImplemented
        left, right = self, other
        return Spec.of(
            lambda axes: left.matches(axes) or right.matches(axes),
            f"({left.description} or {right.description})",
        )

    def __invert__(self) -> Spec:
        inner = self
        return Spec.of(lambda axes: not inner.matches(axes), f"not ({inner.description})")

    def __repr__(self) -> str:
        return f"Spec({self.description})"


class axis:
    """One axis of a call, to build specs from. An axis that a call does not have reads as None."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def _spec(self, holds: Callable[[Any], Any], condition: str) -> Spec:
        name = self.name
        return Spec((Term(lambda axes: holds(axes.get(name)), f"{name} {condition}", name),))

    def eq(self, value: Any) -> Spec:
        """The axis equals ``value``."""
        return self._spec(lambda got: got == value, f"== {show(value)}")

    def is_(self, value: Any) -> Spec:
        """The axis is the object ``value``."""
        return self._spec(lambda got: got is value, f"is {show(value)}")

    def in_(self, *values: Any) -> Spec:
        """The axis is one of ``values``; also takes one collection of them."""
        if len(values) == 1 and isinstance(values[0], (tuple, list, set, frozenset, range)):
            values = tuple(values[0])
        shown = ", ".join(show(value) for value in values)
        if len(values) > 8:
            shown = f"{show(values[0])}, {show(values[1])}, ..., {show(values[-1])}"
        return self._spec(lambda got: got in values, f"in {{{shown}}}")

    def at_least(self, bound: Any) -> Spec:
        """The axis is ``bound`` or more."""
        return self._spec(lambda got: got is not None and got >= bound, f">= {show(bound)}")

    def none(self) -> Spec:
        """The axis is None."""
        return self._spec(lambda got: got is None, "is None")

    def not_none(self) -> Spec:
        """The axis is not None."""
        return self._spec(lambda got: got is not None, "is not None")

    def truthy(self) -> Spec:
        """The axis is true."""
        return self._spec(bool, "is true")

    def falsy(self) -> Spec:
        """The axis is false."""
        return self._spec(lambda got: not got, "is false")


def show(value: Any) -> str:
    """A value as messages print it: dtypes without their module, strings in quotes."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return repr(value)


def tensor_axes(x: torch.Tensor, **extra: Any) -> dict[str, Any]:
    """The axes that every family shares, read from the call's main tensor.

    Args:
        x: The tensor that decides the call's dtype and device.
        **extra: Further axes of the family.

    Returns:
        ``dtype`` (torch.dtype), ``device_cuda`` (bool), ``grad_enabled`` (bool: autograd records in
        this thread), then ``extra``.
    """
    return {
        "dtype": x.dtype,
        "device_cuda": x.is_cuda,
        "grad_enabled": torch.is_grad_enabled(),
        **extra,
    }
