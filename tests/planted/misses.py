"""Bugs of the list that verification catches and does not name, or places in another module, and why."""

from __future__ import annotations

NOT_NAMED: dict[str, str] = {}
NOT_PLACED: dict[str, str] = {}
