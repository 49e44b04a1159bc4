"""The ninth list of bugs: mistakes that maintainers could commit, written blind by two readers, in jobs of their own. Each module calls
`NINTH.edit`."""

from __future__ import annotations

from pathlib import Path

from tests.planted.edits import EditList

NINTH = EditList(jobs=Path(__file__).parent / "jobs")
