"""Run as a rank: python -m tests.hosts_rank TRANSPORT; rank 0 prints what it talks through, seconds for an
all-reduce, and the bytes that left its host."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from meshloom.core.mesh import Mesh
from meshloom.launch.environment import launched_rank
from meshloom.launch.opening import open_world
from tests.two_hosts import WIRE

NUM_BYTES = 8 << 20


def main() -> None:
    """One all-reduce of `NUM_BYTES`, after a first one of the same size."""
    launched = launched_rank()
    assert launched
    with open_world(Mesh(dp=launched.size), "cpu", 60.0, sys.argv[1]) as world:
        group, tensor = world.local[0].groups["dp"], torch.ones(NUM_BYTES // 4)
        for _ in range(2):
            group.barrier().wait()
            before, began = _sent(), time.monotonic()
            group.all_reduce(tensor, "avg").wait()
            group.barrier().wait()
            seconds, sent = time.monotonic() - began, _sent() - before
        if world.main:
            print(
                json.dumps(
                    {"why": world.why, "seconds": seconds, "bytes": sent, "well": bool((tensor == 1).all())}
                )
            )


def _sent() -> int:
    return int(Path(f"/sys/class/net/{WIRE}/statistics/tx_bytes").read_text())


if __name__ == "__main__":
    main()
