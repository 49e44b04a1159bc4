"""One copy of the parameters for all replicas of a host: each rank updates its own slices where all others
read them.

                 gradients, each in its rank's window          parameters, in the window of rank 0
    rank 0       [ sum | ... | ... ]                           [ updated by 0 | updated by 1 | updated by 2 ]
    rank 1       [ ... | sum | ... ]   each sums its slice            ^ read by all ranks
    rank 2       [ ... | ... | sum ]   of everybody's

Nothing is sent. Two meetings per step keep readers and writers apart: nobody updates before all ranks have
computed their chunks (the end of `Exchange.finish`, where they count who used which parameter), and nobody
reads before all have updated (`publish`).

With a copy each, what a training forward does to a parameter happens once on every replica. With one copy it
would happen as many times as there are replicas, so it is an error.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from meshloom.comm.group import Group
from meshloom.comm.steps import Steps
from meshloom.comm.windows import Extent, Windows, in_window, window_bytes
from meshloom.core.errors import TrainingError
from meshloom.exchange.buckets.buckets import Bucket
from meshloom.exchange.copies import Copies, extent_of
from meshloom.telemetry.traffic import ExpectedBytes

BITS_EVERY = 100  # steps between comparisons of all bits before and after a step's chunks
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class OneForAll(Copies):
    """All ranks' parameters lie in the window of rank 0.

    group: the replicas, for meetings; `windows` is the same group. frozen: parameters that nobody updates, by
    name, which lie there too. Every rank has equal values when this is made, and writes its share of them.
    All ranks make it together.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        group: Group,
        windows: Windows,
        frozen: Sequence[tuple[str, nn.Parameter]] = (),
    ) -> None:
        self._group = group
        extents = [extent_of(bucket) for bucket in buckets]
        extents += [
            Extent(num_elements=each.numel(), dtype=each.dtype, device=each.device) for _, each in frozen
        ]
        flats = in_window(windows.window(window_bytes(extents), owner=0), 0, extents)
        for bucket, flat in zip(buckets, flats, strict=False):
            share = flat.numel() // group.size
            first, last = group.rank * share, (group.rank + 1) * share
            for entry in bucket.entries:
                start, stop = max(entry.start, first), min(entry.stop, last)
                if start < stop:
                    flat[start:stop] = entry.parameter.data.reshape(-1)[
                        start - entry.start : stop - entry.start
                    ]
                entry.parameter.data = flat[entry.start : entry.stop].view(entry.parameter.shape)
        for number, ((_, parameter), flat) in enumerate(zip(frozen, flats[len(buckets) :], strict=True)):
            place = flat.view(parameter.shape)
            if number % group.size == group.rank:
                place.copy_(parameter.data)
            parameter.data = place
        self._untouched = Untouched(
            [(entry.name, entry.parameter) for bucket in buckets for entry in bucket.entries] + list(frozen)
        )

    @property
    def is_one(self) -> bool:
        return True

    def open(self) -> Steps[None]:
        yield from self._meet()

    def begin_step(self) -> None:
        self._untouched.begin_step()

    def computed(self) -> None:
        self._untouched.check()

    def publish(self) -> Steps[None]:
        yield from self._meet()
        self._untouched.note()

    def expected_bytes(self) -> ExpectedBytes:
        return ExpectedBytes()

    def _meet(self) -> Steps[None]:
        work = self._group.barrier()
        yield
        work.wait()


class Untouched:
    """Finds out that somebody other than the owners wrote a parameter.

    What torch sees being written in place counts in a tensor's version, which is looked at in every step.
    What goes around that (`.data`) is found by comparing bits before and after the chunks of every hundredth
    step. No rank updates in between, so every change seen there is a mistake.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        self._named = list(named)
        self._versions: list[int] = []  # after the newest update
        self._bits: list[int] = []  # before the chunks, in steps in which they are compared
        self._steps = 0

    def begin_step(self) -> None:
        """What is written before the first step (a checkpoint that is loaded) is everybody's."""
        if not self._versions:
            self.note()
        self._bits = [_sum_of_bits(each) for _, each in self._named] if self._steps % BITS_EVERY == 0 else []
        self._steps += 1

    def check(self) -> None:
        """Raise `TrainingError` naming the first parameter that was written since."""
        for (name, parameter), version in zip(self._named, self._versions, strict=True):
            if parameter._version != version:
                raise _written(name)
        for (name, parameter), bits in zip(self._named if self._bits else (), self._bits, strict=True):
            if _sum_of_bits(parameter) != bits:
                raise _written(name)

    def note(self) -> None:
        """The owners have written."""
        self._versions = [each._version for _, each in self._named]


def _written(name: str) -> TrainingError:
    return TrainingError(
        f"{name} was changed outside the optimizer (in a forward, a hook or between steps), and all replicas of this host have one copy of it: the change "
        "would be made once by each. Leave it to the optimizer, compute the changed value anew in forward, or let ranks talk over Gloo (--transport gloo), "
        "where every replica has a copy of its own."
    )


def _sum_of_bits(tensor: Tensor) -> int:
    flat = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return (
        int(flat.view(_INTEGERS[flat.element_size()]).sum(dtype=torch.int64))
        if flat.ndim
        else int(flat.view(1).view(_INTEGERS[flat.element_size()]))
    )
