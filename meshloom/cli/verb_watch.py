"""`meshloom watch`: follow a run that goes on elsewhere, by what it writes to its directory."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from meshloom.core.errors import ReportError
from meshloom.core.units import format_seconds
from meshloom.report.records import outcome_text, terminal_listener
from meshloom.report.terminal import Terminal
from meshloom.telemetry.run_log import FILE, events_after, number_in, progress_of

LOOK_SECONDS = 0.5
SILENT_SECONDS = 60.0  # without an event, after which a line says so


def watch(arguments: argparse.Namespace) -> int:
    """Exit code 0: at the end of the run, or at Ctrl-C, which does not disturb it."""
    directory = Path(arguments.run)
    if not directory.is_dir():
        raise ReportError(f"There is no directory {directory}. Give the one that the run was given as --out.")
    terminal = Terminal(Console())
    terminal.start(f"{directory / FILE}; Ctrl-C ends watching, not the run")
    try:
        for event in _events(directory, terminal):
            _tell(event, terminal)
            if event["event"] == "end":
                return 0
    except KeyboardInterrupt:
        terminal.event("not watching any more; the run goes on")
    return 0


def _events(directory: Path, terminal: Terminal) -> Iterator[dict[str, Any]]:
    """From the newest start on, as they come."""
    events, place = events_after(directory, 0)
    starts = [number for number, each in enumerate(events) if each["event"] == "start"]
    events = events[starts[-1] if starts else 0 :]
    heard, silent = time.monotonic(), False
    while True:
        yield from events
        if events:
            heard, silent = time.monotonic(), False
        elif not silent and time.monotonic() > heard + SILENT_SECONDS:
            silent = True
            terminal.event(
                f"nothing new for {format_seconds(SILENT_SECONDS)}: steps take longer, or the run has ended without saying so"
            )
        time.sleep(LOOK_SECONDS)
        if (directory / FILE).stat().st_size < place:
            place = 0  # begun anew
        events, place = events_after(directory, place)


def _tell(event: dict[str, Any], terminal: Terminal) -> None:
    told = terminal_listener(terminal)
    match event["event"]:
        case "start":
            terminal.start(f"plan {event['plan']}, from step {event['step']} to {event['steps']}")
        case "step":
            told.step(progress_of(event))
        case "note":
            told.note(str(event["text"]))
        case "evaluation":
            told.evaluated(
                event["step"], {name: number_in(value) for name, value in event["metrics"].items()}
            )
        case "checkpoint":
            told.saved(event["step"], Path(event["path"]))
        case "end":
            losses = (number_in(event[name]) for name in ("first_loss", "last_loss"))
            terminal.event(outcome_text(event["steps"], event["seconds"], *losses))
        case _:
            pass
