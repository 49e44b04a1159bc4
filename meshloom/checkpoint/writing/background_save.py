"""A save that a thread of low priority carries out while training goes on."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

_LOWEST_PRIORITY = 19  # as `nice` counts


@dataclass
class SavedShare:
    """How much of its bytes a rank has written of a save, 0 to 1. told: called with the bytes and their number, for whoever waits."""

    share: float = 0.0
    told: Callable[[int, int], None] = lambda done, of: None

    def note(self, done: int, of: int) -> None:
        self.share = done / of if of else 1.0
        self.told(done, of)


class BackgroundSave:
    """A save under way. Whoever starts it waits for it. step: whose state is saved. copy: what training must not wait for
    long, so it has training's priority. carry_out: saves, and returns the checkpoint's path.

    The thread is no daemon: a program that ends without waiting ends with a whole checkpoint.
    """

    def __init__(self, step: int, copy: Callable[[], None], carry_out: Callable[[], Path]) -> None:
        self.step = step
        self._copy: Callable[[], None] | None = copy
        self._carry_out: Callable[[], Path] | None = carry_out
        self._path: Path | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"saving step {step}")
        self._thread.start()

    @property
    def over(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    @property
    def failed(self) -> bool:
        """Whether it has ended, and not well."""
        return self.over and self._error is not None

    def wait(self) -> Path:
        """The checkpoint's path, once it is whole. Raises what the save has raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._path is not None
        return self._path

    def _run(self) -> None:
        assert self._copy is not None and self._carry_out is not None
        try:
            with torch.no_grad():  # the mode is per thread
                self._copy()
                _lower_priority()
                self._path = self._carry_out()
        except BaseException as error:
            self._error = error
        self._copy = self._carry_out = None  # and the copy that they hold


def _lower_priority() -> None:
    """Of this thread alone, as Linux counts; its reads and writes have the priority that goes with it."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
