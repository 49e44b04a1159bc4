"""Forty planted bugs: a function or method of the package becomes wrong, one at a time, and verification finds it.

They were drawn before any was rewritten, by `random.Random(58).sample` from the sorted names of the 356 bugs of six lists that
readers of code and documents had written blind as edits of its text (`drawn.txt`, as LIST/NAME); the lists are in the history.
"""

from tests.planted import (  # noqa: F401  # each adds its bugs to the list
    computing,
    evaluating,
    exchanging,
    reading,
    saving,
    updating,
)
from tests.planted.bugs import BUGS as BUGS
