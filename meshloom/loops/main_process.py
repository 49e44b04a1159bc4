"""One process prints, draws and logs; one of each host goes first where files are made."""

from __future__ import annotations

from contextlib import AbstractContextManager

from meshloom.launch.environment import is_first_rank
from meshloom.launch.first_of_host import first_of_host


def is_main() -> bool:
    """Whether this process is rank 0, or the only one. The ranks need not have met."""
    return is_first_rank()


def main_first() -> AbstractContextManager[None]:
    """A context for what each process of a host does and only one may do at a time, as downloads and directories: the first process
    of a host runs its body, then the others do. Where it raises on the first, it raises on the others. With one process it does nothing.
    """
    return first_of_host()
