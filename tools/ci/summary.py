"""Counts test cases of Bazel runs and of JUnit reports; prints `N passed, N failed, N skipped`.

    summary.py [--failed-logs FOLDER] FILE ...

A FILE is what Bazel writes with --build_event_json_file, or a JUnit report (*.xml). Cases are read
from the test.xml of each test. A test that is incompatible with this machine (a GPU test where
there is no GPU) is one skipped case, one that could not be built is one failed case.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import shutil
import sys
import urllib.parse
from collections.abc import Iterator
from xml.etree import ElementTree


@dataclasses.dataclass
class Counts:
    """Numbers of cases."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def add(self, other: Counts) -> None:
        """Adds another count to this one."""
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"


def count_report(path: pathlib.Path) -> Counts:
    """Counts the cases of a JUnit report."""
    counts = Counts()
    for case in ElementTree.parse(path).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            counts.failed += 1
        elif case.find("skipped") is not None or case.get("status") == "notrun":
            counts.skipped += 1
        else:
            counts.passed += 1
    return counts


@dataclasses.dataclass
class Target:
    """What the events say of one target."""

    is_test: bool = False
    incompatible: bool = False
    built: bool = False
    # (run, shard) -> (attempt, status, {name of the output: path})
    results: dict[tuple[int, int], tuple[int, str, dict[str, pathlib.Path]]] = dataclasses.field(
        default_factory=dict
    )

    def counts(self, finished: bool) -> Counts:
        """The cases of this target, if it is a test; finished: all tests that had to run did."""
        if not self.is_test:
            return Counts()
        if self.incompatible:
            return Counts(skipped=1)
        if not self.results:
            if self.built and finished:
                return Counts()  # left out by a filter
            return Counts(failed=1)  # not built, or never started
        total = Counts()
        for _, status, outputs in self.results.values():
            report = outputs.get("test.xml")
            try:
                counts = count_report(report) if report else Counts()
            except (OSError, ElementTree.ParseError):
                counts = Counts()
            passed = status in ("PASSED", "FLAKY")
            if passed and counts == Counts():
                counts = Counts(passed=1)
            if not passed and not counts.failed:
                counts.failed = 1  # it crashed or ran out of time
            total.add(counts)
        return total


# Exit codes of Bazel.
_SUCCESS = 0
_TESTS_FAILED = 3


def read_events(path: pathlib.Path) -> tuple[dict[str, Target], int | None]:
    """Returns the targets of one Bazel command, and its exit code (None: it was ended)."""
    targets: dict[str, Target] = {}
    code = None
    for line in path.read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        kind, identity = next(iter(event["id"].items()))
        label = identity.get("label", "") if isinstance(identity, dict) else ""
        target = targets.setdefault(label, Target()) if label else Target()
        if kind == "targetConfigured":
            target.is_test = (
                event.get("configured", {}).get("targetKind", "").endswith("_test rule")
            )
        elif kind == "targetCompleted":
            target.built = event.get("completed", {}).get("success", False)
            target.incompatible = event.get("aborted", {}).get("reason") == "SKIPPED"
        elif kind == "testResult":
            result = event["testResult"]
            outputs = {
                output["name"]: pathlib.Path(
                    urllib.parse.unquote(urllib.parse.urlparse(output["uri"]).path)
                )
                for output in result.get("testActionOutput", [])
                if "uri" in output
            }
            key = (identity.get("run", 1), identity.get("shard", 1))
            attempt = identity.get("attempt", 1)
            if key not in target.results or attempt >= target.results[key][0]:
                target.results[key] = (attempt, result["status"], outputs)
        elif kind == "buildFinished":
            code = event.get("finished", {}).get("exitCode", {}).get("code", _SUCCESS)
    return targets, code


def copy_logs(targets: dict[str, Target], folder: pathlib.Path) -> None:
    """Copies the logs of failed tests into a folder."""
    for label, target in targets.items():
        for (run, shard), (_, status, outputs) in target.results.items():
            log = outputs.get("test.log")
            if status not in ("PASSED", "FLAKY") and log and log.exists():
                name = label.strip("/@").replace("/", "_").replace(":", "_")
                shutil.copy(log, folder / f"{name}.{run}.{shard}.log")


def summarize(paths: list[pathlib.Path], logs: pathlib.Path | None) -> Iterator[str]:
    """Yields the lines of the summary; the last one has the totals."""
    total = Counts()
    for path in paths:
        if path.suffix == ".xml":
            counts = count_report(path)
            yield f"{path.stem}: {counts}"
            total.add(counts)
            continue
        targets, code = read_events(path)
        sub = Counts()
        for label, target in sorted(targets.items()):
            counts = target.counts(finished=code in (_SUCCESS, _TESTS_FAILED))
            sub.add(counts)
            if target.is_test:
                yield f"{label}: {'SKIPPED (incompatible)' if target.incompatible else counts}"
        if code != _SUCCESS and not sub.failed:
            sub.failed = 1  # something that is no test could not be built
            yield f"{path.stem}: the command failed"
        total.add(sub)
        if logs:
            copy_logs(targets, logs)
    yield str(total)


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--failed-logs", type=pathlib.Path)
    parser.add_argument("files", nargs="+", type=pathlib.Path)
    args = parser.parse_args()
    line = ""
    for line in summarize(args.files, args.failed_logs):
        print(line)
    return 0 if ", 0 failed," in line else 1


if __name__ == "__main__":
    sys.exit(main())
