"""`meshloom doctor` and `meshloom completion`: about the installation, not about a job."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from contextlib import ExitStack
from typing import Any

from meshloom import __version__
from meshloom.core.errors import ReportError
from meshloom.report.doctor import doctor_facts, doctor_lines
from meshloom.report.records import Records


def doctor(arguments: argparse.Namespace) -> int:
    """Exit code 0."""
    facts = doctor_facts(__version__)
    if arguments.json != "-":
        print("\n".join(doctor_lines(facts)))
    with ExitStack() as stack:
        Records(arguments.json, stack).write("doctor", **facts)
    return 0


def completion(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Exit code 0. Raises `ReportError` where shtab is not installed."""
    if importlib.util.find_spec("shtab") is None:
        raise ReportError(
            "meshloom completion needs the package shtab, which is not installed. Install it: pip install 'meshloom[completion]'."
        )
    library: Any = importlib.import_module("shtab")
    print(library.complete(parser, shell=arguments.shell))
    return 0
