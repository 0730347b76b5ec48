"""What the user selected: by context (``op_backend``) or by environment (``ASTR_OPS``, aliases)."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Mapping
from contextlib import ContextDecorator
from contextvars import ContextVar
from typing import Any

from astrai.extension.dispatch.registry import Family, ImplRecord, get_family, is_family

OPS_VARIABLE = "ASTR_OPS"
PROFILE_ENTRY = "profile"
PROFILES = ("reference",)


class _Frame:
    """One level of nested ``op_backend`` contexts: all choices in force, and the level below."""

    __slots__ = ("choices", "parent")

    def __init__(self, choices: Mapping[str, ImplRecord], parent: _Frame | None) -> None:
        self.choices = choices
        self.parent = parent


_frame: ContextVar[_Frame | None] = ContextVar("astrai_op_backend", default=None)

# TorchDynamo can neither trace nor guard a context variable. While it traces, the choices are read
# from this copy, which it does guard, so that compiled code follows the context as eager code does.
# The copy holds the choices of the thread that entered or left a context last: compiled calls
# running at the same time in threads with different contexts must pass their choice as an argument.
traced_choices: tuple[tuple[str, str], ...] = ()


def push_choices(choices: Mapping[str, Any]) -> dict[str, ImplRecord]:
    """Enter one level of choices ({family: name or object}); returns the records chosen.

    Raises:
        ValueError: Unknown family or implementation. Nothing is entered then.
    """
    records = {name: get_family(name).find(choice) for name, choice in choices.items()}
    parent = _frame.get()
    inherited = parent.choices if parent is not None else {}
    _set_frame(_Frame({**inherited, **records}, parent))
    return records


def pop_choices() -> None:
    """Leave the innermost level that this context entered."""
    frame = _frame.get()
    if frame is None:
        raise RuntimeError("op_backend: must be left as often as entered, got one exit too many")
    _set_frame(frame.parent)


def _set_frame(frame: _Frame | None) -> None:
    global traced_choices
    _frame.set(frame)
    choices = frame.choices if frame is not None else {}
    traced_choices = tuple((family, record.name) for family, record in sorted(choices.items()))


class op_backend(ContextDecorator):
    """Context (or decorator) that chooses implementations by family, strictly.

    ``with op_backend(attention="torch_native", rotary="torch"): ...``. Inside, a call of a named
    family takes that implementation or raises ``ExplicitSelectionError``. Contexts nest (the inner
    one wins, family by family) and belong to the thread or task that entered them.

    Args:
        **choices: Family name to implementation name, record or object.

    Raises:
        ValueError: Unknown family or implementation (on construction).
    """

    def __init__(self, **choices: Any) -> None:
        self._choices = {name: get_family(name).find(choice) for name, choice in choices.items()}

    def __enter__(self) -> op_backend:
        push_choices(self._choices)
        return self

    def __exit__(self, *exc_info: object) -> None:
        pop_choices()


def get_override(family: str) -> ImplRecord | None:
    """The record that the innermost ``op_backend`` context chose for a family, if any."""
    frame = _frame.get()
    return None if frame is None else frame.choices.get(family)


# ---- environment ----

_aliases: dict[str, list[tuple[str, Mapping[str, str]]]] = {}
_warned: set[str] = set()
_warned_lock = threading.Lock()
# family name -> (records it was parsed against, raw strings, result): parsing costs microseconds,
# comparing the raw strings some tenths of one.
_parsed: dict[str, tuple[Mapping[str, ImplRecord], tuple[str | None, ...], Any]] = {}
_variable_keys: dict[str, tuple[Any, ...]] = {}


def warn_once(message: str) -> None:
    """Warn (``RuntimeWarning``) the first time this very message comes up in the process."""
    with _warned_lock:
        if message in _warned:
            return
        _warned.add(message)
    warnings.warn(message, RuntimeWarning, stacklevel=3)


def register_env_alias(family: str, variable: str, names: Mapping[str, str] | None = None) -> None:
    """Let a variable of its own select a family's implementation, below ``ASTR_OPS``.

    Args:
        family: A registered family.
        variable: Name of the environment variable, such as ``ASTR_BACKEND``.
        names: Further values it may have: value to implementation name.
    """
    get_family(family)
    aliases = _aliases.setdefault(family, [])
    aliases[:] = [entry for entry in aliases if entry[0] != variable]
    aliases.append((variable, dict(names or {})))
    _parsed.pop(family, None)
    _variable_keys.pop(family, None)


def read_env(variable: str) -> str | None:
    """``os.environ.get`` for variables that are nearly always unset.

    That call costs about 0.8 us, most of it to encode the name and to raise and catch a KeyError.
    """
    data = getattr(os.environ, "_data", None)
    if data is not None and _encoded(variable) not in data:
        return None
    return os.environ.get(variable)


_encoded_names: dict[str, Any] = {}


def _encoded(variable: str) -> Any:
    """A variable's name as the key of ``os.environ._data``."""
    key = _encoded_names.get(variable)
    if key is None:
        key = _encoded_names[variable] = os.environ.encodekey(variable)
    return key


def parse_ops(raw: str) -> tuple[dict[str, str], str | None]:
    """Split an ``ASTR_OPS`` value into ({family: implementation}, profile).

    Entries that are malformed, or name an unknown family or profile, warn once and are dropped.
    """
    entries: dict[str, str] = {}
    profile = None
    for entry in raw.split(","):
        entry = entry.strip()
        if not entry:
            continue
        family, separator, name = (part.strip() for part in entry.partition("="))
        if not (separator and family and name):
            warn_once(
                f"{OPS_VARIABLE}: entry must be 'family=implementation', got '{entry}': ignored"
            )
        elif family == PROFILE_ENTRY:
            if name in PROFILES:
                profile = name
            else:
                warn_once(
                    f"{OPS_VARIABLE}: profile must be one of {list(PROFILES)}, "
                    f"got '{name}': ignored"
                )
        elif not is_family(family):
            warn_once(f"{OPS_VARIABLE}: unknown family '{family}' in '{entry}': ignored")
        else:
            entries[family] = name
    return entries, profile


def env_choice(family: Family) -> tuple[ImplRecord | None, str | None]:
    """What the environment selects for a family: (record, "env" | "profile"), or (None, None)."""
    name = family.name
    data = getattr(os.environ, "_data", None)
    if data is not None:
        for key in _variable_keys.get(name) or _keys_of(name):
            if key in data:
                break
        else:
            return None, None
    aliases = _aliases.get(name, ())
    raw = (os.environ.get(OPS_VARIABLE), *[os.environ.get(variable) for variable, _ in aliases])
    cached = _parsed.get(name)
    if cached is not None and cached[0] is family.records and cached[1] == raw:
        return cached[2]
    result = _parse_choice(family, raw, aliases)
    _parsed[name] = (family.records, raw, result)
    return result


def _keys_of(family: str) -> tuple[Any, ...]:
    """Keys of ``os.environ._data`` that can select an implementation of the family."""
    variables = [OPS_VARIABLE, *[variable for variable, _ in _aliases.get(family, ())]]
    keys = _variable_keys[family] = tuple(_encoded(variable) for variable in variables)
    return keys


def _parse_choice(
    family: Family, raw: tuple[str | None, ...], aliases: Any
) -> tuple[ImplRecord | None, str | None]:
    entries, profile = parse_ops(raw[0]) if raw[0] else ({}, None)
    wanted = [(OPS_VARIABLE, entries.get(family.name))]
    for (variable, names), value in zip(aliases, raw[1:], strict=True):
        value = value.strip() if value else None
        wanted.append((variable, names.get(value, value) if value else None))
    for variable, name in wanted:
        if not name:
            continue
        record = family.records.get(name)
        if record is not None:
            return record, "env"
        warn_once(
            f"{variable}: {family.name} implementation must be one of {sorted(family.records)}, "
            f"got '{name}': ignored"
        )
    if profile == "reference":
        return family.fallback, "profile"
    return None, None


def env_selection(family: str) -> str | None:
    """Name of the implementation that the environment names for a family, if any.

    ``ASTR_OPS`` comes before the family's own variable. A name that the family does not know warns
    once and counts as not given. A profile is not a selection by name and is not reported here.
    """
    record, origin = env_choice(get_family(family))
    return record.name if record is not None and origin == "env" else None


def env_mode(variable: str) -> str:
    """Read a three-way switch from the environment, at every call.

    Returns:
        ``"0"`` (never), ``"1"`` (whenever capable) or ``"auto"`` (also when unset or empty). Any
        other value warns once and reads as ``"auto"``.
    """
    value = read_env(variable)
    value = value.strip().lower() if value else "auto"
    if value in ("0", "1", "auto"):
        return value
    warn_once(f"{variable}: must be 0, 1 or auto, got '{value}': using auto")
    return "auto"
