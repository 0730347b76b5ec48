"""tools/build/repos/fetch_wheels.py: from a lock and a wheelhouse to a folder for sys.path."""

from __future__ import annotations

import hashlib
import os
import pathlib
import subprocess
import sys
import zipfile

import pytest

SCRIPT = pathlib.Path(os.environ["ASTRAI_FETCH_WHEELS"]).resolve()


def make_wheel(folder: pathlib.Path, name: str = "probe") -> str:
    """Writes a small wheel; returns its line for a lock."""
    wheel = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    program = zipfile.ZipInfo(f"{name}/bin/tool")  # no mode bits, as in some vendors' wheels
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{name}/__init__.py", "VALUE = 7\n")
        archive.writestr(program, "#!/bin/sh\necho tool\n")
        archive.writestr(f"{name}-1.0.data/scripts/run-{name}", "#!python\n")
        archive.writestr(f"{name}-1.0.data/purelib/{name}/extra.py", "")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return f"{name}==1.0 --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"


def fetch(tmp_path: pathlib.Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--lock", str(tmp_path / "probe.lock")]
    command += ["--into", str(tmp_path / "into"), "--wheelhouse", str(tmp_path), *args]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_layout_and_modes(tmp_path: pathlib.Path) -> None:
    (tmp_path / "probe.lock").write_text(make_wheel(tmp_path))
    result = fetch(tmp_path)
    assert result.returncode == 0, result.stderr
    into = tmp_path / "into"
    assert (into / "probe/__init__.py").read_text() == "VALUE = 7\n"
    assert (into / "probe/extra.py").exists()
    assert os.access(into / "bin/run-probe", os.X_OK)
    assert os.access(into / "probe/bin/tool", os.X_OK)
    assert not os.access(into / "probe/__init__.py", os.X_OK)
    assert not list(into.rglob("*.pyc"))
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["into"]


def test_byte_code_does_not_depend_on_time_stamps(tmp_path: pathlib.Path) -> None:
    (tmp_path / "probe.lock").write_text(make_wheel(tmp_path))
    assert fetch(tmp_path, "--compile").returncode == 0
    (code,) = (tmp_path / "into/probe/__pycache__").glob("__init__*.pyc")
    flags = int.from_bytes(code.read_bytes()[4:8], "little")
    assert flags == 0b01  # hash-based, unchecked


def test_a_wheel_with_another_hash_is_refused(tmp_path: pathlib.Path) -> None:
    line = make_wheel(tmp_path)
    (tmp_path / "probe.lock").write_text(line[:-9] + "00000000\n")
    result = fetch(tmp_path)
    assert result.returncode == 1
    assert "probe.lock could not be had from the wheelhouse" in result.stderr
    assert "hash" in result.stderr.lower()


@pytest.mark.parametrize("requirement", ["absent==1.0 --hash=sha256:" + "0" * 64, "probe"])
def test_what_is_not_there_or_not_pinned_is_one_clear_error(
    tmp_path: pathlib.Path, requirement: str
) -> None:
    make_wheel(tmp_path)
    (tmp_path / "probe.lock").write_text(requirement + "\n")
    result = fetch(tmp_path)
    assert result.returncode == 1
    assert "the wheels of probe.lock could not be had" in result.stderr
    assert "Traceback" not in result.stderr
