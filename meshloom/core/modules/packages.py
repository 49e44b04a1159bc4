"""Which files are of installed packages."""

from __future__ import annotations


def is_of_package(file: str) -> bool:
    """Whether a file is of an installed package, also of one in an environment beneath this one.

    >>> is_of_package("/env/lib/python3.12/site-packages/numpy/__init__.py"), is_of_package("/home/me/train.py")
    (True, False)
    """
    return "site-packages" in file or "dist-packages" in file
