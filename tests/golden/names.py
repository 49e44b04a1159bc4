"""The golden files by name, with what they hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tests.golden.exact_runs import checkpoints, results, traffic
from tests.golden.operators import FILE, operators
from tests.golden.plain_values import chunks, names, plans, samples, schedules, seeds
from tests.golden.refusals import refusals

VALUES: Mapping[str, Callable[[], dict[str, str]]] = {
    "schedules": schedules, "chunks": chunks, "samples": samples, "seeds": seeds, "plans": plans, "names": names, "refusals": refusals,
    "results": results, "traffic": traffic, "checkpoints": checkpoints, FILE: operators,
}  # fmt: skip
