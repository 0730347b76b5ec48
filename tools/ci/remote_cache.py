"""Checks --config=remote against an HTTP cache that this script starts on the loopback address.

    remote_cache.py --bazel ./bazelw [--junit FILE]

A small target is built with a macro that nothing reads, so that its actions run and are uploaded;
then with another macro, so that Bazel's own action cache holds that one; then with the first again,
which must come from the remote cache alone.
"""

from __future__ import annotations

import argparse
import http.server
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
import uuid
from xml.etree import ElementTree

TARGET = "//tests/kernels/testing:testing"


class Cache(http.server.BaseHTTPRequestHandler):
    """GET and PUT of /ac/KEY and /cas/KEY, in memory."""

    protocol_version = "HTTP/1.1"
    entries: dict[str, bytes] = {}  # noqa: RUF012 (one store for all requests is what is meant)

    def do_GET(self) -> None:
        """Answers with an entry, or with 404."""
        data = self.entries.get(self.path)
        self.send_response(404 if data is None else 200)
        self.send_header("Content-Length", str(len(data or b"")))
        self.end_headers()
        self.wfile.write(data or b"")

    def do_PUT(self) -> None:
        """Keeps an entry."""
        self.entries[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Says nothing."""


def spawns(log: pathlib.Path) -> list[dict]:
    """The entries of Bazel's execution log, which are JSON objects one after another."""
    decoder, text, entries = json.JSONDecoder(), log.read_text(), []
    while text := text.lstrip():
        entry, end = decoder.raw_decode(text)
        entries.append(entry)
        text = text[end:]
    return entries


def build(bazel: str, port: int, value: str, scratch: pathlib.Path) -> list[str]:
    """Builds the target; returns what ran its compilations, such as "remote cache hit"."""
    log = scratch / f"{uuid.uuid4()}.json"
    command = [bazel, "build", "--config=remote", f"--remote_cache=http://127.0.0.1:{port}"]
    command += [f"--copt=-DASTRAI_PROBE_{value}", f"--execution_log_json_file={log}"]
    command += ["--noshow_progress", TARGET]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{result.stderr}")
    return [entry["runner"] for entry in spawns(log) if entry.get("mnemonic") == "CppCompile"]


def check(bazel: str) -> str:
    """Returns "" or what is wrong."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Cache)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    first, second = uuid.uuid4().hex, uuid.uuid4().hex
    try:
        with tempfile.TemporaryDirectory() as scratch:
            folder = pathlib.Path(scratch)
            runs = [build(bazel, server.server_port, v, folder) for v in (first, second, first)]
    finally:
        server.shutdown()
    print(f"remote_cache: {len(Cache.entries)} entries; compilations ran by: {runs}")
    if not all(runs) or any("remote cache hit" in runner for runner in runs[0] + runs[1]):
        return f"the first two builds had to run their compilations, and: {runs[:2]}"
    if set(runs[2]) != {"remote cache hit"}:
        return f"the third build had to come from the remote cache, and: {runs[2]}"
    if not any(re.match(r"/ac/[0-9a-f]{64}$", key) for key in Cache.entries):
        return "no action result was uploaded"
    return ""


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bazel", required=True)
    parser.add_argument("--junit")
    args = parser.parse_args()
    problem = check(args.bazel)
    print(f"remote_cache: {problem or 'ok'}")
    if args.junit:
        suite = ElementTree.Element("testsuite", name="remote_cache")
        case = ElementTree.SubElement(
            suite, "testcase", name="http_cache", classname="remote_cache"
        )
        if problem:
            ElementTree.SubElement(case, "failure", message=problem)
        ElementTree.ElementTree(suite).write(args.junit, encoding="utf-8", xml_declaration=True)
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
