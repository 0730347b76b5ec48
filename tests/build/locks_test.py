"""The lock files: every requirement is pinned by hash, and none says where it is to be had."""

from __future__ import annotations

import os
import pathlib
import re

import pytest

LOCKS = {pathlib.Path(name).stem: pathlib.Path(name) for name in os.environ["ASTRAI_LOCKS"].split()}
PYTHONS = ["3.10", "3.11", "3.12", "3.13", "3.14"]

REQUIREMENT = re.compile(
    r"(?P<name>[a-z0-9-]+)==(?P<version>[\w.]+)(?: ; (?P<marker>python_version [^-]*?))?"
    r"(?P<hashes>(?: --hash=sha256:[0-9a-f]{64})+)"
)


def requirements(lock: str) -> list[re.Match[str]]:
    lines = LOCKS[lock].read_text().splitlines()
    matches = [REQUIREMENT.fullmatch(line) for line in lines if not line.startswith("#")]
    assert all(matches), lock
    return matches


def holds(marker: str | None, python: str) -> bool:
    """Evaluates the two forms of bounds that tools/lock.py writes."""
    minor = int(python.split(".")[1])
    for bound in (marker or "").split(" and "):
        match = re.fullmatch(r'python_version (>=|<) "3\.(\d+)" ?', bound)
        assert match or not bound, bound
        if match:
            limit = int(match[2])
            if not (minor >= limit if match[1] == ">=" else minor < limit):
                return False
    return True


def test_the_locks_that_the_build_reads_are_there() -> None:
    assert {"cuda", "dlpack", "models", "numpy", "smollm2", "test", "torch", "torch_cuda"} <= set(
        LOCKS
    )


@pytest.mark.parametrize("lock", sorted(LOCKS))
def test_every_requirement_is_pinned_by_version_and_hash(lock: str) -> None:
    assert requirements(lock)


@pytest.mark.parametrize("lock", sorted(LOCKS))
def test_no_lock_names_a_host_or_a_path(lock: str) -> None:
    text = LOCKS[lock].read_text()
    assert "://" not in text
    assert "--index" not in text and "--find-links" not in text and "--extra" not in text
    assert not re.search(r"(^|\s)/\w", text)


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("lock", sorted(LOCKS))
def test_each_python_gets_every_name_once(lock: str, python: str) -> None:
    names = [m["name"] for m in requirements(lock) if holds(m["marker"], python)]
    assert len(names) == len(set(names))
    if lock == "torch":
        assert "torch" in names


def test_torch_is_listed_as_the_cpu_build_and_as_the_cuda_builds() -> None:
    (torch,) = [m for m in requirements("torch") if m["name"] == "torch"]
    # One CUDA build for each Python, and at least one CPU build that some machines carry.
    assert torch["hashes"].count("sha256") > len(PYTHONS)
