"""Resolution: which implementation a call takes, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from astrai.extension.dispatch import selection
from astrai.extension.dispatch.registry import (
    ExplicitSelectionError,
    Family,
    ImplRecord,
    Resolution,
    get_family,
)

# A planned call: its arguments as (args, kwargs), as args alone, or as kwargs alone.
Call = tuple | Mapping[str, Any]


def resolve(family: str, /, *args: Any, explicit: Any = None, **kwargs: Any) -> Resolution:
    """Decide which implementation of a family takes a call.

    The order is: ``explicit``, the ``op_backend`` context, the environment's name, the
    environment's profile, the automatic chain by priority, the family's fallback. The first two are
    strict; the environment is soft: what it names is passed over when it cannot take the call.

    Args:
        family: Name of the family.
        *args: The call's own arguments, as the family's axes function takes them.
        explicit: Name, record or object chosen by the caller for this one call.
        **kwargs: Further arguments of the call.

    Raises:
        ExplicitSelectionError: A strict choice cannot take the call.
        ValueError: Unknown family or implementation.
    """
    entry = get_family(family)
    axes = entry.axes(*args, **kwargs)
    if torch.compiler.is_compiling():
        return _resolve_traced(entry, axes, explicit)
    if explicit is not None:
        return _strict(entry, entry.find(explicit), axes, "explicit")
    chosen = selection.get_override(family)
    if chosen is not None:
        return _strict(entry, chosen, axes, "context")
    wish, origin = selection.env_choice(entry)
    if wish is not None and wish.can_take(axes):
        return Resolution(wish, origin)
    return _automatic(entry, axes)


def _automatic(entry: Family, axes: Mapping[str, Any]) -> Resolution:
    for candidate in entry.chain:
        record = candidate.record
        if record.spec.matches(axes) and record.available():
            return candidate
    if entry.fallback.can_take(axes):
        return entry.last_resort
    raise RuntimeError(
        f"No {entry.name} implementation can take this call: fallback {entry.fallback.name}: "
        f"{entry.fallback.refusal(axes)}"
    )


def _strict(entry: Family, record: ImplRecord, axes: Mapping[str, Any], origin: str) -> Resolution:
    if record.can_take(axes):
        return Resolution(record, origin)
    raise ExplicitSelectionError(refusal_text(entry, record, axes))


def refusal_text(entry: Family, record: ImplRecord, axes: Mapping[str, Any]) -> str:
    """The message of a strict choice that cannot be met."""
    return (
        f"Explicitly-set backend {record.label} cannot handle this {entry.name} call: "
        f"{record.refusal(axes)}"
    )


@torch.compiler.assume_constant_result
def _env_choice_name(family: str) -> str:
    """The environment's choice while tracing, as "origin:name" ("" for none).

    It is read once, when the call is traced, and holds for the compiled code: TorchDynamo does not
    guard environment variables.
    """
    record, origin = selection.env_choice(get_family(family))
    return "" if record is None else f"{origin}:{record.name}"


@torch.compiler.assume_constant_result
def _is_available(family: str, name: str) -> bool:
    return get_family(family).find(name).available()


def _resolve_traced(entry: Family, axes: Mapping[str, Any], explicit: Any) -> Resolution:
    """``resolve`` in the subset of Python that TorchDynamo traces without a graph break."""
    name, origin = "", ""
    if explicit is not None:
        name, origin = entry.find(explicit).name, "explicit"
    else:
        for family, choice in selection.traced_choices:
            if family == entry.name:
                name, origin = choice, "context"
    if name:
        record = entry.find(name)
        if record.spec.matches(axes) and _is_available(entry.name, name):
            return Resolution(record, origin)
        raise ExplicitSelectionError(
            f"Explicitly-set backend {record.label} cannot handle this {entry.name} call"
        )
    wish = _env_choice_name(entry.name)
    if wish:
        origin, _, name = wish.partition(":")
        record = entry.find(name)
        if record.spec.matches(axes) and _is_available(entry.name, name):
            return Resolution(record, origin)
    for candidate in entry.chain:
        record = candidate.record
        if record.spec.matches(axes) and _is_available(entry.name, record.name):
            return candidate
    if entry.fallback.spec.matches(axes) and _is_available(entry.name, entry.fallback.name):
        return entry.last_resort
    raise RuntimeError(f"No {entry.name} implementation can take this call")


def explain(family: str, /, *args: Any, explicit: Any = None, **kwargs: Any) -> str:
    """Say how ``resolve`` would decide about a call, and why.

    Takes the same arguments; raises only for an unknown family.

    Returns:
        Lines of text. After a heading with the call's axes, one line per implementation in the
        order of the chain: ``name: MATCH``, ``name: reject (why)`` or ``name: SKIP (why)`` (not
        available here, or taken only when named). Last ``=> name (origin=...)``, or ``=> ERROR:
        ...``.
    """
    entry = get_family(family)
    axes = entry.axes(*args, **kwargs)
    shown = ", ".join(
        f"{name}={selection_value(value)}" for name, value in axes.items() if name != "call"
    )
    lines = [f"{family}: {shown}"]
    ordered = [candidate.record for candidate in entry.chain]
    ordered += [r for r in entry.records.values() if r not in ordered and r is not entry.fallback]
    ordered.append(entry.fallback)
    lines += [f"{record.name}: {_verdict(entry, record, axes)}" for record in ordered]
    try:
        record, origin = resolve(family, *args, explicit=explicit, **kwargs)
        lines.append(f"=> {record.name} (origin={origin})")
    except (RuntimeError, ValueError) as error:
        lines.append(f"=> ERROR: {error}")
    return "\n".join(lines)


def selection_value(value: Any) -> str:
    """An axis value in the heading of ``explain``."""
    return str(value).removeprefix("torch.")


def _verdict(entry: Family, record: ImplRecord, axes: Mapping[str, Any]) -> str:
    if not record.available():
        return f"SKIP ({record.unavailability()})"
    refusal = record.refusal(axes)
    if refusal is not None:
        return f"reject ({refusal})"
    if not record.faithful and record is not entry.fallback:
        return "SKIP (taken only when named)"
    return "MATCH"


def _split(call: Call) -> tuple[tuple, Mapping[str, Any]]:
    if isinstance(call, Mapping):
        return (), call
    if len(call) == 2 and isinstance(call[0], tuple) and isinstance(call[1], Mapping):
        return call
    return tuple(call), {}


def resolve_plan(plan: Mapping[str, Call]) -> dict[str, Resolution]:
    """Resolve one call of each of several families, for instance before capturing a CUDA graph.

    Args:
        plan: Family to its call: ``(args, kwargs)``, a tuple of positional arguments, or a mapping
            of keyword arguments.

    Returns:
        Family to its resolution, in the plan's order.
    """
    out = {}
    for family, call in plan.items():
        args, kwargs = _split(call)
        out[family] = resolve(family, *args, **kwargs)
    return out


def explain_plan(plan: Mapping[str, Call]) -> str:
    """``explain`` for every family of a plan (as in ``resolve_plan``), separated by blank lines."""
    parts = []
    for family, call in plan.items():
        args, kwargs = _split(call)
        parts.append(explain(family, *args, **kwargs))
    return "\n\n".join(parts)
