"""The steps that docs/architecture.md follows pass the files and lines that it says, and few of them."""

from __future__ import annotations

import re

import pytest

from tests.followed import DOCUMENT, REFERENCE, corrected

TEXT = DOCUMENT.read_text(encoding="utf-8")
MOST_FILES = {"dp": 10, "tp": 16, "pp": 16}


def test_every_line_that_is_named_is_where_it_is_said_to_be():
    assert corrected(TEXT) == TEXT, "Put today's line numbers in: python -m tests.followed"


@pytest.mark.parametrize("axis", MOST_FILES)
def test_a_step_passes_few_files(axis: str):
    section = re.search(rf"### A step under {axis}\n(.*?)(?=\n##)", TEXT, re.DOTALL)
    assert section, f"docs/architecture.md follows no step under {axis}"
    files = {found["file"] for found in REFERENCE.finditer(section[1])}
    assert 5 < len(files) <= MOST_FILES[axis], sorted(files)
