"""Writes measured rows into a Markdown file as tables, and draws their charts beside it.

    python -m tools.bench.report --markdown docs/gpu-results.md attention.jsonl rotary.jsonl

Reads what the benchmarks wrote with --json. Only the part of the Markdown file between the lines
`<!-- tables -->` and `<!-- /tables -->` is replaced; the rest is written by hand. Charts go into
the folder of the Markdown file, or --charts. Of rows that measure the same, the last one counts.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from absl import app, flags

from tools.bench import (
    attention_rows,
    bench_rope_append,
    bench_rotary,
    engine_models,
    goals,
    plot,
)
from tools.bench.results import Row, Work

BEGIN, END = "<!-- tables -->", "<!-- /tables -->"
HOST_TIME = "host_time"

# What a call of each operator must do: the JSON holds only the larger of its bounds.
WORK: dict[str, Callable[[dict[str, Any]], Work]] = {
    **attention_rows.WORK,
    "rotary": bench_rotary.rotary_work,
    "rope_append_kv": bench_rope_append.rope_append_work,
    "engine": engine_models.engine_work,
}
# Columns that say nothing new beside the variant.
TOLD_BY_VARIANT = {
    "prefill": {"causal"},
    "paged_prefill": {"causal", "page_size"},
    "paged_decode": {"page_size", "q_len", "cache", "window_left", "ragged", "deterministic"},
    "rotary": {"interleaved"},
    "rope_append_kv": {"page_size", "interleaved", "cache"},
    "engine": {"part"},
}

_RATES = {"tflops": "TFLOP/s", "tbps": "TB/s"}
_REQUIRED = ("op", "shape", "dtype", "variant", "us", "peer", "peer_us", "ratio", "floor_us")
_CHART_DPI = 90

_MARKDOWN = flags.DEFINE_string("markdown", None, "Markdown file to write the tables into.")
_CHARTS = flags.DEFINE_string("charts", None, "Folder of the charts; default: that of --markdown.")

Line = dict[str, Any]


def read_lines(paths: Iterable[str | os.PathLike[str]]) -> list[Line]:
    """Reads files of JSON lines, in order; of lines that measure the same, the last one counts.

    Raises:
      ValueError: a line is not JSON or lacks a field; the message names file and line.
    """
    found: dict[str, Line] = {}
    for path in paths:
        text = pathlib.Path(path).read_text(encoding="utf-8")
        for number, raw in enumerate(text.splitlines(), 1):
            if not raw.strip():
                continue
            where = f"{path}:{number}"
            try:
                line = json.loads(raw)
            except json.JSONDecodeError as error:
                raise ValueError(f"{where}: must be one JSON object, got: {error}") from None
            if not isinstance(line, dict):
                raise ValueError(f"{where}: must be one JSON object, got {raw[:60]}")
            host = line.get("op") == HOST_TIME
            needed = ("op", "variant", "us") if host else _REQUIRED
            missing = [name for name in needed if name not in line]
            if missing or not (host or any(name in line for name in _RATES)):
                raise ValueError(f"{where}: must have {', '.join(missing) or 'tflops or tbps'}")
            key = [line["op"], line["variant"], line.get("dtype"), line.get("shape")]
            found[json.dumps([*key, line.get("peer")], sort_keys=True)] = line
    return list(found.values())


def to_rows(lines: Iterable[Line]) -> list[Row]:
    """Returns the lines whose operator is in WORK as rows, for charts.

    Raises:
      ValueError: the rate of a line is not the one that today's count of the work gives.
    """
    rows = []
    for line in lines:
        if line["op"] not in WORK:
            continue
        work = WORK[line["op"]](line["shape"])
        measured, counted = line.get(work.unit), work.rate(line["us"])
        # Both are written with three decimals.
        if measured is None or abs(measured - counted) > 0.001 + 0.01 * counted:
            raise ValueError(
                f"{line['op']} {line['shape']}: {work.unit} must be {counted:.3f} by the work that "
                f"the benchmark counts now, got {measured}: measure it again"
            )
        rows.append(
            Row(
                op=line["op"],
                shape=line["shape"],
                dtype=line["dtype"],
                variant=line["variant"],
                us=line["us"],
                work=work,
                peer=line["peer"],
                peer_us=line["peer_us"],
                gpu=line.get("gpu", "unknown GPU"),
                torch=line.get("torch", "unknown"),
                date=line.get("date", "unknown date"),
            )
        )
    return rows


def _distinct(lines: Iterable[Line], name: str) -> str:
    return ", ".join(sorted({str(line[name]) for line in lines if name in line}))


def tables(lines: Sequence[Line], charts: dict[str, str] | None = None) -> str:
    """Returns the Markdown of all lines: what they were measured on, then one table per operator.

    Args:
      lines: as read_lines returns them.
      charts: operator -> path of its chart as seen from the Markdown file.
    """
    measured = [line for line in lines if line["op"] != HOST_TIME]
    parts = []
    if measured:
        gpu, torch, date = (_distinct(measured, name) for name in ("gpu", "torch", "date"))
        parts.append(f"Measured on {gpu} with torch {torch}, {date}.")
    judged = goals.judge(to_rows(measured))
    for op in dict.fromkeys(line["op"] for line in measured):
        parts.append(f"### {op}")
        mine = [judgement for judgement in judged if judgement.op == op]
        if mine:
            parts.append("Goals: " + "; ".join(goals.counts(mine)) + ".")
        parts.append(_op_table(op, [line for line in measured if line["op"] == op]))
        if charts and op in charts:
            parts.append(f"![Roofline and ratios of {op}]({charts[op]})")
    host = [line for line in lines if line["op"] == HOST_TIME]
    if host:
        parts.append("### Host time of a call")
        rows = [[line["variant"], f"{line['us']:.2f}"] for line in host]
        parts.append(_markdown(["call", "us"], rows))
    return "\n\n".join(parts)


def _op_table(op: str, lines: Sequence[Line]) -> str:
    """One row per shape, dtype and variant, with all its peers; what all rows share goes above."""
    groups: dict[str, list[Line]] = {}
    for line in lines:
        key = json.dumps([line["shape"], line["dtype"], line["variant"]], sort_keys=True)
        groups.setdefault(key, []).append(line)
    firsts = [group[0] for group in groups.values()]
    facts = [{"dtype": f["dtype"], "variant": f["variant"], **f["shape"]} for f in firsts]
    names = list(dict.fromkeys(name for fact in facts for name in fact))
    names = [name for name in names if not _told(op, name, facts)]
    shared = {n: facts[0].get(n) for n in names if len({str(f.get(n)) for f in facts}) == 1}
    columns = [name for name in names if name not in shared]
    peers = list(dict.fromkeys(line["peer"] for line in lines))

    header = [*columns, "us", "rate", "of floor"]
    if op == "engine":
        header.insert(len(columns), "tokens/s")
    for peer in peers:
        header += [f"{peer} us", "ratio"]
    rows = []
    for fact, group in zip(facts, groups.values(), strict=True):
        first = group[0]
        unit = next(name for name in _RATES if name in first)
        row = [_cell(fact.get(name)) for name in columns]
        if op == "engine":
            row.append(_tokens_per_second(fact, first["us"]))
        row += [f"{first['us']:.2f}", f"{first[unit]:.2f} {_RATES[unit]}"]
        row.append(f"{first['floor_us'] / first['us']:.0%}")
        by_peer = {line["peer"]: line for line in group}
        for peer in peers:
            line = by_peer.get(peer)  # a peer that does not take the shape has none
            row += [f"{line['peer_us']:.2f}", f"{line['ratio']:.2f}"] if line else ["-", "-"]
        rows.append(row)
    common = ", ".join(f"{name} {_cell(value)}" for name, value in shared.items())
    table = _markdown(header, rows)
    return f"All rows: {common}.\n\n{table}" if common else table


def _told(op: str, name: str, facts: Sequence[Line]) -> bool:
    """Whether a column says nothing new beside the variant and kv_len."""
    if name in TOLD_BY_VARIANT.get(op, ()):
        return True
    return name == "q_len" and all(fact.get("q_len") == fact.get("kv_len") for fact in facts)


def _tokens_per_second(fact: Line, us: float) -> str:
    """Of a whole call, all new tokens over its time; of a step, one for each request."""
    tokens = {"generate": fact["new_tokens"], "decode_step": 1}.get(fact["variant"])
    return "-" if tokens is None else f"{fact['batch'] * tokens / us * 1e6:.0f}"


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else str(value).replace("|", "\\|")


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def replace_tables(markdown: str, new: str) -> str:
    """Returns the Markdown with the part between its two marks replaced.

    Raises:
      ValueError: the marks are not there exactly once each, in order.
    """
    lines = markdown.splitlines()
    if lines.count(BEGIN) != 1 or lines.count(END) != 1 or lines.index(BEGIN) > lines.index(END):
        raise ValueError(f"--markdown: must hold one line {BEGIN} and one line {END} after it")
    before, after = lines[: lines.index(BEGIN) + 1], lines[lines.index(END) :]
    return "\n".join([*before, "", new, "", *after]) + "\n"


def write_charts(rows: Sequence[Row], folder: pathlib.Path, stem: str) -> dict[str, pathlib.Path]:
    """Draws FOLDER/STEM-OP.png for each operator; returns the files by operator.

    Raises:
      ImportError: matplotlib is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    out = {}
    for op in dict.fromkeys(row.op for row in rows):
        path = folder / f"{stem}-{op}.png"
        plot.write_png([row for row in rows if row.op == op], str(path), dpi=_CHART_DPI)
        out[op] = path
    return out


def report(
    json_files: Sequence[str | os.PathLike[str]],
    markdown: pathlib.Path,
    charts: pathlib.Path | None = None,
) -> list[str]:
    """Rewrites the tables of a Markdown file and draws the charts.

    Nothing is written if the input is at fault.

    Args:
      json_files: of the benchmarks' --json.
      markdown: the file to change.
      charts: folder of the charts; None: that of the Markdown file.

    Returns:
      What to tell the user.

    Raises:
      ValueError: a line or the Markdown file is not as it must be.
      FileNotFoundError: a file is not there.
    """
    lines = read_lines(json_files)
    if not lines:
        raise ValueError("the JSON files must hold at least one row, got none")
    text = markdown.read_text(encoding="utf-8")
    replace_tables(text, "")  # checks the marks before anything is drawn
    rows = to_rows(lines)
    told = []
    try:
        files = write_charts(rows, charts or markdown.parent, markdown.stem)
        told += [f"Wrote {path}." for path in files.values()]
        links = {op: os.path.relpath(path, markdown.parent) for op, path in files.items()}
    except ImportError:
        told.append(plot.MISSING_MATPLOTLIB.format("Charts"))
        links = {}
    markdown.write_text(replace_tables(text, tables(lines, links)), encoding="utf-8")
    told.append(f"Wrote the tables of {len(lines)} rows into {markdown}.")
    return told


def _typed(path: str) -> pathlib.Path:
    """A path as seen from where the user typed the command: `bazel run` changes the folder."""
    return pathlib.Path(os.environ.get("BUILD_WORKING_DIRECTORY", "."), path)


def main(argv: Sequence[str]) -> int:
    """Runs the command line: the JSON files are its arguments."""
    if len(argv) < 2 or not _MARKDOWN.value:
        print("usage: bench_report --markdown FILE JSON_LINES...", file=sys.stderr)
        return 2
    charts = _typed(_CHARTS.value) if _CHARTS.value else None
    try:
        told = report([_typed(path) for path in argv[1:]], _typed(_MARKDOWN.value), charts)
    except (ValueError, OSError) as error:
        print(f"bench_report: {error}", file=sys.stderr)
        return 1
    print("\n".join(told))
    return 0


if __name__ == "__main__":
    app.run(main)
