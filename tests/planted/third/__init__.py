"""A third list of silent bugs: regressions that a maintainer could commit, planted one at a time in jobs of several kinds."""

from tests.planted.third import (  # noqa: F401  # each module adds its bugs to the list
    dividing,
    drawing,
    evaluating,
    exchanging,
    keeping,
    merging,
    reading,
    staging,
    updating,
)
from tests.planted.third.planting import BUGS as BUGS
