"""Have a listener of one's own told of the actions of a trainer's rank."""

from __future__ import annotations

from functools import partial
from typing import Any

from meshloom.pipeline.runtime.run import ActionListener
from meshloom.replica.program_engine import ProgramEngine
from meshloom.replica.replica import Replica


def listen(replica: Replica, listener: ActionListener) -> None:
    """From now on, instead of what the trainer records."""
    assert isinstance(replica.engine, ProgramEngine)
    microbatches: Any = replica.engine.microbatches
    microbatches.train = partial(_train, microbatches.train, listener)


def _train(train: Any, own: ActionListener, batches: Any, *, listener: Any = None, **words: Any) -> int:
    return train(batches, listener=own, **words)
