"""Masters: copies, in the job's own precision, of exactly what a rank updates of parameters in bfloat16.

    raised     gradient of an owned slice, bfloat16 -> the master's precision
    (the updater clips and updates the masters)
    publish    slice = its master, rounded; then the exchange shows it to the other ranks

All replicas' masters, or their slices, follow from who owns what in the plan's exchange.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from meshloom.comm.group import Group
from meshloom.comm.objects import collect
from meshloom.core.job import NamedParameters
from meshloom.exchange.exchange import Emit, Ownership, Slice
from meshloom.optimizer.state_pieces import OwnedSlice
from meshloom.parameters.shards import Shards
from meshloom.telemetry.traffic import ExpectedBytes, Traffic


class Masters:
    """What this rank updates in place of the slices that it owns, by `ownership`.

    named: the trainable parameters that this rank holds. whole: by the same names, those that the job's optimizer function
    gets, of full shape in the job's precision. shards: how parameters are sharded over tp. local: what this rank holds of
    `whole`, with memory where it owns all of it. parts: of each parameter that has a master on some rank, the number of
    `parts_of` it. group: all replicas; control: these for messages that are not counted. copied: bytes, before the first step.
    """

    def __init__(
        self,
        ownership: Ownership,
        named: NamedParameters,
        whole: NamedParameters,
        shards: Shards,
        device: torch.device,
        *,
        group: Group,
        control: Group,
        copied: Traffic,
    ) -> None:
        self._group, self._control, self._copied, self._inspected = group, control, copied, Traffic()
        owners, self.slices = ownership.owners, list(ownership.owned)  # of the parameters themselves
        self.named = named
        full = dict(whole)
        self.parts: dict[str, int] = {}
        local = {name: _shell(name, each, full[name], shards, device) for name, each in named}
        self.local: NamedParameters = list(local.items())
        self.owned = [_copy(each, local[each.name]) for each in self.slices]
        self.ownership = replace(ownership, owned=self.owned, memory="sliced" if owners else "whole")
        for master, slice_ in zip(self.owned, self.slices, strict=True) if owners is None else ():
            unchanged = master.parameter.dtype == slice_.parameter.dtype
            master.parameter.data = (
                slice_.parameter.data if unchanged else master.data().view(master.parameter.shape)
            )
        self.held = [
            OwnedSlice(
                each.name, nn.Parameter(each.data(), requires_grad=False), each.start, each.stop,
                tuple(full[each.name].shape), shards=shards if each.name in shards.pieces else None,
            )
            for each, _ in self.copies()
        ]  # fmt: skip

    def copies(self) -> Iterator[tuple[Slice, Slice]]:
        """Each master with the slice that is its rounding."""
        for master, slice_ in zip(self.owned, self.slices, strict=True):
            if master.data().dtype != slice_.parameter.dtype:
                yield master, slice_

    def raised(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of the slices, in the masters' precision."""
        return [
            each if each is None else each.to(master.data().dtype)
            for each, master in zip(gradients, self.owned, strict=True)
        ]

    def publish(self) -> None:
        """Parameters become their masters, rounded."""
        for master, slice_ in self.copies():
            if slice_.kept is None and slice_.is_full:  # whatever its memory's layout
                slice_.parameter.data.copy_(master.data().view(slice_.parameter.shape))
            else:
                slice_.data().copy_(master.data())

    def take_parameters(self, names: Collection[str]) -> None:
        """The masters of these become what the parameters are."""
        for master, slice_ in self.copies():
            if master.name in names:
                master.data().copy_(slice_.read())

    def wrong(self) -> str | None:
        """The first parameter here that is not its master rounded."""
        for master, slice_ in self.copies():
            if not torch.equal(master.data().to(slice_.parameter.dtype), slice_.read()):
                return master.name
        return None

    def each(self, emit: Emit) -> None:
        """Passes what this rank's replica has of every master to `emit`, as several tensors in the parameter's dtype whose sum it
        is: what gathers parameters gathers these."""
        here = [*self.copies()]
        full = {each.name: each.data() for each, _ in here}
        if self.ownership.owners is not None:
            full = self._gathered([each for each, _ in here])
        parameters = dict(self.local)
        dtypes = {name: parameter.dtype for name, parameter in self.named}
        for name, flat in full.items():
            for part in parts_of(flat.view(parameters[name].shape), dtypes[name]):
                emit(name, part)

    def _gathered(self, mine: Sequence[Slice]) -> dict[str, Tensor]:
        """What all replicas own of masters, as full flat tensors; one tensor of all is sent."""
        spans = [[each.name, each.start, each.stop] for each in mine]
        everyone: list[list[tuple[str, int, int]]] = collect(self._control, spans)
        local = dict(self.local)
        full: dict[str, Tensor] = {}
        for name, parameter in self.named:
            if any(name == each[0] for rank in everyone for each in rank):
                full[name] = torch.empty(parameter.numel(), dtype=local[name].dtype, device=parameter.device)
        for dtype in dict.fromkeys(each.dtype for each in full.values()):
            of_dtype = [[each for each in rank if full[each[0]].dtype == dtype] for rank in everyone]
            longest = max(sum(stop - start for _, start, stop in rank) for rank in of_dtype)
            device = next(iter(full.values())).device
            flat = torch.zeros(longest, dtype=dtype, device=device)
            sent = [each.data() for each in mine if each.data().dtype == dtype]
            if sent:
                torch.cat(sent, out=flat[: sum(each.numel() for each in sent)])
            whole = torch.empty(longest * self._group.size, dtype=dtype, device=device)
            self._inspected += Traffic.along("dp", all_gather=flat.nbytes)
            self._group.all_gather(whole, flat).wait()
            for rank, spans_of_rank in enumerate(of_dtype):
                at = rank * longest
                for name, start, stop in spans_of_rank:
                    full[name][start:stop] = whole[at : at + stop - start]
                    at += stop - start
        return full

    def expected_bytes(self) -> ExpectedBytes:
        """Of their first values, and of what was inspected."""
        return ExpectedBytes(once=self._copied, so_far=self._inspected)


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of the copy from which a parameter is rounded that the job has in `dtype`.

    >>> master_dtype(torch.float32), master_dtype(torch.float16), master_dtype(torch.float64)
    (torch.float32, torch.float32, torch.float64)
    """
    return torch.promote_types(dtype, torch.float32)


def parts_of(value: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Tensors in a lower precision whose sum is `value`, the largest first: each has the digits that those before leave.

    >>> [each.item() for each in parts_of(torch.tensor(1.0001), torch.bfloat16)]
    [1.0, 0.00010013580322265625, -1.1920928955078125e-07]
    """
    parts: list[Tensor] = []
    rest = value
    for _ in range(num_parts(value.dtype)):
        part = rest.to(dtype)
        parts.append(part)
        rest = torch.where(part.isfinite(), rest - part.to(value.dtype), 0.0)
    return parts


def num_parts(dtype: torch.dtype) -> int:
    """Of a value in this precision: bfloat16 has 8 binary digits."""
    return {torch.float32: 3, torch.float64: 7}[dtype]


def sum_of_parts(parts: Sequence[Tensor]) -> Tensor:
    """The inverse of `parts_of`.

    >>> sum_of_parts(parts_of(torch.tensor([0.1, -3e7]), torch.bfloat16)).tolist() == torch.tensor([0.1, -3e7]).tolist()
    True
    """
    total = parts[0].to(torch.float32 if len(parts) == 3 else torch.float64)
    for part in parts[1:]:
        total = total + part.to(total.dtype)
    return total


def _shell(
    name: str, parameter: nn.Parameter, whole: nn.Parameter, shards: Shards, device: torch.device
) -> nn.Parameter:
    """What stands for this rank's part of a parameter in the job's precision, without memory: the parameter of full shape itself
    where that is the part."""
    dtype = parameter.dtype
    if dtype == torch.bfloat16:
        dtype = master_dtype(whole.dtype)
    memory = torch.empty(parameter.shape, dtype=dtype, device=device)
    memory.untyped_storage().resize_(0)
    if name in shards.pieces:
        return nn.Parameter(memory, requires_grad=parameter.requires_grad)
    whole.data = memory
    return whole


def _copy(slice_: Slice, master: nn.Parameter) -> Slice:
    if master.dtype == slice_.parameter.dtype:
        kept = slice_.read()
    else:
        kept = torch.empty(slice_.stop - slice_.start, dtype=master.dtype, device=slice_.parameter.device)
    return Slice(slice_.name, master, slice_.start, slice_.stop, kept)
