"""Which files are the user's, of installed packages, and of what runs them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch

_OWN = (f"{Path(__file__).parents[2]}{os.sep}", str(Path(torch.__file__).parent), "<")
_LIBRARY = f"{Path(tempfile.__file__).parent}{os.sep}"
_OF_TORCH = (
    "/sympy/",
    "/mpmath/",
    "/torchinductor",
)  # it computes symbolic sizes in them, and writes its kernels there


def is_of_package(file: str) -> bool:
    """Whether a file is of an installed package, also of one in an environment beneath this one.

    >>> is_of_package("/env/lib/python3.12/site-packages/numpy/__init__.py"), is_of_package("/home/me/train.py")
    (True, False)
    """
    return "site-packages" in file or "dist-packages" in file


def is_users(file: str) -> bool:
    """Whether code of this name is of the user's files: of no library, nor text that was given to `exec`."""
    return not (is_underneath(file) or is_of_package(file))


def is_underneath(file: str) -> bool:
    """Whether it is of what runs everybody's code: torch, meshloom, the standard library, text."""
    is_library = file.startswith(_LIBRARY) and not is_of_package(file)
    return is_library or file.startswith(_OWN) or any(part in file for part in _OF_TORCH)
