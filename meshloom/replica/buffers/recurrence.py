"""Whether what a chunk writes to a buffer is a recurrence, found by running it again on other values.

A counter, a moving average, a flag: a chunk turns the buffer b into a * b + c, element by element, with an
`a` that does not depend on the data. The shift that comes out is then a times the one that went in, for every
shift. What is not of that form, and buffers that say where or how another one is written (the pointer of a
queue), are merged in other ways (docs/buffers.md).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from meshloom.core.errors import PeerLostError

_GOLDEN = (5**0.5 - 1) / 2
_SMALL = 1 / 64  # of a value: the shift of one that must not move far
LARGE = 1_000_003  # beyond the length of a queue: a number that wraps around shows it

# Runs the chunk on these values of its buffers: theirs afterwards, and its loss. Raises as the chunk does.
Run = Callable[[Mapping[str, Tensor]], tuple[Mapping[str, Tensor], Any]]
# flags of this rank -> those of any rank that computes a part of the chunk
Unite = Callable[[Tensor], Tensor]


@dataclass
class Written:
    """Facts about the writes of a chunk.

    factors: buffer -> a [numel], for recurrences. tied: pairs of buffers. read: buffers whose values
        influence more than their own recurrence.
    """

    factors: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    tied: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    read: set[str] = field(default_factory=set[str])


def find_recurrences(
    values: Mapping[str, Tensor],
    modules: Mapping[str, object],
    run: Run,
    unite: Unite = lambda flags: flags,
    *,
    known_read: Collection[str] = (),
) -> Written:
    """Run a chunk a few times on shifted values of the buffers that it changes.

    values: of the buffers, before the chunk. modules: who owns each.
    unite: where ranks compute the chunk together, and have to go on in the same way. known_read: names of those that
    the loss depends on (a teacher's parameters), whose values may be what others are written with, but do not say where.

    First all buffers are shifted together: if the shift of each comes out as a multiple of its own, and the
    loss stays the same, or depends on what it is known to read, that is all. Else they are shifted one by one.
    """
    return _Search(values, modules, run, unite).find(known_read)


class _Search:
    def __init__(
        self, values: Mapping[str, Tensor], modules: Mapping[str, object], run: Run, unite: Unite
    ) -> None:
        self._names = list(values)
        self._values = {name: finite(value) for name, value in values.items()}
        self._modules, self._run, self._unite = modules, run, unite
        self._base, self._loss = run(self._values)
        self._shifts = {
            name: _shifts(self._values[name], self._base[name], number)
            for number, name in enumerate(self._names)
        }
        self._influences: dict[str, set[str]] = {}  # buffer -> the others whose result depends on its value
        self._moves: set[str] = set()  # those that the loss depends on
        self._alone: dict[str, Tensor] = {}  # factors of those that are recurrences, shifted alone

    def find(self, known_read: Collection[str]) -> Written:
        together, loss_moves = self._together()
        written = Written(factors=together)
        names, others = self._names, [name for name in self._names if name not in together]
        if not others and not loss_moves:
            return written
        if not others and known_read:
            rest = [name for name in names if name not in known_read]
            read = self._flags([not equal(self._shifted([name], 0)[1], self._loss) for name in rest])
            written.read = {*known_read, *compress(rest, read)}
            return written
        for name in names:
            self._shift_alone(name)
        recurs = self._flags([name in self._alone for name in others], invert=True)
        written.factors |= {name: self._alone[name] for name in compress(others, recurs)}
        steered = self._flags([name in written.factors and self._is_steered(name) for name in others])
        for name in compress(others, steered):
            steering = self._flags(
                [name in self._influences[other] and other not in known_read for other in names]
            )
            written.tied |= {(name, other) for other in compress(names, steering)}
        influential = [name in self._moves or bool(self._influences[name]) for name in names]
        pairs = zip(names, influential, strict=True)
        read = self._flags([each or name not in written.factors for name, each in pairs])
        written.read = set(compress(names, read))
        return written

    def _together(self) -> tuple[dict[str, Tensor], bool]:
        """Factors of those that pass when all are shifted, and whether the loss depends on any."""
        runs: list[Mapping[str, Tensor]] = []
        moves = False
        for number in range(max(map(len, self._shifts.values()))):
            results, loss = self._shifted(self._names, number)
            if results is not None:
                pairs = {name: (results[name], self._base[name]) for name in self._names}
                runs.append({name: self._factor(name, *pair, number) for name, pair in pairs.items()})
                moves = moves or not equal(loss, self._loss)
        passed = self._flags(
            [len(runs) >= 2 and self._agree(name, [each[name] for each in runs]) for name in self._names],
            invert=True,
        )
        moves = self._flags([moves])[0]
        return {name: runs[0][name] for name in compress(self._names, passed)}, moves

    def _shift_alone(self, name: str) -> None:
        shifts, value = self._shifts[name], self._values[name]
        self._influences[name] = set()
        factors, units = self._factors_alone(name, range(len(shifts))), 64
        if self._flags([len(factors) < 2])[0] and value.is_floating_point():
            # an observer refuses a minimum above its maximum: one that is close by will do
            first = len(shifts)
            shifts += _small_shifts(value, self._base[name])
            factors += self._factors_alone(name, range(first, len(shifts)))
            units = int(64 / _SMALL)
        if not factors:  # no other value will do: it may say where the others of its module are written
            others = [other for other in self._names if other != name]
            self._influences[name] |= {
                other for other in others if self._modules[other] is self._modules[name]
            }
        if len(factors) > 1 and self._agree(name, factors, units):
            self._alone[name] = factors[0]

    def _factors_alone(self, name: str, numbers: Sequence[int]) -> list[Tensor]:
        """The factors of these shifts of one buffer, but of those with which the chunk fails."""
        factors: list[Tensor] = []
        for number in numbers:
            results, loss = self._shifted([name], number)
            if results is None:
                continue
            factors.append(self._factor(name, results[name], self._base[name], number))
            self._influences[name] |= {
                other
                for other in self._names
                if other != name and not same(results[other], self._base[other])
            }
            if not equal(loss, self._loss):
                self._moves.add(name)
        return factors

    def _is_steered(self, name: str) -> bool:
        """Whether its factor changes when other buffers have other values."""
        others = [other for other in self._names if other != name]
        factors: list[Tensor] = []
        for number in range(2):
            before, _ = self._shifted(others, number)
            after, _ = self._shifted(self._names, number)
            if before is not None and after is not None:
                factors.append(self._factor(name, after[name], before[name], number))
        return not factors or not self._agree(name, [self._alone[name], *factors], units=1024)

    def _shifted(self, names: Sequence[str], number: int) -> tuple[Mapping[str, Tensor] | None, Any]:
        values = dict(self._values)
        for name in names:
            shifts = self._shifts[name]
            values[name] = unflat(flat(values[name]) + shifts[number % len(shifts)], values[name])
        try:
            return self._run(values)
        except PeerLostError:
            raise
        except Exception:  # a forward may refuse a value that it would never see
            return None, None

    def _factor(self, name: str, out: Tensor, before: Tensor, number: int) -> Tensor:
        value = self._values[name]
        shifts = self._shifts[name]
        # as rounding left it
        shift = flat(unflat(flat(value) + shifts[number % len(shifts)], value)) - flat(value)
        return factor_of(flat(out) - flat(before), shift, value.dtype)

    def _agree(self, name: str, factors: Sequence[Tensor], units: int = 64) -> bool:
        first, dtype = factors[0], self._values[name].dtype
        for other in factors[1:]:
            if not first.is_floating_point():
                close = (first == other) & (first.abs() < 2**31)
            else:
                close = (first - other).abs() <= units * torch.finfo(dtype).eps * (1 + first.abs())
            if not bool(close.all()):
                return False
        return True

    def _flags(self, mine: Sequence[bool], *, invert: bool = False) -> list[bool]:
        """Logical or over the ranks; invert: logical and."""
        if not mine:
            return []
        device = next(iter(self._values.values())).device
        flags = torch.tensor([each != invert for each in mine], dtype=torch.int64, device=device)
        return [bool(each) != invert for each in self._unite(flags).tolist()]


def finite(value: Tensor) -> Tensor:
    """The value with zeros for infinities and NaN."""
    return torch.nan_to_num(value, 0.0, 0.0, 0.0) if value.is_floating_point() else value


def flat(value: Tensor) -> Tensor:
    """Elements as float64 or int64 [numel], complex ones as two."""
    value = torch.view_as_real(value.detach().resolve_conj()) if value.is_complex() else value.detach()
    return value.reshape(-1).to(torch.float64 if value.is_floating_point() else torch.int64)


def unflat(flat: Tensor, like: Tensor) -> Tensor:
    """Inverse of `flat`, in the shape and dtype of `like`."""
    if like.is_complex():
        return torch.view_as_complex(flat.view(*like.shape, 2)).to(like.dtype)
    return flat.view(like.shape).to(like.dtype)


def differ(a: Tensor, b: Tensor) -> Tensor:
    """Where two values differ [numel]; NaN equals NaN."""
    a, b = flat(a), flat(b)
    return (a != b) & ~((a != a) & (b != b))


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two values are equal; NaN equals NaN."""
    return torch.equal(a, b) or not bool(differ(a, b).any())


def equal(a: Any, b: Any) -> bool:
    """The same for the return value of a loss."""
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return same(a, b) if isinstance(a, Tensor) else a == b


def first_shift(value: Tensor, result: Tensor) -> Tensor:
    """A shift [numel] of one value that is large beside it and its results: differences stay precise."""
    return _shifts(value, result, 0)[0]


def factor_of(out: Tensor, shift: Tensor, dtype: torch.dtype) -> Tensor:
    """a [numel] of a * shift = out; of whole numbers one that is beyond belief if it is none."""
    if not shift.is_floating_point():
        exact = torch.where(shift == 0, 0, out // torch.where(shift == 0, 1, shift))
        return torch.where(exact * shift == out, exact, torch.iinfo(torch.int64).max)
    factor = out / shift
    nearest = factor.round()  # kept and overwritten elements have 1 and 0, exactly
    return torch.where((factor - nearest).abs() < 16 * torch.finfo(dtype).eps, nearest, factor)


def _shifts(value: Tensor, result: Tensor, number: int) -> list[Tensor]:
    """Shifts [numel]. Their ratios differ between elements and between buffers (`number`), so that what mixes
    them does not pass for a multiple."""
    elements = flat(value)
    # Never the same at any distance: a queue that moves by a fixed number of places must not meet the same
    # pattern again.
    pattern = torch.arange(len(elements), device=elements.device, dtype=torch.float64) * _GOLDEN % 1.0
    if value.dtype == torch.bool:
        return [1 - 2 * elements] * 2
    if not value.is_floating_point() and not value.is_complex():
        limits = torch.iinfo(value.dtype)
        away = 2 + (pattern * (20 if limits.bits < 32 else 1000)).long() + 3 * (number % 8)
        sign = torch.where(elements > limits.max - 64, -1, 1)
        back = torch.where(elements < limits.min + 64, 1, -1)  # what wraps around near 0 shows it
        small = [sign, back * away]
        return [*small, sign * (LARGE + away), back * (LARGE - away)] if limits.bits >= 32 else small
    size = 1.0 + torch.nan_to_num(elements.abs()) + torch.nan_to_num(flat(result).abs())
    away = size * (2 + pattern + (number % 61) / 61)
    return [size, away, -1.5 * away]  # to both sides: an average that is held above some value shows it


def _small_shifts(value: Tensor, result: Tensor) -> list[Tensor]:
    """Shifts [numel] of a floating-point value that stay small beside it and its results, to both sides."""
    size = _SMALL * (torch.nan_to_num(flat(value).abs()) + torch.nan_to_num(flat(result).abs()))
    size = torch.where(size == 0, _SMALL, size)
    return [size, -size]
