"""Shared memory of the host between ranks that compute on a GPU, or one on it and one on the CPU: what every collective
gives, beside two ranks on the CPU (`host_ranks.py`)."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rows import ROOT, Row, status_of
from torch import Tensor

from meshloom.comm.shm.native_engine import why_not

ROWS = 1024  # of `host_ranks.late`
SECONDS = 100  # for a pair of ranks, which import torch and start a GPU


def host_memory(device: str) -> Iterator[Row]:
    """Results are whole numbers, or float64 losses, whose sums are taken in other orders on a GPU."""
    if reason := why_not():
        yield Row(name="shared memory", status="not run", text=reason)
        return
    expected = _ranks("cpu", "cpu")
    for pair in ((device, device), (device, "cpu"), ("cpu", device)):
        name = f"rank 0 on {pair[0]}, rank 1 on {pair[1]}"
        try:
            found = _ranks(*pair)
        except RuntimeError as problem:
            yield Row(name=name, status="failed", text=str(problem))
            continue
        alike = all(map(_equal, found, expected))
        pairs = [
            (a, b) for mine, other in zip(found, expected, strict=True)
            for a, b in zip(mine["losses"], other["losses"], strict=True)
        ]  # fmt: skip
        worst = max(abs(a - b) / abs(b) for a, b in pairs)
        late = _in_order(found)
        seconds = max(each["seconds"] for each in found)
        yield Row(
            name=name,
            status=status_of(alike and worst <= 1e-9 and late),
            text=f"collectives {'equal' if alike else 'DIFFER'} from those of two CPU ranks; DDP's losses differ by {worst:.2g}; values that were still being computed "
            f"{'arrived' if late else 'did NOT arrive'}; an all-reduce in {1e3 * seconds:.2f} ms (64 MiB)",
            figures={"worst": worst, "seconds": seconds},
        )  # fmt: skip


def _ranks(*devices: str) -> list[dict[str, Any]]:
    """What two ranks have found. Raises `RuntimeError` with what one printed that failed."""
    with tempfile.TemporaryDirectory() as directory:
        program = str(Path(__file__).with_name("host_ranks.py"))
        outs = [Path(directory, f"out-{rank}") for rank in range(2)]
        ranks = [
            subprocess.Popen(
                [sys.executable, program, str(rank), device, str(Path(directory, "meeting")), str(outs[rank])],
                cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for rank, device in enumerate(devices)
        ]  # fmt: skip
        try:
            said = [rank.communicate(timeout=SECONDS)[0] for rank in ranks]
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"two ranks took longer than {SECONDS} s") from None
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        for rank, text in zip(ranks, said, strict=True):
            if rank.returncode:
                raise RuntimeError(f"ended with {rank.returncode}: {text[-800:]}")
        return [torch.load(out, weights_only=True) for out in outs]


def _equal(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    pairs = zip(found["operations"], expected["operations"], strict=True)
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


def _in_order(found: list[dict[str, Any]]) -> bool:
    """Whether sums are those of `host_ranks.late`, whose rows have moved on by eight, added up and doubled."""
    rows = (torch.arange(4.0) - 8) % ROWS
    expected = torch.stack([4 * (rows + number) for number in range(10)])
    return all(torch.equal(each["late"], expected) for each in found)
