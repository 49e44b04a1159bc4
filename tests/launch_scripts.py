"""Scripts for the launcher's tests, and what is left of them. Those that need no torch start in a fraction of
the time."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import psutil

from meshloom.core.mesh import Mesh
from meshloom.launch.processes.launcher import run_ranks

# Joins; then calls the `body` that follows.
JOINED = """
    import os, signal, sys, time
    import torch
    from meshloom.core.errors import DataError
    from meshloom.launch.environment import launched_plan
    from meshloom.launch.failure import leave, report_failure
    from meshloom.launch.opening import open_world
    from meshloom.core.plan import Plan

    def main():
        with open_world(Plan.parse(launched_plan()).mesh, timeout_seconds=60) as world:
            context = world.local[0]
            group, rank = context.groups["dp"], context.rank
            group.barrier().wait()
            body(group, rank)

    def run():
        try:
            main()
        except Exception as error:
            leave(report_failure(error))
"""

# Speaks to the launcher without meshloom.
TELL = """
    import os, signal, sys, time
    rank = os.environ["RANK"]

    def tell(**event):
        import json
        os.write(int(os.environ["MESHLOOM_REPORT_FD"]), json.dumps(event).encode() + b"\\n")

    def wait():
        while True:
            time.sleep(60)
"""


def write_script(tmp_path: Path, *parts: str) -> list[str]:
    """The command that runs `parts`, put together as a file."""
    path = tmp_path / "job.py"
    path.write_text("\n".join(textwrap.dedent(part) for part in parts))
    return [sys.executable, str(path)]


def run(command: list[str], ranks: int) -> int:
    """Run the command on CPU ranks."""
    return run_ranks(command, Mesh(dp=ranks), "cpu", f"dp={ranks}")


def left(script: str) -> list[psutil.Process]:
    """Processes of `script`, forks included, that do not end within seconds."""
    found = [
        process for process in psutil.process_iter(["cmdline"]) if script in (process.info["cmdline"] or ())
    ]
    return [
        process
        for process in psutil.wait_procs(found, timeout=5)[1]
        if process.status() != psutil.STATUS_ZOMBIE
    ]
