"""Forty planted bugs: a function or method of the package becomes wrong, one at a time, and verification finds it.

They were drawn before any was rewritten, by `random.Random(58).sample` from the sorted names of the 356 bugs of six lists that
readers of code and documents had written blind as edits of its text (`drawn.txt`, as LIST/NAME); the lists are in the history.
Two of them stood on features that go, draws of `random` as inputs and states of chunks in attributes. In their places stand the next of the same
shuffle that have no such feature and need no processes, the 42nd and the 45th.
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
