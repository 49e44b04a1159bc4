"""Bugs of the list that verification catches and does not name, or places in another module, with the reason of each."""

from __future__ import annotations

NOT_NAMED: dict[str, str] = {}
NOT_PLACED = {
    # The largest second moment is another one only where it has fallen, which after three steps is seen beyond the tolerance of updates in the
    # head's weight alone: the first module by what it does would be `first`, by what it changes it is `head`.
    "optimizer-the_largest_second_moment_is_used": "differs in the head alone when it is found",
}
