"""Finds and imports the compiled modules in ``astrai/extension/lib``.

Names are found when this file is imported. Each module is imported on its first use, so that a
process which never launches a kernel never touches the GPU. What was found out about a module is
kept for the life of the process: a failed import is logged once, as a warning.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

__all__ = ["KERNEL_NAMES", "get_module", "is_available", "why_unavailable"]

_LOGGER = logging.getLogger(__name__)
_LIB_PACKAGE = "astrai.extension.lib"
# Symbolic links stay: under Bazel the modules lie beside the link to this file, not beside its
# target.
_LIB_DIR = Path(__file__).absolute().parent / "lib"

# What a complete package holds, so that a missing file can be told from an unknown name.
_EXPECTED = (
    "attn_decode",
    "attn_paged_decode",
    "attn_paged_prefill",
    "attn_prefill",
    "rotary_emb",
)

_REINSTALL = "Reinstall the package: pip install --force-reinstall astrai"


@dataclass(frozen=True)
class _Loaded:
    """What is known about a module: usable if ``problem`` is empty."""

    module: ModuleType | None
    problem: str


_loaded: dict[str, _Loaded] = {}


def _discover(directory: Path) -> list[str]:
    """Names of the modules in ``directory``: each file name up to its first dot."""
    return sorted({path.name.split(".", 1)[0] for path in directory.glob("*.so")})


KERNEL_NAMES: list[str] = _discover(_LIB_DIR)


def _find_file(name: str) -> Path | None:
    """The file of a module for this Python, or None."""
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = _LIB_DIR / (name + suffix)
        if path.exists():
            return path
    return None


def _missing_file(name: str) -> str:
    others = sorted(path.name for path in _LIB_DIR.glob(f"{name}.*"))
    if others:
        here = f"{sys.implementation.name} {sys.version_info.major}.{sys.version_info.minor}"
        return (
            f"The package holds {', '.join(others)}, which another Python than this one ({here}) "
            f"can load. {_REINSTALL}."
        )
    if name in _EXPECTED:
        return f"Its file {name}.*.so is missing from {_LIB_DIR}. {_REINSTALL}."
    known = ", ".join(KERNEL_NAMES) or "none"
    return f"There is no kernel of that name; this package has: {known}."


def _import(name: str) -> _Loaded:
    path = _find_file(name)
    if path is None:
        return _Loaded(None, _missing_file(name))
    full_name = f"{_LIB_PACKAGE}.{name}"
    try:
        spec = importlib.util.spec_from_file_location(full_name, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        problem = f"Its file {path} cannot be loaded: {error}. {_REINSTALL}."
        _LOGGER.warning("CUDA kernel '%s' is not available. %s", name, problem)
        return _Loaded(None, problem)
    sys.modules[full_name] = module
    return _Loaded(module, module.why_no_device())


def _load(name: str) -> _Loaded:
    found = _loaded.get(name)
    if found is None:
        found = _loaded.setdefault(name, _import(name))
    return found


def is_available(name: str) -> bool:
    """Whether the kernels of module ``name`` can run here.

    The first call for a name imports its module and asks the CUDA driver for devices. An unknown
    name is not available.
    """
    return not _load(name).problem


def why_unavailable(name: str) -> str:
    """Why ``is_available(name)`` is False, as a sentence; empty if it is True."""
    return _load(name).problem


def get_module(name: str) -> ModuleType:
    """The module of that name, imported on first use.

    Raises:
        RuntimeError: "CUDA kernel '<name>' is not available." and the cause: no GPU, a driver that
            is too old for CUDA 13 (it needs 580), a GPU that this build has no code for, or a file
            that is missing or cannot be loaded.
    """
    found = _load(name)
    if found.problem:
        raise RuntimeError(f"CUDA kernel '{name}' is not available. {found.problem}")
    return found.module
