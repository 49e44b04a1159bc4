"""Which cases `make check` and `make test` run, of tests that have many."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from random import Random

import pytest

CASES = 6  # of a test whose mark `covering` does not say which
FURTHER = 1  # of a test of which `make test` leaves cases out, unless it has the mark `every`
LEFT_OUT = {"slow", "campaign", "browser", "site"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """`make test` runs the cases that a test's mark `covering` names, or else, where no case is marked `slow`, so many that are drawn by its name;
    `make check` runs the first of these, and the others of them are `long`.
    Those that `make test` leaves out are `slow`: `make test-all` runs `FURTHER` of them, drawn likewise, or all where the test has the mark
    `every`; the rest is `make campaigns`'. A word of `covering` that names nothing is an error, unless only
    some cases of a test were asked for."""
    idle: list[str] = []
    for name, at in _tests(items).items():
        first = next(iter(at.values()))
        kept = quick = [id_ for id_, case in at.items() if not LEFT_OUT & _marks(case)]
        if quick and (mark := first.get_closest_marker("covering")):
            words = {word: named(word, quick) for word in mark.args}
            idle += [
                f"{name}: its mark `covering` names no case by {word!r}"
                for word, ids in words.items()
                if not ids
            ]
            kept = [id_ for id_ in quick if any(id_ in ids for ids in words.values())]
        elif len(quick) > CASES and len(quick) == len(at):  # else somebody has chosen
            drawn = set(Random(name).sample(quick, CASES))
            kept = [id_ for id_ in quick if id_ in drawn]
        for id_ in set(quick).difference(kept):
            at[id_].add_marker(pytest.mark.slow)
        for id_ in kept[1:]:
            at[id_].add_marker(pytest.mark.long)
        slow = [id_ for id_, case in at.items() if LEFT_OUT & _marks(case) == {"slow"}]
        if first.get_closest_marker("every") is None:
            drawn = set(Random(name).sample(slow, min(len(slow), FURTHER)))
            for id_ in set(slow) - drawn:
                at[id_].add_marker(pytest.mark.campaign)
    if idle and not any("::" in argument for argument in config.args):
        raise pytest.UsageError("\n".join(idle))


def _tests(items: Sequence[pytest.Item]) -> dict[str, dict[str, pytest.Function]]:
    """The cases of each test that has parameters, by their ids, in their order."""
    tests: defaultdict[str, dict[str, pytest.Function]] = defaultdict(dict)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            tests[item.nodeid.partition("[")[0]][item.callspec.id] = item
    return tests


def _marks(case: pytest.Item) -> set[str]:
    return {mark.name for mark in case.iter_markers()}


def named(word: str, ids: Iterable[str]) -> set[str]:
    """The case of that id, or else those with the word in theirs."""
    ids = set(ids)
    return {word} if word in ids else {id_ for id_ in ids if word in id_}
