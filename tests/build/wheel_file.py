"""The wheel that the build made, for the tests of this folder."""

from __future__ import annotations

import functools
import os
import pathlib
import zipfile

import pytest


@functools.cache
def path() -> pathlib.Path:
    """The only file in the folder that //python:astrai_wheel makes."""
    files = sorted(pathlib.Path(os.environ["ASTRAI_WHEEL_DIR"]).iterdir())
    assert [file.suffix for file in files] == [".whl"], files
    return files[0]


@functools.cache
def members() -> dict[str, bytes]:
    """What the wheel holds, by name."""
    with zipfile.ZipFile(path()) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name) for name in archive.namelist()}


def modules() -> dict[str, bytes]:
    """The extension modules, by the name that Python imports."""
    found = {}
    for name, data in members().items():
        if data.startswith(b"\x7fELF"):
            found[pathlib.PurePosixPath(name).name.split(".")[0]] = data
    return found


@pytest.fixture(scope="session")
def module_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    """The extension modules as files."""
    folder = tmp_path_factory.mktemp("modules")
    files = {}
    for name, data in modules().items():
        files[name] = folder / f"{name}.so"
        files[name].write_bytes(data)
    return files
