"""`meshloom report`: list what a run has written to its directory, or draw a step of it."""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from meshloom.cli.plan_lines import LOG_WIDTH
from meshloom.report.directory import (
    print_run_directory,
    read_run_directory,
    run_directory_records,
    show_timeline,
)
from meshloom.report.records import Records


def report(arguments: argparse.Namespace) -> int:
    """Exit code 0."""
    stream = sys.stderr if arguments.json == "-" else sys.stdout
    console = Console(file=stream, width=None if stream.isatty() else LOG_WIDTH)
    directory = Path(arguments.run)
    if arguments.timeline is not None or arguments.step is not None:
        show_timeline(directory, arguments.timeline or "-", arguments.step, console)
    else:
        print_run_directory(read_run_directory(directory), console)
    if arguments.json is not None:
        with ExitStack() as stack:
            records = Records(arguments.json, stack)
            for record in run_directory_records(read_run_directory(directory)):
                records.write(**record)
    return 0
