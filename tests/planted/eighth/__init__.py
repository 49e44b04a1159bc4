"""The eighth list of bugs: mistakes that maintainers could commit, written blind, in jobs of their own. Each module calls `EIGHTH.edit`."""

from __future__ import annotations

from pathlib import Path

from tests.planted.edits import EditList

EIGHTH = EditList(jobs=Path(__file__).parent / "jobs")
