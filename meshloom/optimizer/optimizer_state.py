"""The state of a job's optimizers and schedulers: saved by all ranks together, loaded under any plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from meshloom.checkpoint.checkpoint import Piece
from meshloom.checkpoint.format import AVERAGE, MASTER
from meshloom.checkpoint.json_values import from_json
from meshloom.comm.group import Group
from meshloom.core.errors import CheckpointError
from meshloom.optimizer.assignment import UpdatedParameters
from meshloom.optimizer.average_state import average_state
from meshloom.optimizer.averages import ParameterAverages
from meshloom.optimizer.offload import OffloadedState
from meshloom.optimizer.state_pieces import (
    OwnedSlice,
    Read,
    check_state,
    copy_pieces,
    load_copies,
    load_settings,
    settings,
    state_loader,
    state_pieces,
)
from meshloom.optimizer.user_optimizer import UserOptimizers, scheduler_values
from meshloom.telemetry.traffic import ExpectedBytes, Traffic


class OptimizerState:
    """What one rank has of it.

    user: the optimizers. assignment: what they update here. offloaded: where the state is; None: in memory.
    `masters`: copies of parameters in another precision, which are saved with it. `averages`: of parameters, if the job
    keeps some, likewise. optimizers: the user's, on this rank's parameters. schedulers:
    those that go by steps, then those that go by a metric.
    """

    def __init__(
        self, user: UserOptimizers, schedulers: Sequence[Any], assignment: UpdatedParameters, device: torch.device,
        offloaded: OffloadedState | None = None,
    ) -> None:  # fmt: skip
        self.optimizers: Sequence[Optimizer] = user.optimizers
        self.names, self._given = user.names, user.given
        self._given_at_first = user.given  # in the run that a checkpoint is of, whose settings go on
        self.schedulers, self._assignment = schedulers, assignment
        self._device, self._offloaded, self._traffic = device, offloaded, Traffic()
        self.masters: Sequence[OwnedSlice] = ()
        self.averages: ParameterAverages | None = None

    def check_saved(self) -> None:
        """Raises `JobError` where this rank's state, which is there after a step, cannot be saved. What is offloaded is
        not brought here for it."""
        for optimizer, held in zip(self.optimizers, self._assignment.held, strict=True):
            check_state(optimizer, held if self._offloaded is None else [])

    def save(self, *, self_contained: bool = False) -> tuple[list[Piece], dict[str, Any]]:
        """This rank's pieces of the state's tensors, and JSON values that are equal on all ranks.

        self_contained: with all that it takes to load this rank's pieces without those of others.
        """
        pieces: list[Piece] = []
        for optimizer, held in zip(self.optimizers, self._assignment.held, strict=True):
            pieces += state_pieces(optimizer, held, self_contained=self_contained)
        averages = self.averages.held if self.averages else ()
        return pieces + copy_pieces(self.masters, MASTER) + copy_pieces(averages, AVERAGE), self.values()

    def values(self) -> dict[str, Any]:
        """What is not in tensors, as JSON: equal on all ranks."""
        return {
            "optimizers": [
                {**settings(optimizer), "names": names, "given": given}
                for optimizer, names, given in zip(
                    self.optimizers, self.names, self._given_at_first, strict=True
                )
            ],
            "schedulers": [scheduler_values(scheduler) for scheduler in self.schedulers],
        }

    def other_settings(self, values: Mapping[str, Any]) -> str:
        """A line on the first setting that the job's optimizer function gives otherwise than it did when `values` were saved; "" if there is none,
        or if they are of a time when this was not saved."""
        for optimizer, saved, given in zip(self.optimizers, values["optimizers"], self._given, strict=True):
            groups = zip(saved.get("given", []), given, saved["groups"], strict=False)
            for number, each in enumerate(groups):
                there, here, goes_on = (dict(group["dict"]) for group in each)
                for key in [key for key in here if key in there and there[key] != here[key]]:
                    was, gives, now = (from_json(group[key]) for group in (there, here, goes_on))
                    return (
                        f"The job's optimizer function gives {key}={gives} to group {number} of {type(optimizer).__name__}, and gave {key}={was} where the checkpoint "
                        f"was written: the run goes on with the checkpoint's settings, {key}={now} now. A new run with Job(weights=...) has those of the job."
                    )
        return ""

    def average(self, group: Group, talk: Group) -> None:
        """Replicas that have taken independent steps get the same state. Arguments: of `average_state`."""
        for optimizer, held in zip(self.optimizers, self._assignment.held, strict=True):
            self._traffic += average_state(optimizer, held, group, talk, self._device)
        self.give_back()

    @property
    def num_bytes(self) -> int:
        """Bytes of the state that is in this rank's memory; what is offloaded is not."""
        # an optimizer of the user's may keep anything under any key
        found = [state for each in self.optimizers for state in each.state.values()]
        values = [value for state in found if isinstance(state, Mapping) for value in state.values()]
        return sum(value.nbytes for value in values if isinstance(value, Tensor))

    def give_back(self) -> None:
        """Of what is offloaded, let go of what reading or changing it has brought into memory."""
        if self._offloaded:
            self._offloaded.keep_all()

    @property
    def let_go(self) -> Callable[[Tensor], None] | None:
        """What a save calls with a tensor of which it has read some; None: nothing is offloaded."""
        return self._offloaded.let_go if self._offloaded else None

    def load(self, read: Read, shapes: Mapping[str, Sequence[int]], values: Mapping[str, Any]) -> None:
        """Restore what `save` gave on all ranks together, under any plan.

        read: of (key, start, stop), elements of a saved tensor, flat. shapes: every saved key and the full
            shape behind it.
        """
        take, finish = self.loading(values)
        for key, shape in shapes.items():
            take(key, shape, read)
        finish()

    def loading(
        self, values: Mapping[str, Any]
    ) -> tuple[Callable[[str, Sequence[int], Read], None], Callable[[], None]]:
        """`load` key by key: what takes each, of the arguments of `state_loader`, and what is to be called
        after the last one."""
        for what, here in (("optimizers", self.optimizers), ("schedulers", self.schedulers)):
            if len(values[what]) != len(here):
                raise CheckpointError(
                    f"The checkpoint has {len(values[what])} {what} and the job {len(here)}. Resume with what was saved, or start a new run."
                )

        def finish() -> None:
            for optimizer, saved in zip(self.optimizers, values["optimizers"], strict=True):
                load_settings(optimizer, saved)
            if self._assignment.from_shards:
                self._assignment.from_shards.invalidate()
            pairs = zip(values["optimizers"], self._given, strict=True)
            self._given_at_first = [saved.get("given", given) for saved, given in pairs]
            for scheduler, saved in zip(self.schedulers, values["schedulers"], strict=True):
                scheduler.load_state_dict(from_json(saved))

        placed = self._offloaded.keep if self._offloaded else None
        take_state = state_loader(list(zip(self.optimizers, self._assignment.held, strict=True)), placed)

        def take(path: str, shape: Sequence[int], read: Read) -> None:
            if path.endswith(f"/{MASTER}"):
                load_copies(self.masters, path, shape, read, MASTER)
            elif path.endswith(f"/{AVERAGE}"):
                self.averages.load(path, shape, read) if self.averages else None
            else:
                take_state(path, shape, read)

        return take, finish

    def expected_bytes(self) -> ExpectedBytes:
        """Of all that was averaged so far."""
        return ExpectedBytes(so_far=self._traffic)
