"""One HTML file about a run, or two side by side, that opens without a network."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

from meshloom.core.errors import ReportError
from meshloom.core.units import format_bytes, format_count, format_number, format_seconds
from meshloom.report.page.division_tree import division_tree
from meshloom.report.page.figures import Chart, charts
from meshloom.report.page.history import RunHistory
from meshloom.report.written_file import write_file

_ABSENT = "A page's charts are drawn with plotly, which is not installed: pip install plotly, or pip install 'meshloom[report]'."
ORDER = ("Loss and metrics", "Throughput", "Time", "Memory", "Bytes")


def save_page(path: Path, runs: Sequence[RunHistory], plans: Sequence[Mapping[str, Any]] = ()) -> None:
    """runs: one or two. plans: the records of `meshloom plan --json`. Raises `ReportError` when plotly is missing or the
    file cannot be written."""
    write_file(path, page(runs, plans))


def page(runs: Sequence[RunHistory], plans: Sequence[Mapping[str, Any]] = ()) -> str:
    """The page's HTML."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ReportError(_ABSENT) from None
    sections = [("Run" if len(runs) == 1 else "Runs", _facts(runs)), *_chart_sections(runs)]
    sections += [(_titled("Division of the model", run, runs), division_tree(run.division)) for run in runs if run.division]  # fmt: skip
    if plans:
        sections.append(("Plans that were priced", _plans(plans, [str(run.start["plan"]) for run in runs])))
    for heading, rows in (
        ("Notes", [(run, run.notes) for run in runs]),
        (
            "Checkpoints",
            [(run, [f"step {step}: {where}" for step, where in run.checkpoints]) for run in runs],
        ),
    ):
        sections += [(_titled(heading, run, runs), _list(each)) for run, each in rows if each]
    title = " and ".join(run.name for run in runs)
    links = "".join(f"<a href='#s{number}'>{escape(name)}</a>" for number, (name, _) in enumerate(sections))
    body = "".join(
        f"<section aria-labelledby='s{number}'><h2 id='s{number}'>{escape(name)}</h2>{content}</section>"
        for number, (name, content) in enumerate(sections)
    )
    beside = files("meshloom.report.page")
    style, script = (beside.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<meta name='color-scheme' content='light dark'><link rel='icon' href='data:,'><title>{escape(title)} - meshloom</title><style>{style}</style></head>"
        f"<body><header><h1>{escape(title)}</h1><nav aria-label='Sections'>{links}</nav></header><main>{body}</main>"
        f"<script>{get_plotlyjs()}</script><script>{script}</script></body></html>\n"
    )


def _titled(heading: str, run: RunHistory, runs: Sequence[RunHistory]) -> str:
    return heading if len(runs) == 1 else f"{heading}: {run.name}"


def _chart_sections(runs: Sequence[RunHistory]) -> list[tuple[str, str]]:
    found = sorted(charts(runs), key=lambda each: ORDER.index(each[0]))  # stable
    sections: list[tuple[str, str]] = []
    number = 0
    for heading, group in groupby(found, key=lambda each: each[0]):
        parts: list[str] = []
        for _, chart in group:
            parts.append(_chart(chart, number))
            number += 1
        sections.append((heading, "".join(parts)))
    return sections


def _chart(chart: Chart, number: int) -> str:
    values = chart.figure.to_json().replace("</", "<\\/")
    return (
        f"<figure><figcaption>{escape(chart.title)}</figcaption>"
        f"<div class='chart' id='c{number}' role='img' aria-label='{escape(chart.about, quote=True)}' style='height:{chart.figure.layout.height}px'></div>"
        f"<script type='application/json' id='c{number}-values'>{values}</script>"
        f"<details><summary>Numbers</summary>{_table(chart.rows)}</details></figure>"
    )


def _table(rows: Sequence[Sequence[str]], marked: Sequence[bool] = ()) -> str:
    heading, *body = rows
    head = "".join(f"<th scope='col'>{escape(each)}</th>" for each in heading)
    marks = marked or [False] * len(body)
    lines = "".join(
        f"<tr{' class=marked' if mark else ''}>{''.join(f'<td>{escape(each)}</td>' for each in row)}</tr>"
        for row, mark in zip(body, marks, strict=True)
    )
    return f"<div class='wide' tabindex='0' role='region' aria-label='Table'><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>"


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(each)}</li>' for each in lines)}</ul>"


def _facts(runs: Sequence[RunHistory]) -> str:
    """A row for each fact, a column for each run."""
    columns = [_facts_of(run) for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [["", *(run.name for run in runs)]]
    rows += [[name, *(column.get(name, "") for column in columns)] for name in names]
    return _table(rows)


def _facts_of(run: RunHistory) -> dict[str, str]:
    start, end, division = run.start, run.end, run.division
    facts = {"plan": str(start["plan"]), "devices": str(start["why"])}
    if division:
        facts["model"] = f"{division['model']}, {format_number(division['parameters'])} parameters"
    facts["batch"] = format_count(int(start["batch_size"]), "sample")
    steps = f"{run.last_step} of {start['steps']}"
    facts["steps"] = steps if end else f"{steps} (it has not come to its end)"
    if end:
        facts["time"] = f"{format_seconds(end['seconds'])} for {format_count(int(end['steps']), 'step')}"
    shown = {"training loss": run.steps.get("loss")}
    shown |= {f"evaluation: {name}": points for name, points in run.metrics.items()}
    facts |= {
        words: f"{points[0][1]:.5g} to {points[-1][1]:.5g}" for words, points in shown.items() if points
    }
    if run.peak_bytes:
        facts["peak memory"] = f"{format_bytes(run.peak_bytes)} of the process of rank 0"
    for name, value in start["environment"].items():
        facts[name] = format_bytes(value) if name == "memory" else str(value)
    return facts


def _plans(records: Sequence[Mapping[str, Any]], used: Sequence[str]) -> str:
    """The plans of `meshloom plan`, in its order; those that the runs took are marked."""
    rows = [["plan", "step", "measured", "memory", "why"]]
    marked: list[bool] = []
    for each in records:
        if each.get("event") != "plan":
            continue
        measured = each.get("measured_seconds")
        took = " (this run)" if len(used) == 1 else f" (run {used.index(each['plan']) + 1})" if each["plan"] in used else ""  # fmt: skip
        marked.append(each["plan"] in used)
        rows.append(
            [
                f"{each['plan']}{took if marked[-1] else ''}", format_seconds(each["step_seconds"]), format_seconds(measured) if measured else "",
                format_bytes(each["memory_bytes"]), each["why"] if each["fits"] else f"does not fit; {each['why']}",
            ]
        )  # fmt: skip
    if len(rows) == 1:
        raise ReportError("The plans' file has no plan in it. Give what meshloom plan --json FILE wrote.")
    return _table(rows, marked)


def read_plans(path: Path) -> list[dict[str, Any]]:
    """The records of `meshloom plan --json`. Raises `ReportError`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return [dict(json.loads(line)) for line in lines]
    except OSError as error:
        raise ReportError(f"{path} cannot be read: {error.strerror}. Give what meshloom plan --json FILE wrote.") from None  # fmt: skip
    except (TypeError, ValueError):
        raise ReportError(f"{path} holds no JSON lines. Give what meshloom plan --json FILE wrote.") from None
