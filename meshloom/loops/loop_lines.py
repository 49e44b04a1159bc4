"""Lines that tell the author of a script what its ranks do."""

from __future__ import annotations

import sys
from functools import cache

from meshloom.launch.environment import is_first_rank


def say(text: str) -> None:
    """One line, on stderr, of the main process alone."""
    if is_first_rank():
        print(f"meshloom: {text}", file=sys.stderr, flush=True)  # noqa: T201


say_once = cache(say)


def say_that_it_evaluates() -> None:
    """Shares are read, and nothing is trained."""
    say_once(
        "a loader that is shared is read without gradients, or in eval mode: counts over its batches are this replica's, which ml.sum adds up; a loader that is left "
        "alone gives every rank whole batches"
    )
