"""The plan that the command line asks for. What a verb needs of it is imported without the parser."""

from __future__ import annotations

import argparse
from dataclasses import replace

from meshloom.core.plan import Plan
from meshloom.core.units import parse_bytes
from meshloom.launch.devices import default_ranks

LOG_WIDTH = 200  # columns of a table that goes to a file or a pipe


def plan_of(arguments: argparse.Namespace) -> Plan:
    """The requested plan, or the default for the devices."""
    if arguments.plan:
        plan = Plan.parse(arguments.plan)
    else:
        plan = Plan() if arguments.verb == "describe" else Plan(dp=default_ranks(arguments.devices))
    return replace(plan, memory_bytes=parse_bytes(arguments.memory)) if arguments.memory else plan
