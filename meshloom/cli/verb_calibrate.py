"""`meshloom calibrate`: measure this machine."""

from __future__ import annotations

import argparse
import json
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from meshloom.launch.environment import is_first_rank, is_rank
from meshloom.machine.machine import machine_file, save
from meshloom.measure.calibration import CalibrationRequest, measure_here, measure_links_here, measure_machine
from meshloom.report.machine_tables import machine_records, print_machine
from meshloom.report.records import Records
from meshloom.report.terminal import LongPhases, print_line


def calibrate(arguments: argparse.Namespace) -> int:
    """Measure with ranks that this process starts, or as one of them; the first writes and prints."""
    started = time.perf_counter()
    request = CalibrationRequest(
        devices=arguments.devices,
        ranks=arguments.ranks,
        transport=arguments.transport,
        timeout_seconds=arguments.timeout,
    )
    if arguments.links:
        links = measure_links_here(request)
        if is_first_rank():
            Path(arguments.links).write_text(json.dumps([asdict(each) for each in links]), encoding="utf-8")
        return 0
    console = Console(stderr=arguments.json == "-")
    with LongPhases(console) as phases:
        phases.enter(None if is_rank() else "measuring this machine")
        machine = measure_here(request) if is_rank() else measure_machine(request, phases.count)
    if isinstance(machine, int):
        return machine
    if not is_first_rank():
        return 0
    if arguments.part:
        save(machine, Path(arguments.part))
        return 0
    path = Path(arguments.out) if arguments.out else machine_file(machine.device)
    save(machine, path)
    print_machine(machine, console)
    print_line(console, f"written to {path} ({time.perf_counter() - started:.1f} s of measuring)")
    with ExitStack() as stack:
        records = Records(arguments.json, stack)
        for record in machine_records(machine):
            records.write(**record)
    return 0
