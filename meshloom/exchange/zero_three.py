"""ZeRO-3: a replica keeps one dp-th of parameters, gradients and optimizer state. A unit's parameters are
gathered before they are used, and let go of afterwards; its gradients are added up chunk by chunk.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020),
    stage 3.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence

import torch
from torch import Tensor, nn

from meshloom.comm.collectives.travelling import TravellingSums
from meshloom.comm.group import Group, Work
from meshloom.core.losses.loss_sum import Divisor, divides
from meshloom.core.step_shape import StepShape
from meshloom.exchange.alone import Unbuffered
from meshloom.exchange.buckets.flags import set_flags, used_anywhere
from meshloom.exchange.disjoint import parts_of
from meshloom.exchange.exchange import Emit, Exchange, Ownership, Ready, Slice
from meshloom.exchange.registry import Setup
from meshloom.exchange.units.unit_gathering import UnitGathering
from meshloom.exchange.units.unit_slices import Unit, UnitFlat, UnitParameters, UnitSlice
from meshloom.telemetry.traffic import ExpectedBytes, Traffic


def open_zero_three(setup: Setup) -> Exchange:
    """The exchange of a plan with zero=3. Gradients of `setup.sparse` are left to another."""
    assert setup.control is not None
    late, replicated = set(setup.late), set(setup.replicated)

    def together(name: str) -> Hashable:
        # What several ranks along pp hold has equal slices on all of them, and what is replicated along tp is
        # added up at equal places on all of them, whatever else they hold.
        if name in setup.lent:
            return name
        return name in late, name in replicated

    owned = {name for name, _ in setup.named}
    parts = setup.slices
    exchange = ZeroThree(
        setup.units(),
        parts.copy if parts else setup.group,
        parts.control if parts else setup.control,
        replicas=setup.group,
        equals=parts.equals if parts else None,
        overlap=setup.plan.overlap,
        together=together,
        elsewhere=setup.sparse,
        borrowed=[name for name, owns in setup.lent.items() if not owns],
        late=any(name in owned for name in late),
        travels=setup.travels,
    )
    if setup.unfilled and setup.unfilled.lacks_parameters:
        setup.unfilled.fill_slices(
            [(each.name, each.start, each.stop, each.data()) for each in exchange.each_slice(borrowed=True)],
            {entry.name for unit in exchange.units for part in unit.parts for entry in part.entries},
        )
    return exchange


class ZeroThree(Unbuffered):
    """Over `group`. units: all parameters, frozen ones too. control: the same ranks, for messages that are
    not counted. overlap: whether units are gathered ahead. together, elsewhere: as for `Unit`.

    replicas: `group`, or more ranks of which it is a part. equals: then those of them that keep the same slices as
        this one, in other parts; sums of gradients are added up over these once a step.
    borrowed: names of parameters of which another rank of the replica owns a copy; each is apart from others
    (`together`). late: whether some gradients are complete only after the chunks. travels: what gradients travel as; None: their own
    dtype.
    """

    def __init__(
        self,
        units: Sequence[UnitParameters],
        group: Group,
        control: Group,
        *,
        replicas: Group,
        equals: Group | None = None,
        overlap: bool,
        together: Callable[[str], Hashable] = lambda name: None,
        elsewhere: Collection[str] = (),
        borrowed: Collection[str] = (),
        late: bool = False,
        travels: torch.dtype | None = None,
    ) -> None:
        self._group, self._late = group, late
        self._sums = TravellingSums(equals or group, travels)
        self._replicas, self.equals = replicas, equals
        self.units = [
            Unit(number, each, group.rank, group.size, together, elsewhere)
            for number, each in enumerate(units)
        ]
        self.gathering = UnitGathering(self.units, group, control, ahead=overlap, travels=travels)
        self._parts = [part for unit in self.units for part in unit.parts]
        self._owned = [part for part in self._parts if part.entries[0].name not in borrowed]
        self._trained = [part for part in self._owned if part.is_trainable]
        self._mine = [(part, each) for part in self._trained for each in part.slices()]
        self._entries = [entry for part in self._trained for entry in part.entries]
        self._used = torch.zeros(len(self._entries), dtype=torch.uint8, device=self._parts[0].kept.device)
        self._inspected = Traffic()
        mine = [_slice(part, each) for part, each in self._mine]
        self.ownership = Ownership(
            owned=mine, owners=group, num_owners=group.size, memory="sliced", each_chunk=True
        )

    def begin(self, shape: StepShape) -> None:
        for part in self._trained:
            part.summed = part.gradient = None
            for entry in part.entries:
                entry.parameter.grad = None
                entry.used = entry.waits = False

    def hook(self, parameter: nn.Parameter) -> Ready:
        _, part, entry = self.gathering.places[id(parameter)]

        def ready(parameter: nn.Parameter) -> None:
            if parameter.grad is None:
                return
            part.add_gradient(entry)
            if part.is_complete:
                self.gathering.complete(part)

        return ready

    def finish(self, weight: Divisor) -> list[Tensor | None]:
        self.gathering.end_step(late=self._late)
        set_flags(self._used, [entry.used for entry in self._entries])
        self._replicas.all_reduce(self._used, "max").wait()
        self._add_up_equals()
        used = used_anywhere([entry.used for entry in self._entries], self._used)
        for entry, is_used in zip(self._entries, used, strict=True):
            entry.used = is_used
        for part in self._trained:
            if part.summed is not None and divides(weight):
                part.summed.div_(weight)
        return [
            each.of(part.summed) if each.entry.used and part.summed is not None else None
            for part, each in self._mine
        ]

    def _add_up_equals(self) -> None:
        if self.equals is None:
            return
        works: list[Work] = []
        for part in self._trained:
            if part.summed is None:  # no chunk of this group of replicas has used it
                part.summed = torch.zeros_like(part.kept)
            works.append(self._sums.all_reduce(part.summed))
        for work in works:
            work.wait()

    def publish(self) -> bool:
        """Units are gathered when they are used. The gradients' slices have been, and are let go of."""
        for part in self._trained:
            part.summed = None
        return False

    def gather(self, gradients: list[Tensor | None], emit: Emit) -> None:
        found = {id(each.entry): gradient for (_, each), gradient in zip(self._mine, gradients, strict=True)}
        for part in self._trained:
            share = torch.zeros_like(part.kept)
            for each in part.slices():
                gradient = found[id(each.entry)]
                if gradient is not None:
                    each.of(share).copy_(gradient)
            flat = self.full(part, share)
            for entry in part.entries:
                whole = flat[entry.start : entry.stop].view(entry.parameter.shape)
                emit(entry.name, whole if entry.used else None)

    def each_parameter(
        self, emit: Callable[[str, Tensor], None], wanted: Callable[[str], bool] = lambda name: True
    ) -> None:
        """Passes the full value of every parameter to `emit` on every rank; one flat tensor is gathered at a
        time."""
        for part in self._owned:
            if any(wanted(entry.name) for entry in part.entries):
                flat = self.full(part, part.kept)
                for entry in part.entries:
                    whole = flat[entry.start : entry.stop].view(entry.parameter.shape)
                    emit(entry.name, whole)

    def each_slice(self, *, borrowed: bool = False) -> list[Slice]:
        """What this rank keeps of all parameters, frozen ones too. borrowed: also of those that others own."""
        parts = self._parts if borrowed else self._owned
        return [_slice(part, each) for part in parts for each in part.slices()]

    def kept(self, names: Collection[str]) -> dict[str, Tensor]:
        """This rank's slices of parameters that are apart from others, borrowed ones too."""
        return {part.entries[0].name: part.kept for part in self._parts if part.entries[0].name in names}

    def keeps(self, parameter: Tensor) -> bool:
        """Whether ranks keep slices of it."""
        return self.gathering.unit_of(parameter) is not None

    def keep(self, parameter: Tensor, whole: Tensor) -> bool:
        """Takes this rank's slice of a parameter's new value; False if the parameter is in no unit."""
        place = self.gathering.places.get(id(parameter))
        if place is not None:
            place[1].keep(place[2], whole)
        return place is not None

    def expected_bytes(self) -> ExpectedBytes:
        sums = 0
        if self.equals is not None:
            sums = sum(self._sums.num_bytes(part.kept.numel(), part.kept.dtype) for part in self._trained)
        flags = ExpectedBytes(per_step=Traffic.along("dp", all_reduce=self._used.numel() + sums))
        return flags + self.gathering.expected_bytes() + ExpectedBytes(so_far=self._inspected)

    def full(self, part: UnitFlat, share: Tensor) -> Tensor:
        """The full flat tensor of all ranks' shares."""
        flat = part.full()
        self._inspected += Traffic.along("dp", all_gather=share.nbytes)
        self._group.all_gather(flat, share).wait()
        return flat


def slices_of(exchange: Exchange) -> ZeroThree | None:
    """What keeps slices of the parameters in an exchange; None: it keeps all of them."""
    return next(iter(parts_of(exchange, ZeroThree)), None)


def _slice(part: UnitFlat, mine: UnitSlice) -> Slice:
    return Slice(mine.entry.name, mine.entry.parameter, mine.start, mine.stop, mine.of(part.kept))
