"""Reads imports and includes out of sources."""

from __future__ import annotations

import ast
import re
from pathlib import Path

_INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)


def module_name(path: Path, root: Path) -> str:
    """Dotted name of the module in a file below ``root``."""
    parts = list(path.relative_to(root).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


def imports(source: str, module: str, is_package: bool, modules: set[str]) -> set[tuple[str, str]]:
    """What a module imports, as (module, name), name empty for the module as a whole.

    Args:
        source: Text of the module.
        module: Its dotted name, for relative imports.
        is_package: Whether it is an ``__init__.py``.
        modules: Known modules: ``from a import b`` imports the module a.b if that is one of them.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                keep = len(parts) - node.level + (1 if is_package else 0)
                base = ".".join([*parts[:keep], *([base] if base else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                found.add((inner, "") if inner in modules else (base, alias.name))
    return found


def includes(source: str) -> list[str]:
    """What a C++ file includes."""
    return _INCLUDE.findall(source)
