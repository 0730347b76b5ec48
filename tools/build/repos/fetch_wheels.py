"""Downloads the wheels of a lock file with pip and unpacks them into one folder.

    fetch_wheels.py --lock LOCK [--lock ...] --into FOLDER [--wheelhouse FOLDER] [--compile]

pip finds the wheels by name, so no address stands in this repository; --require-hashes makes sure
that they are the ones that were locked. With --wheelhouse (a folder of wheels) no index is asked.

--compile writes byte code whose validity does not depend on time stamps: tests import these folders
read-only.
"""

from __future__ import annotations

import argparse
import compileall
import importlib.util
import os
import pathlib
import py_compile
import shutil
import subprocess
import sys
import tempfile
import zipfile


def pip_command(scratch: str, wheelhouse: str) -> list[str]:
    """The command that runs pip: this Python's own, the wheelhouse's, or a fresh environment's.

    Debian's python3-venv brings pip into virtual environments only.
    """
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    for wheel in pathlib.Path(wheelhouse).glob("pip-*.whl") if wheelhouse else ():
        return [sys.executable, str(wheel / "pip")]
    folder = os.path.join(scratch, "venv")
    made = subprocess.run(
        [sys.executable, "-m", "venv", folder], capture_output=True, text=True, check=False
    )
    if made.returncode:
        sys.exit(f"{sys.executable} has neither pip nor venv: install python3-venv")
    return [os.path.join(folder, "bin", "python"), "-m", "pip"]


def download(lock: str, into: str, wheelhouse: str, pip: list[str]) -> list[pathlib.Path]:
    """Lets pip fetch the lock's wheels; exits with one clear message when it cannot."""
    command = [*pip, "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--require-hashes", "--only-binary", ":all:", "-d", into, "-r", lock]
    if wheelhouse:
        command += ["--no-index", "--find-links", wheelhouse]
    # A machine may carry constraints for its own work; here every version is pinned already.
    env = dict(os.environ, PIP_CONSTRAINT=os.devnull, PIP_PROGRESS_BAR="off")
    for attempt in (1, 2, 3):  # a registry may answer with a passing error
        result = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if result.returncode == 0:
            return sorted(pathlib.Path(into).glob("*.whl"))
        if wheelhouse or "HASH" in result.stderr.upper() or attempt == 3:
            break
    where = f"from the wheelhouse {wheelhouse}" if wheelhouse else "by pip"
    name = pathlib.Path(lock).name
    python = "Python {}.{}".format(*sys.version_info)
    sys.exit(f"the wheels of {name} could not be had {where} for {python}:\n{result.stderr}")


def unpack(wheel: pathlib.Path, into: pathlib.Path) -> None:
    """Lays a wheel's files out as an installer would (scripts go to bin/)."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            if member.is_dir():
                continue
            parts = pathlib.PurePosixPath(member.filename).parts
            if parts[0].endswith(".data"):  # NAME.data/{purelib,platlib,scripts,data,headers}/...
                folder = {"scripts": ("bin",)}.get(parts[1], ())
                parts = folder + parts[2:]
            target = into.joinpath(*parts)
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(member) as source, open(target, "wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
            # Some wheels carry programs without the mode bits of programs.
            executable = "bin" in parts[:-1] or (member.external_attr >> 16) & 0o100
            target.chmod(0o755 if executable else 0o644)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lock", action="append", required=True)
    parser.add_argument("--into", required=True)
    parser.add_argument("--wheelhouse", default="")
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()

    into = pathlib.Path(args.into)
    into.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that big wheels do not fill a small /tmp.
    with tempfile.TemporaryDirectory(dir=into.parent) as scratch:
        pip = pip_command(scratch, args.wheelhouse)
        for number, lock in enumerate(args.lock):
            folder = pathlib.Path(scratch, str(number))
            folder.mkdir()
            for wheel in download(lock, str(folder), args.wheelhouse, pip):
                unpack(wheel, into)
                wheel.unlink()
    if args.compile:
        compileall.compile_dir(
            into,
            quiet=2,  # some packages ship files for other Pythons
            workers=0,
            invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        )


if __name__ == "__main__":
    main()
