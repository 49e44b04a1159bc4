"""Lines that tell the author of a script what its ranks do."""

import sys


def say(text: str) -> None:
    """One line, on stderr."""
    print(f"meshloom: {text}", file=sys.stderr, flush=True)  # noqa: T201
