"""Memory that tensors have freed is there for the next ones, unless the user has set the allocator."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest
import torch

from meshloom.core.job import Job
from meshloom.machine import process_memory
from meshloom.train.trainer import Trainer

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's allocator is known")

# Prints whether memory is kept, and the fewest pages that the system had to hand out in a round that allocates,
# writes and frees 80 MiB. The first round is not counted. In any other the process may come by a piece of memory
# for something else, between two tensors, so that one of the next ones does not fit; not in all of them.
PROGRAM = """
import resource
import torch
from meshloom.launch.allocator import keep_freed_memory, return_freed_memory

kept = keep_freed_memory()
if {returned}:
    kept = not return_freed_memory()
pages = []
for number in range(6):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.zeros(5 << 20) for _ in range(4)]
    for each in tensors:
        each.add_(1)
    del each, tensors
    pages.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(kept, min(pages[1:]))
"""


def run(*, returned: bool = False, **environment: str) -> tuple[bool, int]:
    """Whether memory was kept, and the fewest pages of a round but the first. returned: it is returned later on."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("MALLOC_") and name != "GLIBC_TUNABLES"
    }
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(returned=returned)],
        env={**clean, **environment},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    return found[0] == "True", int(found[1])


@pytest.mark.slow
def test_freed_memory_is_kept():
    kept, pages = run()
    assert kept and pages < 100


@pytest.mark.slow
def test_it_is_returned_where_memory_is_short():
    kept, pages = run(returned=True)
    assert not kept and pages > 20_000  # all of each round


# Prints the MiB that the process has of 128 MiB of small blocks between others that stay, when they are freed and when
# a phase of the run has ended.
SMALL = """
import torch
from pathlib import Path
from meshloom.launch.allocator import return_freed_memory
from meshloom.machine.process_memory import Shortage

def resident():
    facts = Path("/proc/self/status").read_text().split("VmRSS:")[1]
    return int(facts.split()[0]) // 1024

return_freed_memory()
before = resident()
blocks = [torch.ones(128 << 10 if number % 2 == 0 else 2 << 10) for number in range(512)]
blocks = blocks[1::2]
freed = resident() - before
Shortage.trim()
print(freed, resident() - before)
"""


@pytest.mark.slow
def test_small_blocks_are_returned_between_phases_where_memory_is_short():
    text = subprocess.run([sys.executable, "-c", SMALL], check=True, capture_output=True, text=True).stdout
    freed, after = map(int, text.split())
    assert freed > 100 and after < 20


def test_phases_end_around_each_update(monkeypatch: pytest.MonkeyPatch):
    job = Job(
        model=lambda: torch.nn.Linear(3, 1),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        data=lambda: list(torch.ones(8, 3)),
        batch_size=4,
        steps=2,
    )
    trims: list[int] = []
    monkeypatch.setattr("meshloom.launch.opening.keep_freed_memory", lambda: None)
    monkeypatch.setattr(process_memory.Shortage, "is_there", True)
    with Trainer(job, "dp=1", devices="simulated") as trainer:
        monkeypatch.setattr(process_memory, "trim", lambda: trims.append(trainer.next_step))
        for batch in trainer.batches():
            trainer.step(batch)
    assert trims == [0, 0, 1, 1]


@pytest.mark.parametrize(
    "setting",
    [{"MALLOC_TRIM_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}],
)
@pytest.mark.slow
def test_what_the_user_has_set_stays(setting: dict[str, str]):
    kept, pages = run(**setting)
    assert not kept and pages > 4000
