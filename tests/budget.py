"""Which tests `make check` and `make test` run: each file of tests has so many seconds, of what its tests have taken.

`make durations` runs all that the covering subset may run and writes what each took. A test that is not written counts as one of the quickest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("durations.txt")
SHORTEST = 0.1  # seconds; what takes less is not written
_ROUNDING = 1e-9  # of sums of seconds
EACH = 0.05  # seconds that any test takes, with what is looked at before and behind it
CHECK, TEST, PROCESSES = 1.0, 5.0, 20.0  # seconds of a file, as on a machine that has other work, too
# They hold for all of the code, and whoever changes it wants them at once.
ALWAYS = {f"tests/test_{each}.py" for each in ("architecture", "docs", "doc_code", "house", "imports")}


class Durations:
    """Writes what tests took, added up over set-up, call and tear-down. In one process, that which others report to."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._taken: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._taken[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        """What is written of other tests is kept."""
        known = read(self._file) | self._taken
        lines = [f"{taken:.1f} {name}" for name, taken in sorted(known.items()) if taken >= SHORTEST]
        self._file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read(file: Path = FILE) -> dict[str, float]:
    """Seconds by test."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return {name: float(taken) for taken, name in (line.split(" ", 1) for line in lines)}


def within(taken: Mapping[str, float], tests: Sequence[str], seconds: float) -> set[str]:
    """The tests that may run, of one file: of each function the quickest case, in the order of what they take, then the other cases. The first may
    take more than there is.

    >>> taken = {"f[1]": 3.0, "f[2]": 1.0, "g": 2.0, "h": 9.0}
    >>> sorted(within(taken, ["f[0]", "f[1]", "f[2]", "g", "h"], 4)), sorted(within(taken, ["h"], 4))
    (['f[0]', 'f[2]', 'g'], ['h'])
    >>> len(within({}, [f"f[{number}]" for number in range(100)], 1))
    20
    """
    in_order = sorted(tests, key=lambda name: taken.get(name, EACH))
    first: dict[str, str] = {}  # of each function
    for name in in_order:
        first.setdefault(name.partition("[")[0], name)
    kept: set[str] = set()
    for name in dict.fromkeys([*first.values(), *in_order]):
        if not kept or taken.get(name, EACH) <= seconds + _ROUNDING:
            kept.add(name)
            seconds -= taken.get(name, EACH)
    return kept


def mark_what_is_over(items: Collection[pytest.Item], taken: Mapping[str, float]) -> None:
    """What the budgets of their files do not allow is marked as slow, or as long if `make test` runs it."""
    marked = {item.nodeid: {mark.name for mark in item.iter_markers()} for item in items}
    files: defaultdict[tuple[str, bool], list[pytest.Item]] = defaultdict(list)
    for item in items:
        file = item.nodeid.partition("::")[0]
        if not marked[item.nodeid] & {"slow", "campaign", "browser", "site"} and file not in ALWAYS:
            files[file, "processes" in marked[item.nodeid]].append(item)
    for (_, processes), tests in files.items():
        kept = _within(tests, taken, PROCESSES if processes else TEST, "slow")
        _within([each for each in kept if "long" not in marked[each.nodeid]], taken, CHECK, "long")


def _within(
    tests: Sequence[pytest.Item], taken: Mapping[str, float], seconds: float, over: str
) -> list[pytest.Item]:
    """The tests of a file that its budget allows; the others get that mark."""
    names = within(taken, [each.nodeid for each in tests], seconds)
    for each in tests:
        if each.nodeid not in names:
            each.add_marker(over)
    return [each for each in tests if each.nodeid in names]
