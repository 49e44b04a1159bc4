"""A copy in host memory of what a rank writes, so that training can change the state while it is written.

held by ranks   | w: rank 0, 1 | m: rank 0 | m: rank 1 |
copied          | w w | m |  on rank 0      | w w | m |  on rank 1

What only updates change is copied while the next step computes, and its update waits for it:

training    save | forward, backward            | what is left | update
thread           | m m m m m m m m m m m m m m m               | write w m
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import torch
from torch import Tensor

from meshloom.checkpoint.writing.file_layout import HeldSpan
from meshloom.checkpoint.writing.parallel import DividedState, Part, write_divided
from meshloom.checkpoint.writing.problems import attempt, first_problem
from meshloom.checkpoint.writing.saving import WrittenFiles
from meshloom.comm.group import Group
from meshloom.comm.objects import collect
from meshloom.core.device.lanes import Lane, lane_of
from meshloom.core.errors import CheckpointError
from meshloom.core.units import round_up

_ALIGNED_BYTES = 64  # where each part begins
_COPIED_BYTES = 16 * 2**20  # at one time, by training or the thread
_VERSION = attrgetter("_version")


class CopyMemory:
    """Memory for one copy at a time, kept from one save to the next: filling memory that is new to a process takes
    several times as long."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def num_bytes(self) -> int:
        return self._memory.nbytes

    def take(self, num_bytes: int, lane: Lane) -> Tensor:
        """So many bytes to which a lane copies; their content is lost when others are taken."""
        if num_bytes > self._memory.nbytes:
            self.release()
            self._memory = lane.memory([num_bytes], torch.uint8)
        return self._memory[:num_bytes]

    def release(self) -> None:
        """Give the memory back to the system."""
        self._memory = torch.empty(0, dtype=torch.uint8)


class HostCopy:
    """The parts of `divided`, copied into `memory`.

    later: of which parts only updates change the elements: they are copied until `finish` returns, which training calls
    before its next update; the others are copied, or enqueued before what the device is given to compute later, when this
    is made. trusted: parameters among them, by name, that nobody may write meanwhile: one that torch has seen written
    makes the save fail. told: as of `write_divided`.
    """

    def __init__(
        self, divided: DividedState, memory: CopyMemory, *, later: Callable[[HeldSpan], bool] = lambda _: False, trusted: Mapping[str, Tensor] | None = None,
        told: Callable[[int, int], None] = lambda done, of: None,
    ) -> None:  # fmt: skip
        self._told = told
        starts, position = list[int](), 0
        for _, part in divided.parts:
            starts.append(position)
            position += round_up(part.nbytes, _ALIGNED_BYTES)
        devices = sorted({part.device for _, part in divided.parts}, key=lambda device: device.type == "cpu")
        lanes = {device: lane_of(device) for device in devices}  # a rank computes on one, beside the CPU
        self._lanes = list(lanes.values())
        taken = memory.take(position, next(iter(self._lanes), lane_of(torch.device("cpu"))))
        self._trusted = trusted or {}
        self._versions = list(map(_VERSION, self._trusted.values()))
        self._written: str | None = None  # of those that are trusted
        self._left: deque[tuple[Tensor, Tensor]] = deque()
        self._copying = threading.Lock()
        self._checked = False
        for lane in self._lanes:
            lane.after_computation()
        copies: list[Part] = []
        enqueued: list[tuple[Lane, Tensor, Tensor]] = []
        for (span, part), start in zip(divided.parts, starts, strict=True):
            source, copy = part.detach().reshape(-1), taken[start : start + part.nbytes].view(part.dtype)
            copies.append((span, copy))
            if not later(span):
                lanes[part.device].copy(copy, source)
            elif part.device.type == "cpu":
                self._left += _in_pieces(copy, source)
            else:
                enqueued.append((lanes[part.device], copy, source))
        for lane in self._lanes:
            lane.before_computation()
        for lane, copy, source in enqueued:
            lane.copy(copy, source)
        self._enqueued = [lane.mark() for lane in self._lanes]
        self._divided = replace(divided, parts=tuple(copies))

    def finish(self) -> None:
        """Returns when the state may change. Training and the thread that saves both call it, and take turns in
        copying what is left."""
        while self._left:
            with self._copying:
                if self._left:
                    self._copy_one()
        with self._copying:  # what the other one has begun
            if not self._checked:
                self._checked = True
                self._written = next(
                    (
                        name
                        for (name, each), version in zip(self._trusted.items(), self._versions, strict=True)
                        if _VERSION(each) != version
                    ),
                    None,
                )

    def before_update(self) -> None:
        """`finish`, of training, on whose device copies may be under way, too."""
        self.finish()
        for lane in self._lanes:
            lane.before_computation()

    def write(self, directory: Path, temporary: Path, group: Group) -> WrittenFiles:
        """Writes what was copied, as `saving.Write`."""
        for arrived in self._enqueued:
            arrived()
        problem = attempt(group.rank, directory, 0, self._check_whole)
        problem = first_problem(collect(group, {"problem": problem}))
        if problem is not None:
            return WrittenFiles(problem=problem, files={}, pieces={})
        return write_divided(self._divided, told=self._told)(directory, temporary, group)

    def _copy_one(self) -> None:
        target, source = self._left[0]
        target.copy_(source)
        self._left.popleft()

    def _check_whole(self) -> None:
        if self._written is not None:
            raise CheckpointError(
                f"{self._written} was changed outside the optimizer while it was copied. Leave it to the optimizer, or save with checkpoint=foreground"
            )


def _in_pieces(target: Tensor, source: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Two flat tensors as pairs of parts of a few bytes."""
    length = max(_COPIED_BYTES // source.itemsize, 1)
    return zip(target.split(length), source.split(length), strict=True)
