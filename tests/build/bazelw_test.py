"""./bazelw: what it says on a machine that lacks something, and which configs it chooses.

Bazel itself is replaced by a program that prints its arguments.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

BAZELW = pathlib.Path(os.environ["ASTRAI_BAZELW"]).resolve()
TOOLS = [
    "bash",
    "cat",
    "cksum",
    "cut",
    "date",
    "dirname",
    "env",
    "find",
    "id",
    "mkdir",
    "paste",
    "realpath",
    "sed",
    "timeout",
]


class Machine:
    """A PATH of its own, and a home for caches."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.home = folder / "home"
        self.home.mkdir()
        self.env: dict[str, str] = {}
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool))

    def add(self, name: str, script: str) -> None:
        file = self.bin / name
        file.write_text(f"#!{shutil.which('bash')}\n{script}\n")
        file.chmod(0o755)

    def add_bazel(self, version: str = "7.7.1", name: str = "bazel") -> None:
        # "mod graph" is how the registry is asked.
        self.add(
            name,
            f'if [[ "$*" == --version ]]; then echo "bazel {version}"; exit; fi\n'
            'if [[ $1 == mod ]]; then exit "${REGISTRY_STATUS:-0}"; fi\n'
            'echo "called: $*"',
        )

    def add_python(self, torch: str = "") -> None:
        """A Python with everything; torch as told."""
        marker = "importlib.metadata"
        self.add(
            "python3",
            'if [[ $1 == - ]]; then program=$(cat); case $program in *"' + marker + '"*)'
            f' [[ -z "{torch}" ]] || echo "{torch}"; exit;; *) exit;; esac; fi\n'
            f'exec {sys.executable} "$@"',
        )

    def run(self, *args: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": str(self.bin), "HOME": str(self.home), "XDG_CACHE_HOME": str(self.cache())}
        return subprocess.run(
            [shutil.which("bash"), str(BAZELW), *args],
            env={**env, **self.env},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    def cache(self) -> pathlib.Path:
        # Not below /tmp, which bazelw refuses.
        folder = pathlib.Path(os.environ["TEST_TMPDIR"]) / self.home.parent.name
        folder.mkdir(parents=True, exist_ok=True)
        return folder


@pytest.fixture
def machine(tmp_path: pathlib.Path) -> Machine:
    made = Machine(tmp_path)
    yield made
    shutil.rmtree(made.cache(), ignore_errors=True)


@pytest.fixture
def complete(machine: Machine) -> Machine:
    machine.add_python()
    machine.add("g++", "exit 0")
    machine.add_bazel()
    return machine


def test_everything_that_is_missing_is_named_in_one_sentence(machine: Machine) -> None:
    result = machine.run("test", "//...")
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr == (
        "bazelw: this machine lacks python3, python3-dev, python3-venv, g++: run "
        '"apt-get install python3 python3-dev python3-venv g++" (on Debian and Ubuntu; elsewhere, '
        "what has the same).\n"
    )


def test_missing_compiler(machine: Machine) -> None:
    machine.add_python()
    machine.add_bazel()
    result = machine.run("build", "//...")
    assert result.returncode == 1
    assert result.stderr.startswith('bazelw: this machine lacks g++: run "apt-get install g++"')
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("printed", "packages"),
    [
        ("python3-dev", "python3-dev"),
        ("python3-venv", "python3-venv"),
        ("python3-dev\\npython3-venv", "python3-dev python3-venv"),
    ],
)
def test_missing_parts_of_python(machine: Machine, printed: str, packages: str) -> None:
    machine.add("python3", f'if [[ $1 == - ]]; then printf "{printed}\\n"; fi')
    machine.add("g++", "exit 0")
    result = machine.run("build", "//...")
    assert result.returncode == 1
    assert f'run "apt-get install {packages}"' in result.stderr
    assert result.stderr.count("\n") == 1


def test_python_that_is_too_old(machine: Machine) -> None:
    machine.add(
        "python3",
        "if [[ $1 == - ]]; then exit; fi; case $2 in *platform*) echo 3.9.2;; *) exit 1;; esac",
    )
    machine.add("g++", "exit 0")
    result = machine.run("build", "//...")
    assert result.returncode == 1
    assert "Python 3.10 or newer is needed and python3 is 3.9.2" in result.stderr


def test_without_bazel_and_without_apt_one_sentence_tells_of_bazelisk(machine: Machine) -> None:
    machine.add_python()
    machine.add("g++", "exit 0")
    result = machine.run("build", "//...")
    assert result.returncode == 1
    assert "install bazelisk" in result.stderr
    assert result.stderr.count("\n") == 1


def test_bazel_that_is_too_old_is_not_used(machine: Machine) -> None:
    machine.add_python()
    machine.add("g++", "exit 0")
    machine.add_bazel("6.5.0")
    result = machine.run("build", "//...")
    assert result.returncode == 1
    assert "no Bazel 7 or newer on PATH" in result.stderr


@pytest.mark.parametrize("name", ["bazel", "bazelisk"])
def test_bazel_of_path_with_a_registry_gets_no_config(machine: Machine, name: str) -> None:
    machine.add_python()
    machine.add("g++", "exit 0")
    machine.add_bazel("8.1.0", name)
    result = machine.run("test", "//...", "--keep_going")
    assert result.stdout == "called: test //... --keep_going\n"


def test_without_a_registry_the_build_is_offline(complete: Machine) -> None:
    complete.env["REGISTRY_STATUS"] = "1"
    assert complete.run("test", "//...").stdout == "called: test --config=offline //...\n"


def test_the_answer_of_the_registry_is_kept(complete: Machine) -> None:
    first = complete.run("build", "//...")
    assert "asking the Bazel Central Registry" in first.stderr
    complete.env["REGISTRY_STATUS"] = "1"
    second = complete.run("build", "//...")
    assert second.stderr == ""
    assert second.stdout == "called: build //...\n"


@pytest.mark.parametrize(("value", "config"), [("1", " --config=offline"), ("0", "")])
def test_offline_can_be_set(complete: Machine, value: str, config: str) -> None:
    complete.env["ASTRAI_OFFLINE"] = value
    assert complete.run("build", "//a").stdout == f"called: build{config} //a\n"


def test_torch_of_the_machine_is_used_and_named(complete: Machine) -> None:
    complete.add_python(torch="2.11.0")
    complete.env["ASTRAI_OFFLINE"] = "0"
    result = complete.run("test", "//...")
    assert result.stdout == "called: test --config=system_torch //...\n"
    assert "torch 2.11.0" in result.stderr


def test_locked_torch_can_be_asked_for(complete: Machine) -> None:
    complete.add_python(torch="2.11.0")
    complete.env.update(ASTRAI_OFFLINE="0", ASTRAI_TORCH="lock")
    result = complete.run("test", "//...")
    assert result.stdout == "called: test //...\n"


def test_a_carried_bazel_goes_before_that_of_path(complete: Machine) -> None:
    prefix = complete.cache() / "carried"
    (prefix / "bin").mkdir(parents=True)
    complete.add("carried", 'echo "carried: $*"')
    shutil.move(complete.bin / "carried", prefix / "bin" / "bazel")
    complete.env["ASTRAI_BAZEL_PREFIX"] = str(prefix)
    assert complete.run("build", "//a").stdout == "carried: build --config=offline //a\n"


def test_startup_options_stay_before_the_command(complete: Machine) -> None:
    complete.env["ASTRAI_OFFLINE"] = "1"
    result = complete.run("--output_base=/var/tmp/x", "build", "//a", "--", "-//b")
    assert result.stdout == "called: --output_base=/var/tmp/x build --config=offline //a -- -//b\n"


def test_commands_without_a_build_get_no_config(complete: Machine) -> None:
    complete.env["ASTRAI_OFFLINE"] = "1"
    assert complete.run("shutdown").stdout == "called: shutdown\n"
