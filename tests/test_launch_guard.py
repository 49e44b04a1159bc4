"""The guard removes the directories that it was told of, and no others, whatever they are called."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from meshloom.launch.processes.guard import Guard

pytestmark = pytest.mark.processes


def test_a_newline_in_a_name_does_not_name_another_directory(tmp_path: Path) -> None:
    """The guard was told one directory a line, so that an --out with a newline in it had what followed the
    newline removed."""
    kept = tmp_path / "kept"
    kept.mkdir()
    named = Path(f"{tmp_path}/run\n{kept}")  # on the second line stood the other one's name
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff +1"))
    named.mkdir(parents=True)
    odd.mkdir()
    with Guard() as guard:
        guard.removes(named)
        guard.removes(odd)
    assert not named.exists() and not odd.exists()
    assert kept.exists() and named.parent.exists()
