"""Which parameters of a test the covering subset runs: those that its mark `covering` names, as far as the file's budget goes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import pytest

from tests.budget import mark_what_is_over, read


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Mark as slow what `covering` does not name. A word of it that names nothing is an error, unless only
    some cases of a test were asked for."""
    tests: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("covering"):
            tests[item.nodeid.partition("[")[0]].append(item)
    idle: list[str] = []
    for name, cases in tests.items():
        mark = cases[0].get_closest_marker("covering")
        assert mark is not None
        at = {case.callspec.id: case for case in cases}
        quick = [id_ for id_, case in at.items() if not case.get_closest_marker("slow")]
        kept = {word: named(word, quick) for word in mark.args}
        idle += [
            f"{name}: its mark `covering` names no case by {word!r}" for word, ids in kept.items() if not ids
        ]
        for id_ in set(quick).difference(*kept.values()):
            at[id_].add_marker(pytest.mark.slow)
    if idle and not any("::" in argument for argument in config.args):
        raise pytest.UsageError("\n".join(idle))
    if not config.getoption("--durations-to"):
        mark_what_is_over(items, read())


def named(word: str, ids: Iterable[str]) -> set[str]:
    """The case of that id, or else those with the word in theirs."""
    ids = set(ids)
    return {word} if word in ids else {id_ for id_ in ids if word in id_}
