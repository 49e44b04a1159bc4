"""What one device's buffers are after a step: the rule of docs/buffers.md, written a second time.

Every chunk reads the buffers as the step found them. What was written is merged in the order of the chunks: a
recurrence by running the chunk once more with that buffer as the chunks before leave it, anything else by
taking the last value. torch's own normalisation layers do not read in training what they write, so they just
go on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.instancenorm import _InstanceNorm  # pyright: ignore[reportPrivateUsage]

Buffers = dict[str, Tensor]
Again = Callable[[Any, Buffers], Buffers]  # runs a chunk on these buffers: what they are then
_FAR = 2**21


class Merging:
    """The buffers of `model` from step to step. What kind of write each has is found when it is first
    written."""

    def __init__(self, model: nn.Module) -> None:
        going_on = [
            module
            for module in model.modules()
            if type(module).forward in (_BatchNorm.forward, _InstanceNorm.forward)
        ]
        own = {id(buffer) for module in going_on for buffer in module.buffers(recurse=False)}
        modules = dict(model.named_modules(remove_duplicate=False))
        names = [name for name, buffer in model.named_buffers() if id(buffer) not in own]
        self._places = {name: (modules[name.rpartition(".")[0]], name.rpartition(".")[2]) for name in names}
        self._recurs: dict[str, bool] = {}
        self._read: dict[str, set[str]] = {}  # buffer -> the others that what is written to it depends on
        self._tied: list[set[str]] = []

    def now(self, known: Mapping[str, Tensor] | None = None) -> Buffers:
        """Copies of the buffers' values. known: earlier copies, which stand for what has not changed."""
        found = {name: vars(module)["_buffers"][key] for name, (module, key) in self._places.items()}
        known = known or {}
        return {
            name: known[name] if name in known and _same(known[name], value) else value.detach().clone()
            for name, value in found.items()
            if value is not None
        }

    def put(self, values: Mapping[str, Tensor]) -> None:
        """Give the buffers these values; one of another shape by a new tensor."""
        for name, value in values.items():
            module, key = self._places[name]
            there = vars(module)["_buffers"][key]
            if there is not None and there.shape == value.shape and there.dtype == value.dtype:
                there.detach().copy_(value)
            else:
                vars(module)["_buffers"][key] = value.clone()

    def merge(self, start: Buffers, chunks: Sequence[tuple[Any, Buffers]], again: Again) -> Buffers:
        """The values after the step. chunks: what `again` runs, and what it made of `start`, in order."""
        wrote = [
            {name for name, value in ends.items() if name not in start or not _same(value, start[name])}
            for _, ends in chunks
        ]
        for (chunk, _), names in zip(chunks, wrote, strict=True) if len(chunks) > 1 else ():
            if not names <= self._recurs.keys():
                self._find(chunk, start, sorted(names), again)
        merged = dict(start)
        for number, ((chunk, ends), names) in enumerate(zip(chunks, wrote, strict=True)):
            tied = set[str]().union(*(group for group in self._tied if group & names))
            moved = {name for name, value in merged.items() if not _same(value, start[name])}
            recurrences = (
                [
                    name
                    for name in merged
                    if self._recurs.get(name) and name not in tied and (name in moved | names)
                ]
                if number
                else []
            )
            alone = [name for name in recurrences if self._read[name]]
            for replayed in (
                [name for name in recurrences if name not in alone],
                *([name] for name in alone),
            ):
                if replayed:
                    after = again(chunk, {**start, **{name: merged[name] for name in replayed}})
                    merged |= {name: after[name] for name in replayed}
            for name in (tied | names) - set(recurrences):
                fits = name in merged and merged[name].shape == ends[name].shape
                keep = fits and name not in tied and not self._recurs.get(name)
                merged[name] = (
                    torch.where(_equal(ends[name], start[name]), merged[name], ends[name])
                    if keep
                    else ends[name]
                )
        return merged

    def _find(self, chunk: Any, start: Buffers, names: Sequence[str], again: Again) -> None:
        """Look what becomes of a shift: the same multiple of it, whatever it is, if the write is a
        recurrence."""
        start = {
            name: torch.nan_to_num(value, 0.0, 0.0, 0.0) if value.is_floating_point() else value
            for name, value in start.items()
        }
        base = again(chunk, start)

        def run(shifts: Mapping[str, Tensor]) -> Buffers | None:
            shifted = {
                name: value + shifts[name] if value.dtype != torch.bool else ~value
                for name, value in start.items()
                if name in shifts
            }
            try:
                return again(chunk, {**start, **shifted})
            except Exception:  # another value would never be there
                return None

        def multiple(name: str, shift: Tensor, after: Buffers, before: Buffers) -> Tensor:
            wide = torch.complex128 if shift.is_complex() else torch.float64
            return (after[name].to(wide) - before[name].to(wide)) / shift.to(wide)

        def alike(name: str, found: Sequence[Tensor], tolerance: float) -> bool:
            exact = (
                torch.finfo(start[name].dtype).eps
                if start[name].is_floating_point() or start[name].is_complex()
                else 0.0
            )
            return all(
                bool(((each - found[0]).abs() <= tolerance * exact * (1 + found[0].abs())).all())
                for each in found
            )

        single = {
            name: [(shift, run({name: shift})) for shift in _shifts(start[name], base[name])]
            for name in names
        }
        reads: dict[str, set[str]] = {name: set() for name in names}
        for other, runs in single.items():
            known = [after for _, after in runs if after is not None]
            for name in names:
                near = not known and self._places[name][0] is self._places[other][0]
                if name != other and (near or any(not _same(after[name], base[name]) for after in known)):
                    reads[name].add(other)
        for name in names:
            found = [multiple(name, shift, after, base) for shift, after in single[name] if after is not None]
            self._recurs[name] = len(found) > 1 and alike(name, found, 64)
            self._read[name] = reads[name]
            if not self._recurs[name] or not reads[name]:
                continue
            for number in range(2):
                shifts = {other: _shifts(start[other], base[other])[number] for other in (*reads[name], name)}
                before, after = run({other: shifts[other] for other in reads[name]}), run(shifts)
                if before is not None and after is not None:
                    found.append(multiple(name, shifts[name], after, before))
            if not alike(name, found, 1024) or len(found) == sum(
                after is not None for _, after in single[name]
            ):
                group = {name, *reads[name]}.union(
                    *(each for each in self._tied if each & {name, *reads[name]})
                )
                self._tied = [*(each for each in self._tied if not each & group), group]


def _shifts(value: Tensor, result: Tensor) -> list[Tensor]:
    if value.dtype == torch.bool:
        return [torch.ones_like(value, dtype=torch.int64) - 2 * value.long()] * 2
    # no two alike
    places = (
        torch.arange(value.numel(), device=value.device, dtype=torch.float64).view(value.shape) * 2**0.5
    ) % 1
    if not value.is_floating_point() and not value.is_complex():
        whole = (places * (30 if torch.iinfo(value.dtype).bits < 32 else 700)).long()
        small = [torch.ones_like(value), (-2 - whole if value.dtype.is_signed else 2 + whole).to(value.dtype)]
        return [*small, small[0] * _FAR, small[1] * _FAR] if torch.iinfo(value.dtype).bits >= 32 else small
    size = 1 + torch.nan_to_num(value.abs()) + torch.nan_to_num(result.abs())
    return [each.to(value.dtype) for each in (size, size * (2 + places), size * (-3 - places))]


def _equal(a: Tensor, b: Tensor) -> Tensor:
    return (a == b) | ((a != a) & (b != b))


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool(_equal(a, b).all())
