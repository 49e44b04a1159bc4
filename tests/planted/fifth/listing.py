"""Where the bugs of the fifth list are gathered."""

from __future__ import annotations

from pathlib import Path

from tests.planted.edits import EditList

FIFTH = EditList(jobs=Path(__file__).parent)
edit = FIFTH.edit
