"""Where the bugs of the fourth list are gathered."""

from __future__ import annotations

from pathlib import Path

from tests.planted.edits import EditList

FOURTH = EditList(jobs=Path(__file__).parent / "jobs")
edit = FOURTH.edit
