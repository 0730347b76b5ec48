"""Families of interchangeable implementations, and the records that describe each one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from astrai.extension.dispatch.spec import Spec


class ExplicitSelectionError(RuntimeError):
    """An implementation chosen by argument or context cannot take the call.

    Such a choice is strict: running something else instead would hide that the caller's wish was
    not met. Choices by environment variable are soft and never raise this.
    """


def _always_available() -> bool:
    return True


@dataclass(frozen=True, eq=False)
class ImplRecord:
    """One implementation of a family.

    Attributes:
        family: Name of the family.
        name: Name of the implementation within the family, as ``ASTR_OPS`` and ``op_backend`` use
            it.
        obj: The implementation itself (a function, or an attention backend instance).
        spec: Which calls it can take.
        available: Whether it can run on this machine at all (its kernel is built and loads, its
            package is installed). Called on every resolution that reaches it: keep it cheap.
        priority: Place in the automatic chain, lower first.
        faithful: Whether its results agree with the family's reference up to rounding. A record
            that is not faithful never stands in the automatic chain; it is taken only when named.
        why_unavailable: Says in a sentence why ``available`` is false, for messages.
    """

    family: str
    name: str
    obj: Any
    spec: Spec
    available: Callable[[], bool] = _always_available
    priority: int = 100
    faithful: bool = True
    why_unavailable: Callable[[], str] | None = None

    @property
    def label(self) -> str:
        """How messages name it: the class of an instance, else the record's name."""
        obj = self.obj
        if obj is None or isinstance(obj, (type, str)) or hasattr(obj, "__name__"):
            return self.name
        return type(obj).__name__

    def can_take(self, axes: Mapping[str, Any]) -> bool:
        """Whether it is available and its spec accepts the call."""
        return self.spec.matches(axes) and self.available()

    def unavailability(self) -> str:
        """That it is not available, and why if the record knows."""
        reason = self.why_unavailable() if self.why_unavailable is not None else ""
        return "not available on this machine" + (f": {reason}" if reason else "")

    def refusal(self, axes: Mapping[str, Any]) -> str | None:
        """Why it cannot take a call with these axes; None if it can."""
        if not self.available():
            return self.unavailability()
        failures = self.spec.failures(axes)
        return "; ".join(failures) if failures else None


class Resolution(NamedTuple):
    """The implementation that a call takes, and what decided it.

    ``origin`` is one of ``explicit`` (argument), ``context``, ``env``, ``profile``, ``chain`` and
    ``fallback``.
    """

    record: ImplRecord
    origin: str


class Family:
    """A registered family: how its calls are described, and its implementations in order."""

    def __init__(
        self,
        name: str,
        axes: Callable[..., Mapping[str, Any]],
        provider: Callable[[], Iterable[ImplRecord]],
        fallback: str | ImplRecord,
        adopt: Callable[[Any], ImplRecord | None] | None,
    ) -> None:
        self.name = name
        self.axes = axes
        self._provider = provider
        self._fallback = fallback
        self._adopt = adopt
        self._adopted: dict[str, ImplRecord] = {}
        self.refresh()

    def refresh(self) -> None:
        """Ask the provider again: for families whose implementations change at run time."""
        records = sorted(self._provider(), key=lambda record: record.priority)
        by_name: dict[str, ImplRecord] = {}
        for record in records:
            if record.family != self.name:
                raise ValueError(
                    f"register_family: records of {self.name!r} must have family {self.name!r}, "
                    f"got {record.family!r} for {record.name!r}"
                )
            if record.name in by_name:
                raise ValueError(
                    f"register_family: record names of {self.name!r} must be unique, "
                    f"got {record.name!r} twice"
                )
            by_name[record.name] = record
        fallback = self._fallback
        if isinstance(fallback, str):
            if fallback not in by_name:
                raise ValueError(
                    f"register_family: fallback of {self.name!r} must be one of "
                    f"{sorted(by_name)}, got {fallback!r}"
                )
            fallback = by_name[fallback]
        else:
            by_name.setdefault(fallback.name, fallback)
        self.records = by_name
        self.fallback = fallback
        # The fallback is the last resort, whatever its priority says.
        self.chain = tuple(
            Resolution(record, "chain")
            for record in records
            if record.faithful and record is not fallback
        )
        self.last_resort = Resolution(fallback, "fallback")

    def find(self, choice: Any) -> ImplRecord:
        """The record of a choice: a name, a record, or an implementation object.

        Raises:
            ValueError: Nothing in the family has that name or is that object.
        """
        if isinstance(choice, str):
            record = self.records.get(choice) or self._adopted.get(choice)
            if record is not None:
                return record
        elif isinstance(choice, ImplRecord):
            if choice.family == self.name:
                return choice
        else:
            for record in self.records.values():
                if record.obj is choice:
                    return record
            record = self._adopt(choice) if self._adopt is not None else None
            if record is not None:
                if self.records.get(record.name) is not record:
                    self._adopted[record.name] = record
                return record
        shown = choice if isinstance(choice, str) else repr(choice)
        raise ValueError(
            f"Unknown {self.name} implementation: '{shown}'. Known: {sorted(self.records)}"
        )


_families: dict[str, Family] = {}
_lock = threading.Lock()


def register_family(
    name: str,
    axes: Callable[..., Mapping[str, Any]],
    provider: Callable[[], Iterable[ImplRecord]],
    fallback: str | ImplRecord,
    *,
    adopt: Callable[[Any], ImplRecord | None] | None = None,
) -> None:
    """Register a family of implementations, or replace the one of that name.

    Args:
        name: The family's name, as ``op_backend`` and ``ASTR_OPS`` use it.
        axes: Takes a call's own arguments, returns the axes its specs read.
        provider: Returns the family's records. Called once here, and by ``refresh_family``.
        fallback: The record (or its name) that takes a call which nothing in the chain takes; also
            what ``ASTR_OPS=profile=reference`` selects.
        adopt: Turns a choice object that is no record's ``obj`` (an enum member, a class, a fresh
            instance) into a record; returns None for what it does not know.
    """
    family = Family(name, axes, provider, fallback, adopt)
    with _lock:
        _families[name] = family


def unregister_family(name: str) -> None:
    """Forget a family."""
    with _lock:
        _families.pop(name, None)


def refresh_family(name: str) -> None:
    """Ask a family's provider for its records again."""
    get_family(name).refresh()


def get_family(name: str) -> Family:
    """The registered family of that name.

    Raises:
        ValueError: There is none.
    """
    family = _families.get(name)
    if family is None:
        raise ValueError(f"Unknown family: '{name}'. Registered: {sorted(_families)}")
    return family


def family_names() -> list[str]:
    """Names of the registered families, sorted."""
    return sorted(_families)


def is_family(name: str) -> bool:
    """Whether a family of that name is registered."""
    return name in _families
