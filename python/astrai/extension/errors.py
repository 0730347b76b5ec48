"""Exceptions of the kernels that fit two of Python's classes at once.

Bad shapes and values are a ``ValueError`` and bad dtypes a ``TypeError`` to Python, while code
written for torch's own operators catches ``RuntimeError``. These classes are both. The bindings in
C++ look them up here.
"""

from __future__ import annotations

__all__ = ["DtypeError", "ShapeError"]


class ShapeError(ValueError, RuntimeError):
    """A tensor of the wrong rank, size, stride or alignment, or a number out of range."""


class DtypeError(TypeError, RuntimeError):
    """A tensor of the wrong dtype."""
