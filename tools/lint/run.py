"""Format and lint checks over every file that git knows or would add.

    tools/lint/run.py            # check; exit code 1 when something is not right
    tools/lint/run.py --fix      # write what the formatters want

ruff and clang-format come from third_party/locks/lint.lock by pip, buildifier from
package-lock.json by npm; both are kept in the cache folder.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import time
from xml.etree import ElementTree

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
LOCK = ROOT / "third_party/locks/lint.lock"
NPM_FILES = [ROOT / "tools/lint/package.json", ROOT / "tools/lint/package-lock.json"]

# Of buildifier's warnings: the stand-in for rules_cuda has to run with rule sets that do not have
# the newer load paths yet.
BUILDIFIER_OFF = ["native-cc-common", "native-cc-info"]


def cache(name: str, *files: pathlib.Path) -> pathlib.Path:
    """A cache folder that belongs to one state of some files."""
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    base = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    return base / "astrai" / f"{name}-{sys.version_info[0]}.{sys.version_info[1]}-{digest}"


def python_tools() -> pathlib.Path:
    """The bin folder of an environment with ruff and clang-format."""
    folder = cache("lint", LOCK)
    if not (folder / "done").exists():
        print("lint: installing ruff and clang-format", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        install = [str(folder / "bin/python"), "-m", "pip", "install", "--quiet"]
        install += ["--disable-pip-version-check", "--no-deps", "--require-hashes", "-r", str(LOCK)]
        subprocess.run(install, check=True, env={**os.environ, "PIP_CONSTRAINT": os.devnull})
        (folder / "done").touch()
    return folder / "bin"


def buildifier() -> str | None:
    """The path of buildifier; None where there is no npm."""
    folder = cache("buildifier", *NPM_FILES)
    program = folder / "node_modules/@bazel/buildifier/buildifier-linux_amd64"
    if not program.exists():
        npm = shutil.which("npm")
        if npm is None:
            return None
        print("lint: installing buildifier", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        for file in NPM_FILES:
            shutil.copy(file, folder)
        command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--silent"]
        subprocess.run(command, check=True, cwd=folder)
    program.chmod(0o755)
    return str(program)


def files(*patterns: str) -> list[str]:
    """Files that git knows or would add, by pattern, that exist."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "--"]
    listing = subprocess.run([*command, *patterns], check=True, cwd=ROOT, capture_output=True)
    names = listing.stdout.decode().split("\0")
    return sorted({name for name in names if name and (ROOT / name).is_file()})


def checks(fix: bool) -> dict[str, list[str]]:
    """The command of each check, by its name."""
    tools = python_tools()
    python = files("*.py")
    cpp = files("*.h", "*.cuh", "*.cu", "*.cc")
    starlark = files("*.bzl", "*.bazel", "WORKSPACE", "*/WORKSPACE")
    found = {
        "ruff": [str(tools / "ruff"), "check", "--quiet", *(["--fix"] if fix else []), *python],
        "ruff-format": [
            *(str(tools / "ruff"), "format", "--quiet"),
            *([] if fix else ["--diff"]),
            *python,
        ],
        "clang-format": [
            str(tools / "clang-format"),
            *(["-i"] if fix else ["--dry-run", "--Werror"]),
            *cpp,
        ],
    }
    program = buildifier()
    if program:
        off = ",".join(f"-{warning}" for warning in BUILDIFIER_OFF)
        mode = ["-mode=fix"] if fix else ["-mode=check"]
        found["buildifier"] = [program, *mode, "-lint=warn", f"-warnings={off}", *starlark]
    return found


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fix", action="store_true")
    parser.add_argument("--junit", help="file for a JUnit report, a case for each check")
    args = parser.parse_args()

    suite = ElementTree.Element("testsuite", name="lint")
    failed = 0
    for name, command in checks(args.fix).items():
        start = time.time()
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        seconds = time.time() - start
        case = ElementTree.SubElement(suite, "testcase", name=name, classname="lint")
        case.set("time", f"{seconds:.1f}")
        print(f"lint: {name}: {'failed' if result.returncode else 'ok'}", flush=True)
        if result.returncode:
            failed += 1
            print(result.stdout + result.stderr, flush=True)
            ElementTree.SubElement(case, "failure", message="see the log")
    if "buildifier" not in {case.get("name") for case in suite}:
        print("lint: buildifier: skipped, npm is not here (apt-get install npm)", flush=True)
        case = ElementTree.SubElement(suite, "testcase", name="buildifier", classname="lint")
        ElementTree.SubElement(case, "skipped", message="no npm")
    if args.junit:
        ElementTree.ElementTree(suite).write(args.junit, encoding="utf-8", xml_declaration=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
