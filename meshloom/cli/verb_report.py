"""`meshloom report`: list what a run has written to its directory, or draw a step of it."""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from meshloom.cli.plan_lines import LOG_WIDTH
from meshloom.core.errors import ReportError
from meshloom.core.units import format_bytes
from meshloom.report.directory import (
    print_run_directory,
    read_run_directory,
    run_directory_records,
    show_timeline,
)
from meshloom.report.page.history import read_history
from meshloom.report.page.page import read_plans, save_page
from meshloom.report.records import Records
from meshloom.report.terminal import print_line


def report(arguments: argparse.Namespace) -> int:
    """Exit code 0."""
    stream = sys.stderr if arguments.json == "-" else sys.stdout
    console = Console(file=stream, width=None if stream.isatty() else LOG_WIDTH)
    directory = Path(arguments.run)
    if arguments.html is None and (arguments.beside or arguments.plans):
        flag = "--beside" if arguments.beside else "--plans"
        raise ReportError(f"{flag} is shown in a page. Give --html FILE, too.")
    if arguments.html is not None:
        _write_page(arguments, directory, console)
    elif arguments.timeline is not None or arguments.step is not None:
        show_timeline(directory, arguments.timeline or "-", arguments.step, console)
    else:
        print_run_directory(read_run_directory(directory), console)
    if arguments.json is not None:
        with ExitStack() as stack:
            records = Records(arguments.json, stack)
            for record in run_directory_records(read_run_directory(directory)):
                records.write(**record)
    return 0


def _write_page(arguments: argparse.Namespace, directory: Path, console: Console) -> None:
    path = Path(arguments.html)
    runs = [read_history(directory), *([read_history(Path(arguments.beside))] if arguments.beside else [])]
    if len({run.name for run in runs}) < len(runs):  # of the same name elsewhere
        for run, given in zip(runs, (arguments.run, arguments.beside), strict=True):
            run.name = str(given)
    save_page(path, runs, read_plans(Path(arguments.plans)) if arguments.plans else ())
    print_line(console, f"{path} written ({format_bytes(path.stat().st_size)}); open it in a browser")
