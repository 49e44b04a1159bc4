"""Memory that tensors have freed is there for the next ones, unless the user has set the allocator."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

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


@pytest.mark.long
def test_freed_memory_is_kept():
    kept, pages = run()
    assert kept and pages < 100


@pytest.mark.long
def test_it_is_returned_where_memory_is_short():
    kept, pages = run(returned=True)
    assert not kept and pages > 20_000  # all of each round


@pytest.mark.long
@pytest.mark.parametrize(
    "setting",
    [{"MALLOC_TRIM_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}],
)
def test_what_the_user_has_set_stays(setting: dict[str, str]):
    kept, pages = run(**setting)
    assert not kept and pages > 4000
