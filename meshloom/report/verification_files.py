"""A verification's report as a file to hand on: one plain page."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

from meshloom.report.written_file import write_file
from meshloom.verify.between_steps.checks import TensorError
from meshloom.verify.findings import Report, lines_of

_STYLE = """body { font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; margin: 1em 0; } th, td { text-align: left; padding: .2em .8em; border-bottom: 1px solid #ddd; }
.wrong { color: #b00020; font-weight: 600; } .right { color: #1b6e2d; font-weight: 600; }"""


def write_page(report: Report, path: Path, command: str) -> None:
    """One self-contained page. command: what was run. Raises `ReportError` if it cannot be written."""
    write_file(path, "".join(_page(report, command)))


def _page(report: Report, command: str) -> Iterator[str]:
    verdict = "equals one device" if report.passed else "differs from one device"
    yield f"<!DOCTYPE html>\n<html lang='en'><meta charset='utf-8'><title>{escape(report.plan)} {verdict}</title><style>{_STYLE}</style>\n"
    yield f"<h1>{escape(report.plan)} <span class='{'right' if report.passed else 'wrong'}'>{verdict}</span></h1>\n"
    yield f"<p><code>{escape(command)}</code></p><p>On {escape(report.devices)}, {escape(report.precision)}.</p>\n<ul>\n"
    for line in lines_of(report):
        yield f"<li>{escape(line.strip())}</li>\n"
    yield "</ul>\n<h2>Steps</h2>\n<table><tr><th>step<th>loss<th>one device<th>verdict<th>first module</tr>\n"
    for step in report.steps:
        ours, right = step.loss
        yield f"<tr><td>{step.step}<td>{ours:.6g}<td>{right:.6g}<td>{_verdict(step.passed)}<td>{escape(step.first_module or '')}</tr>\n"
    yield "</table>\n<h2>Largest errors</h2>\n<table><tr><th>of<th>kind<th>step<th>error<th>tolerance<th></tr>\n"
    yield from map(_row, report.worst(40))
    for checked in report.between:
        yield f"</table>\n<h2>{escape(checked.what)}: {_verdict(checked.passed)}</h2>\n<ul>"
        yield from (f"<li>{escape(fact)}</li>" for fact in checked.facts)
        yield "</ul><table><tr><th>of<th>kind<th>step<th>error<th>tolerance<th></tr>\n"
        yield from map(_row, sorted(checked.errors, key=lambda error: error.error, reverse=True)[:20])
    yield "</table></html>\n"


def _row(error: TensorError) -> str:
    return f"<tr><td>{escape(error.name)}<td>{error.kind}<td>{error.step}<td>{error.error:.2e}<td>{error.tolerance:.1e}<td>{_verdict(error.passed)}</tr>\n"


def _verdict(passed: bool) -> str:
    return "equal" if passed else "<span class='wrong'>differs</span>"
