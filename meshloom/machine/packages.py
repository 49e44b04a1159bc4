"""What is installed beside this package."""

from __future__ import annotations

from importlib import metadata


def version_of(package: str) -> str | None:
    """None: it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
