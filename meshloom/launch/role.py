"""The role of a process in an asynchronous run: server or worker, and the addresses of the others."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Role:
    """What the launcher passes to a process that it starts.

    target, words: the job's FILE.py:NAME, and its sys.argv after its name.
    plan, settings: the plan's text, and the run's settings as JSON.
    number: of a server, from 0; of a worker, how many were started before it (server 0 may assign another).
    directory: of the run, with keys and snapshots. key: the key file of workers.
    addresses: HOST:PORT of all servers, for workers. head: likewise of server 0, for the other servers.
    timeout_seconds: how long servers may be away from a worker.
    listening: descriptors of sockets that listen at this server's address, and on server 0 at `head`.
    """

    kind: Literal["server", "worker"]
    target: str
    plan: str
    settings: str
    number: int
    directory: str
    addresses: tuple[str, ...]
    head: str
    listening: tuple[int, ...] = ()
    key: str = ""
    timeout_seconds: float = math.inf
    words: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        """The directory of the run."""
        return Path(self.directory)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Role:
        values: dict[str, Any] = json.loads(text)
        for name in ("addresses", "listening", "words"):
            values[name] = tuple(values[name])
        return Role(**values)
