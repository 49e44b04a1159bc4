"""Have a listener of one's own told of the actions of a trainer's rank."""

from __future__ import annotations

from functools import partial
from typing import Any

from meshloom.pipeline.runtime.run import ActionListener
from meshloom.replica.program_stages import ProgramStages
from meshloom.replica.replica import Replica


def listen(replica: Replica, listener: ActionListener) -> None:
    """From now on, instead of what the trainer records."""
    assert isinstance(replica.engine.stages, ProgramStages)
    microbatches: Any = replica.engine.stages.microbatches
    microbatches.train = partial(_train, microbatches.train, listener)


def _train(train: Any, own: ActionListener, _: Any) -> Any:
    return train([own])
