"""Each planted bug (tests/planted/) is caught by verification at its defaults, where it first differs; without it the same job is equal."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.machine import with_fast_links
from tests.planted import BUGS
from tests.planted.bugs import Bug, module_of, phases_of, verified
from tests.reports import text_of

DRAWN = (Path(__file__).parent / "planted" / "drawn.txt").read_text(encoding="utf-8").split()
pytestmark = pytest.mark.usefixtures("silent_export")


def test_the_planted_are_the_drawn():
    assert sorted(BUGS) == sorted(DRAWN)


@pytest.mark.parametrize(
    "bug",
    [
        pytest.param(each, id=name, marks=[] if each.quick else pytest.mark.slow)
        for name, each in sorted(BUGS.items())
    ],
)
@pytest.mark.long
@pytest.mark.every
def test_a_planted_bug_is_caught_and_placed(bug: Bug, tmp_path: Path):
    with pytest.MonkeyPatch.context() as patch:
        with_fast_links(patch, tmp_path)
        right = verified(bug.job, bug.plan)
        assert right.passed, text_of(right)
        bug.plant(patch)
        wrong = verified(bug.job, bug.plan)
    assert not wrong.passed
    assert bug.phase in phases_of(wrong), text_of(wrong)
    assert bug.module in (None, module_of(wrong)), text_of(wrong)
