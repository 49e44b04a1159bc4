"""The handshake of a worker and a server: they identify themselves, and check that both have the same job.

    worker  --Ask------------>  server 0      what is this run?
            <--RunDescription--               plan, settings, parameters, and the ports of all servers
    worker  --Hello---------->  every server  I have the same facts (digest); my number, once I have one
            <---------Welcome--               its number: the next one, never used before
    worker  --WorkerSeconds-->  server 0      when it leaves: how it spent its time

A worker compares the facts and reports what differs; a server compares the digests and admits nobody else. A
worker joins when all servers have welcomed it, so that none sends parameters to a worker it does not know.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from meshloom.core.errors import JobError
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.parameters.file_weights import file_facts
from meshloom.parameters.model import facts


@dataclass(frozen=True, kw_only=True)
class Ask:
    """Worker -> server 0: what is this run?"""


@dataclass(frozen=True, kw_only=True)
class Hello:
    """Worker -> server: it asks to be admitted. digest: of the facts. worker: its number, once it has one."""

    worker: int | None
    digest: str


@dataclass(frozen=True, kw_only=True)
class Welcome:
    """Server -> worker: you are worker `worker`."""

    worker: int


@dataclass(frozen=True, kw_only=True)
class WorkerSeconds:
    """Worker -> server 0: of the `seconds` since it joined, those spent computing and reading data."""

    worker: int
    seconds: float
    computing: float
    reading: float


@dataclass(frozen=True, kw_only=True)
class RunDescription:
    """Server 0 -> worker: the run. facts: must be equal. ports: of all servers, at the first one's host."""

    plan: str
    facts: dict[str, Any]
    ports: list[int]

    def check(self, here: Mapping[str, Any]) -> None:
        """Raises `JobError` naming the first fact that differs."""
        for name in [*self.facts, *(name for name in here if name not in self.facts)]:
            there, mine = self.facts.get(name, "not there"), here.get(name, "not there")
            if there != mine:
                raise JobError(
                    f"This is not the job of the run: {name} is {there} there and {mine} here. Join with the same file."
                )


def facts_of(job: Job, plan: Plan, model: nn.Module, num_samples: int) -> dict[str, Any]:
    """The facts that must be equal on servers and workers, files of weights included, as JSON values."""
    return json.loads(json.dumps({**facts(job, plan, model), **file_facts(job), "samples": num_samples}))


def digest_of(facts: Mapping[str, Any]) -> str:
    """A hash of facts."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
