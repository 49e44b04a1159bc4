"""The third list, of bugs as a maintainer could commit them, and how they are planted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.planted.bugs import Bug, Patch

# a GPT as small as these is divided only where that is said, on machines that are not calibrated
DIVIDED = (
    "tp=2,tp_placements=embed:vocabulary+blocks.*.attention.q:column+blocks.*.attention.k:column+blocks.*.attention.v:column"
    "+blocks.*.attention.out:row+blocks.*.up:column+blocks.*.down:row"
)
BUGS: list[Bug] = []


class Planter:
    """Patches product code, as `patch` does."""

    def __init__(self, patch: Patch) -> None:
        self._patch = patch

    def set(self, owner: Any, name: str, value: Any) -> None:
        """`owner.name` becomes `value`."""
        self._patch.setattr(owner, name, value)

    def wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """`owner.name` becomes what `make` makes of it."""
        is_static = isinstance(vars(owner)[name], staticmethod)
        made = make(getattr(owner, name))
        self._patch.setattr(owner, name, staticmethod(made) if is_static else made)


def bug(
    job: str, plan: str, *, causes: str = "", says: str = "", module: str | None = None
) -> Callable[[Callable[[Planter], None]], Callable[[Planter], None]]:
    """Adds a function that plants a bug to the list. Arguments: as of `tests.planted.bugs.bug`; job: of `tests.planted.third.jobs`."""

    def add(plant: Callable[[Planter], None]) -> Callable[[Planter], None]:
        def planted(patch: pytest.MonkeyPatch) -> None:
            plant(Planter(patch))

        planted.__name__ = plant.__name__
        area = plant.__module__.rpartition(".")[2]
        kinds = tuple(causes.replace("_", " ").split("|")) if causes else ()
        found = Bug(
            plant=planted, area=area, job=job, plan=plan, causes=kinds, says=says, module=module, number=0
        )
        if all(each.name != found.name for each in BUGS):  # pytest imports a module twice that has doctests
            BUGS.append(found)
        return plant

    return add
