"""Text to train on: the sources of the running Python's own standard library, as bytes."""

from __future__ import annotations

import pathlib
import sysconfig

import torch

VOCAB_SIZE = 256
_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_VALIDATION_SHARE = 0.05


def source_files() -> list[pathlib.Path]:
    """The library's modules, without its tests, in a fixed order."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    files = []
    for path in root.rglob("*.py"):
        inner = path.relative_to(root)
        if not _NOT_LIBRARY.intersection(inner.parts):
            files.append((inner.as_posix(), path))
    return [path for _, path in sorted(files)]


class Corpus:
    """Bytes of the sources, split into what is trained on and what is not.

    Args:
        max_bytes: Stops after so many.

    Attributes:
        train: uint8 [bytes].
        validation: uint8 [bytes], the last twentieth.
        files: How many files were read.
    """

    def __init__(self, max_bytes: int) -> None:
        parts, size, self.files = [], 0, 0
        for path in source_files():
            try:
                data = path.read_bytes()
            except OSError:  # a broken link of a distribution
                continue
            parts.append(data)
            size += len(data)
            self.files += 1
            if size >= max_bytes:
                break
        data = torch.frombuffer(bytearray(b"".join(parts)[:max_bytes]), dtype=torch.uint8)
        cut = int(len(data) * (1 - _VALIDATION_SHARE))
        self.train, self.validation = data[:cut], data[cut:]

    def batch(
        self, part: torch.Tensor, batch: int, length: int, generator: torch.Generator
    ) -> torch.Tensor:
        """Random pieces of a part: int64 [batch, length + 1] on the CPU."""
        starts = torch.randint(len(part) - length - 1, (batch,), generator=generator)
        return part[starts[:, None] + torch.arange(length + 1)].long()
