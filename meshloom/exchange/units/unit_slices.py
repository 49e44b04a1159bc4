"""Units of parameters of which each replica keeps one dp-th, and their full values while something computes
with them.

    unit blocks.1     parameters, flat     | ln.weight | attn.weight ...         | padding |
                      kept by rank         | 0              | 1             | 2             |

Between uses a parameter has its shape, and all its elements are one NaN, so that a use which nobody has
gathered it for cannot pass for a result. Values that somebody still refers to (a view, a saved tensor of a
recomputation) stay in memory until they are not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from meshloom.comm.windows import next_start
from meshloom.core.device.flat_bytes import flat_bytes
from meshloom.program.operators.fused_grad_accumulation import GradBuffer

Layout = tuple[Sequence[int], Sequence[int], int]  # sizes, strides and offset in a flat tensor


@dataclass(frozen=True, kw_only=True)
class UnitParameters:
    """Parameters that are gathered and let go of together. module: whose forward they are gathered for; None:
    they stay from the start of a step's computation to its end."""

    name: str
    module: nn.Module | None
    named: Sequence[tuple[str, nn.Parameter]]


class UnitEntry:
    """A parameter's place in its flat tensor: elements `start` to `stop`."""

    def __init__(self, name: str, parameter: nn.Parameter, start: int) -> None:
        self.name, self.parameter = name, parameter
        self.start, self.stop = start, start + parameter.numel()
        self.used = False  # a gradient arrived in this step
        self.waits = False  # it arrived, and has not been sent yet
        fill = float("nan") if parameter.is_floating_point() or parameter.is_complex() else 0
        one = torch.full((), fill, dtype=parameter.dtype, device=parameter.device)
        self.absent = one.expand(parameter.shape)  # what the parameter is while its values are not here
        strides = torch.empty_like(self.absent, memory_format=torch.contiguous_format, device="meta").stride()
        self.layout: Layout = parameter.shape, strides, start
        self._address = self._version = 0

    def fill(self, flat: Tensor) -> None:
        """The parameter becomes a view of `flat`."""
        self.parameter.data = flat[self.start : self.stop].view(self.parameter.shape)
        self._address, self._version = self.parameter.data_ptr(), self.parameter._version  # pyright: ignore[reportPrivateUsage]

    def empty(self) -> bool:
        """The parameter lets go of its values; whether something has written to them."""
        same = self.parameter.data_ptr() == self._address and self.parameter._version == self._version  # pyright: ignore[reportPrivateUsage]
        self.drop()
        return not same

    def drop(self) -> None:
        """The same, of values that are not looked at."""
        self.parameter.data = self.absent


class UnitSlice(NamedTuple):
    """Elements `start` to `stop` of a parameter, which a rank keeps from `at` on."""

    entry: UnitEntry
    start: int
    stop: int
    at: int

    def of(self, kept: Tensor) -> Tensor:
        """These elements of a tensor with the layout of what the rank keeps."""
        return kept[self.at : self.at + self.stop - self.start]


class UnitFlat:
    """The parameters of a unit that have one dtype and are all trainable, or all frozen, and are together for
    `Unit`. is_trainable: whether they are trained, and their gradients added up here. kept: this rank's slice of their
    values. summed: its slice of the sum of gradients, from a step's chunks to the end of its update."""

    def __init__(
        self, named: Sequence[tuple[str, nn.Parameter]], rank: int, size: int, *, elsewhere: bool = False
    ) -> None:
        self.entries: list[UnitEntry] = []
        for name, parameter in named:
            start = next_start(self.entries[-1].stop if self.entries else 0, parameter)
            self.entries.append(UnitEntry(name, parameter, start))
        first = named[0][1]
        self.is_trainable = first.requires_grad and not elsewhere
        self._length = -(-self.entries[-1].stop // size)
        self._rank, self._size = rank, size
        self.kept = torch.zeros(self._length, dtype=first.dtype, device=first.device)
        self.summed: Tensor | None = None
        self.gradient: Tensor | None = None  # full, of what has arrived and has not been sent
        for entry in self.entries:
            if entry.parameter.untyped_storage().nbytes():  # else what is kept is filled later
                self.keep(entry, entry.parameter.data)
            entry.drop()

    @property
    def is_complete(self) -> bool:
        """Whether the gradient of every parameter has arrived and not been sent."""
        return all(entry.waits for entry in self.entries)

    @property
    def num_bytes(self) -> int:
        """Of the full tensor."""
        return self.kept.nbytes * self._size

    def full(self) -> Tensor:
        """A new full tensor, not filled."""
        return self.kept.new_empty(self._length * self._size)

    def keep(self, entry: UnitEntry, whole: Tensor) -> None:
        """Takes this rank's slice of a parameter's full value."""
        start, stop = self._mine(entry)
        if start < stop:
            values = whole.detach().reshape(-1)[start:stop]
            self.kept[self._at(entry, start) : self._at(entry, stop)] = values

    def written(self, values: Tensor) -> UnitEntry | None:
        """A parameter of whose full `values` this rank's slice is not what it keeps."""
        for each in self.slices():
            here = values[each.entry.start :][each.start : each.stop]
            if not torch.equal(flat_bytes(here), flat_bytes(each.of(self.kept))):
                return each.entry
        return None

    def slices(self) -> Iterator[UnitSlice]:
        """What this rank keeps of each parameter."""
        for entry in self.entries:
            start, stop = self._mine(entry)
            if start < stop:
                yield UnitSlice(entry, start, stop, self._at(entry, start))

    def add_gradient(self, entry: UnitEntry) -> None:
        """Moves a parameter's gradient into the full gradient."""
        found = entry.parameter.grad
        assert found is not None
        if self.gradient is None:
            self.gradient = self.full().zero_()
        view = self.gradient[entry.start : entry.stop].view(entry.parameter.shape)
        GradBuffer(tensor=view, filled=entry.waits).add(found)
        entry.parameter.grad = None
        entry.used = entry.waits = True

    def take_gradient(self) -> Tensor:
        """The full gradient of what has arrived, zeros elsewhere; from now on another one is filled."""
        taken = self.gradient if self.gradient is not None else self.full().zero_()
        self.gradient = None
        for entry in self.entries:
            entry.waits = False
        return taken

    def _mine(self, entry: UnitEntry) -> tuple[int, int]:
        """Start and stop of this rank's elements of a parameter; none if start >= stop."""
        first = self._rank * self._length
        start, stop = max(entry.start, first), min(entry.stop, first + self._length)
        return start - entry.start, stop - entry.start

    def _at(self, entry: UnitEntry, element: int) -> int:
        return entry.start + element - self._rank * self._length


class Unit:
    """A unit on one rank.

    held: why its values are here: the number of forwards of its module that are running, tensors saved for
    backward, and whether it stays until the end of the chunk.
    together: name of a parameter -> what it has in common with those that it may share a flat tensor with.
    elsewhere: names of parameters whose gradients are not added up here.
    """

    def __init__(
        self,
        number: int,
        parameters: UnitParameters,
        rank: int,
        size: int,
        together: Callable[[str], Hashable] = lambda name: None,
        elsewhere: Collection[str] = (),
    ) -> None:
        self.number, self.name, self.module = number, parameters.name, parameters.module
        kinds: dict[Hashable, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in parameters.named:
            kind = parameter.dtype, parameter.device, parameter.requires_grad, together(name)
            apart = name if name in elsewhere else None
            kinds.setdefault((kind, apart), []).append((name, parameter))
        self.parts = [
            UnitFlat(named, rank, size, elsewhere=named[0][0] in elsewhere) for named in kinds.values()
        ]
        self.values: list[Tensor] | None = None  # full, one of each part, while they are here
        self.num_running = self.num_saved = 0
        self.stays = False

    @property
    def trainable_parts(self) -> list[UnitFlat]:
        return [part for part in self.parts if part.is_trainable]

    @property
    def is_needed(self) -> bool:
        """Whether something computes, or will compute in backward, with the values that are here."""
        return self.stays or self.num_running > 0 or self.num_saved > 0

    def fill(self, values: list[Tensor]) -> None:
        """The parameters get their values."""
        self.values = values
        with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
            for part, flat in zip(self.parts, values, strict=True):
                for entry in part.entries:
                    entry.fill(flat)

    def empty(self, *, looks: bool) -> UnitEntry | None:
        """The parameters let go of their values; one that something has written to. looks: also around torch's count."""
        if self.values is None:
            return None
        values, self.values, written = self.values, None, None
        with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
            for part, flat in zip(self.parts, values, strict=True):
                written = written or (part.written(flat) if looks else None)
                for entry in part.entries:
                    written = entry if entry.empty() and not written else written
        return written
