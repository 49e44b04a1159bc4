"""More silent bugs, of other kinds and on other jobs than those of `areas`, written from the documents alone; each module adds its bugs to
the list."""

from tests.planted.further import (  # noqa: F401
    dividing,
    evaluating,
    exchanging,
    jobs,
    keeping,
    lowering,
    reading,
    slicing,
    staging,
    updating,
)
