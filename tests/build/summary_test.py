"""tools/ci/summary.py: what counts as passed, failed and skipped."""

from __future__ import annotations

import json
import pathlib

import pytest

from tools.ci import summary

CASES = {
    "passes": "<testsuite><testcase name='a'/><testcase name='b'/></testsuite>",
    "mixed": (
        "<testsuites><testsuite><testcase name='a'/><testcase name='b'><failure/></testcase>"
        "<testcase name='c'><skipped/></testcase><testcase name='d'><error/></testcase>"
        "</testsuite></testsuites>"
    ),
    "empty": "<testsuite/>",
    "broken": "<testsuite",
}


class Events:
    """Writes a file as Bazel does with --build_event_json_file."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.lines: list[dict] = []

    def configured(self, label: str, kind: str = "py_test rule") -> None:
        self.lines.append({"id": {"targetConfigured": {"label": label}}})
        self.lines[-1]["configured"] = {"targetKind": kind}

    def completed(self, label: str, success: bool = True, reason: str = "") -> None:
        event: dict = {"id": {"targetCompleted": {"label": label}}}
        event.update({"aborted": {"reason": reason}} if reason else {"completed": {}})
        if success and not reason:
            event["completed"]["success"] = True
        self.lines.append(event)

    def result(self, label: str, status: str, xml: str, attempt: int = 1, shard: int = 1) -> None:
        report = self.folder / f"{label.strip('/').replace(':', '_')}_{attempt}_{shard}.xml"
        report.write_text(xml)
        log = report.with_suffix(".log")
        log.write_text("the log")
        self.configured(label)
        self.completed(label)
        identity = {"label": label, "run": 1, "shard": shard, "attempt": attempt}
        outputs = [{"name": "test.xml", "uri": report.as_uri()}]
        outputs.append({"name": "test.log", "uri": log.as_uri()})
        self.lines.append({"id": {"testResult": identity}})
        self.lines[-1]["testResult"] = {"status": status, "testActionOutput": outputs}

    def summary(self, code: int = 0, logs: pathlib.Path | None = None) -> str:
        finished = {"id": {"buildFinished": {}}, "finished": {"exitCode": {"code": code}}}
        path = self.folder / "events.json"
        path.write_text("\n".join(json.dumps(line) for line in [*self.lines, finished]))
        return list(summary.summarize([path], logs))[-1]


@pytest.fixture
def events(tmp_path: pathlib.Path) -> Events:
    return Events(tmp_path)


def test_cases_are_counted_and_not_targets(events: Events) -> None:
    events.result("//a:x_test", "PASSED", CASES["passes"])
    events.result("//a:y_test", "FAILED", CASES["mixed"])
    assert events.summary(code=3) == "3 passed, 2 failed, 1 skipped"


def test_an_incompatible_test_is_skipped_and_never_passed(events: Events) -> None:
    events.configured("//a:gpu_test", "cc_test rule")
    events.completed("//a:gpu_test", reason="SKIPPED")
    events.configured("//a:_gpu_test", "cuda_library rule")  # no test, so no case
    events.completed("//a:_gpu_test", reason="SKIPPED")
    assert events.summary() == "0 passed, 0 failed, 1 skipped"


def test_a_test_that_cannot_be_built_is_failed(events: Events) -> None:
    events.configured("//a:x_test")
    events.completed("//a:x_test", success=False)
    assert events.summary(code=1) == "0 passed, 1 failed, 0 skipped"


def test_a_broken_build_without_a_test_is_failed(events: Events) -> None:
    events.result("//a:x_test", "PASSED", CASES["passes"])
    assert events.summary(code=1) == "2 passed, 1 failed, 0 skipped"


@pytest.mark.parametrize("xml", ["empty", "broken", "passes"])
def test_a_test_that_crashed_is_failed_whatever_its_report_says(events: Events, xml: str) -> None:
    events.result("//a:x_test", "TIMEOUT", CASES[xml])
    passed = 2 if xml == "passes" else 0
    assert events.summary(code=3) == f"{passed} passed, 1 failed, 0 skipped"


def test_a_test_without_cases_in_its_report_is_one_case(events: Events) -> None:
    events.result("//a:x_test", "PASSED", CASES["empty"])
    assert events.summary() == "1 passed, 0 failed, 0 skipped"


@pytest.mark.parametrize(("code", "failed"), [(0, 0), (3, 0), (8, 1)])
def test_a_test_that_did_not_run_is_failed_unless_a_filter_left_it_out(
    events: Events, code: int, failed: int
) -> None:
    # 3: tests failed, after all ran; 8: the command was interrupted.
    events.configured("//a:filtered_test")
    events.completed("//a:filtered_test")
    status = "FAILED" if code == 3 else "PASSED"
    events.result("//a:x_test", status, CASES["mixed" if code == 3 else "passes"])
    counted = summary.Counts(1, 2, 1) if code == 3 else summary.Counts(2, failed, 0)
    assert events.summary(code=code) == str(counted)


def test_the_last_attempt_counts_and_shards_add_up(events: Events) -> None:
    events.result("//a:x_test", "FAILED", CASES["mixed"], attempt=1)
    events.result("//a:x_test", "PASSED", CASES["passes"], attempt=2)
    events.result("//a:x_test", "PASSED", CASES["passes"], shard=2)
    assert events.summary() == "4 passed, 0 failed, 0 skipped"


def test_logs_of_failed_tests_are_kept(events: Events, tmp_path: pathlib.Path) -> None:
    events.result("//a:x_test", "FAILED", CASES["mixed"])
    events.result("//a:y_test", "PASSED", CASES["passes"])
    logs = tmp_path / "logs"
    logs.mkdir()
    events.summary(code=3, logs=logs)
    assert [path.name for path in logs.iterdir()] == ["a_x_test.1.1.log"]


def test_reports_of_other_tools_are_added(tmp_path: pathlib.Path) -> None:
    report = tmp_path / "lint.xml"
    report.write_text(CASES["mixed"])
    assert list(summary.summarize([report], None))[-1] == "1 passed, 2 failed, 1 skipped"
