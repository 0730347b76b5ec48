"""Runs pytest on the files given, for astrai_py_test.

Writes the JUnit report where Bazel looks for it, so that every case is counted, and honours Bazel's
--test_filter and its sharding. A run that collects no test fails; one that skips all passes.
"""

from __future__ import annotations

import os
import pathlib
import sys


class Shard:
    """Keeps the part of the collected tests that belongs to this shard."""

    def __init__(self, index: int, total: int) -> None:
        self.index, self.total = index, total

    def pytest_collection_modifyitems(self, config: object, items: list) -> None:
        """Called by pytest with all that it collected."""
        del config
        items[:] = items[self.index :: self.total]


def main() -> int:
    """Runs the command line; returns pytest's exit code."""
    # Bazel hands out a writable folder; the sources may be read-only.
    scratch = os.environ.get("TEST_TMPDIR")
    if scratch:
        os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(pathlib.Path(scratch, "hypothesis"))
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(pathlib.Path(scratch, "inductor")))
        os.environ.setdefault("HOME", scratch)
    sys.dont_write_bytecode = True
    # The machine's own packages may hold plugins; only those of the lock take part.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"

    import pytest

    args = ["-p", "_hypothesis_pytestplugin", "-p", "no:cacheprovider"]
    args += ["--import-mode=importlib", "-ra", "--durations=5"]
    args += ["--rootdir", os.getcwd(), "-c", os.devnull]
    report = os.environ.get("XML_OUTPUT_FILE")
    if report:
        args += ["--junitxml", report, "-o", "junit_family=xunit1"]
    only = os.environ.get("TESTBRIDGE_TEST_ONLY")
    if only:
        args += ["-k", only]
    plugins = []
    total = int(os.environ.get("TEST_TOTAL_SHARDS", "1"))
    if total > 1:
        pathlib.Path(os.environ["TEST_SHARD_STATUS_FILE"]).touch()
        plugins.append(Shard(int(os.environ["TEST_SHARD_INDEX"]), total))
    status = int(pytest.main(args + sys.argv[1:], plugins=plugins))
    if status == pytest.ExitCode.NO_TESTS_COLLECTED and (total > 1 or only):
        return 0  # nothing fell to this shard, or the filter is about other targets
    return status


if __name__ == "__main__":
    sys.exit(main())
