"""Which files are of installed packages."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch

_LIBRARIES = tuple(
    f"{each}{os.sep}"
    for each in (
        Path(__file__).parents[2],
        Path(torch.__file__).parent,
        Path(tempfile.__file__).parent,
    )
)


def is_of_package(file: str) -> bool:
    """Whether a file is of an installed package, also of one in an environment beneath this one.

    >>> is_of_package("/env/lib/python3.12/site-packages/numpy/__init__.py"), is_of_package("/home/me/train.py")
    (True, False)
    """
    return "site-packages" in file or "dist-packages" in file


def is_users(file: str) -> bool:
    """Whether code of this name is of the user's files: of no library, nor text that was given to `exec`."""
    return not (file.startswith((*_LIBRARIES, "<")) or is_of_package(file))
