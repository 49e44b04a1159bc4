"""The user's line behind an error or a call, and the package's line that it led to."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch

from meshloom.program.ir.lines import SourceLine, SourcePlace, describe_line, place_here, place_of_error


def test_an_error_in_a_package_names_the_users_line_and_the_packages():
    with pytest.raises(numpy.linalg.LinAlgError) as raised:
        numpy.linalg.inv(numpy.zeros((2, 3)))  # here
    place = place_of_error(raised.tb)
    assert place.line is not None and place.line.text == "numpy.linalg.inv(numpy.zeros((2, 3)))  # here"
    assert place.inside is not None and "numpy/linalg" in place.inside.file
    assert str(place).startswith(f"{__file__}:{place.line.number} (numpy.linalg.inv") and ", inside " in str(
        place
    )


def test_an_error_in_torch_names_the_users_line_alone():
    with pytest.raises(RuntimeError) as raised:
        torch.ones(2).view(3)
    place = place_of_error(raised.tb)
    assert (
        place.inside is None
        and place.line is not None
        and place.line.function == "test_an_error_in_torch_names_the_users_line_alone"
    )


def test_a_function_of_the_users_that_a_package_calls_is_the_users():
    places: list[SourcePlace] = []
    numpy.apply_along_axis(lambda row: places.append(place_here()) or row, 0, numpy.zeros(2))
    assert places[0].inside is None and places[0].line is not None and places[0].line.file == __file__


def test_where_nothing_is_the_users():
    assert str(SourcePlace(None, None)) == "a line that could not be found"


def test_a_sentence_shows_the_beginning_of_a_long_line(tmp_path: Path):
    """Of a job in one line of 600 characters, five sentences about layers showed all of it."""
    file = tmp_path / "job.py"
    file.write_text(f"short = 1\nlong = {'1 + ' * 150}1\n")
    assert describe_line(SourceLine(str(file), 1, "")) == f"{file}:1 (short = 1)"
    text = describe_line(SourceLine(str(file), 2, ""))
    assert (
        text.startswith(f"{file}:2 (long = 1 + 1")
        and text.endswith(" ...)")
        and len(text) < len(str(file)) + 140
    )
