"""What benchmarks found, as the records that they write."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def write_records(records: Iterable[Mapping[str, Any]], where: str | None) -> None:
    """One per line to a file; -: to standard output; None: nowhere."""
    lines = "".join(json.dumps(record) + "\n" for record in records)
    if where == "-":
        sys.stdout.write(lines)
    elif where:
        Path(where).write_text(lines)
