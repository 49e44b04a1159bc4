"""A job that stops on request while its loss is read, or while the reading is written, for somebody to kill
it there.

While the file that MESHLOOM_TESTS_HOLD names holds a moment, whoever comes to it makes a second file and goes
on when the first one is gone:

    read            in the loss, when it is called for the first time
    write           in the middle of a file of the cache, which has another name yet
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.jobs import make_job


def hold(*moments: str) -> None:
    """Stay here, if this is the moment."""
    file = Path(os.environ.get("MESHLOOM_TESTS_HOLD", "/nowhere"))
    if file.is_file() and file.read_text() in moments:
        file.with_suffix(".here").touch()
        while file.is_file():
            time.sleep(0.01)


_base = make_job("mlp", "adamw", steps=2)
_mkstemp: Any = tempfile.mkstemp


def _begun(*arguments: Any, **how: Any) -> tuple[int, str]:
    made = _mkstemp(*arguments, **how)
    if how.get("prefix") == ".new-":  # of the cache
        os.write(made[0], b"meshloom kept 1\nhalf")
        hold("write")
        os.lseek(made[0], 0, os.SEEK_SET)
    return made


tempfile.mkstemp = _begun


def _loss(model: Any, batch: Any) -> Any:
    hold("read")
    return _base.loss(model, batch)


job = replace(_base, loss=_loss)
