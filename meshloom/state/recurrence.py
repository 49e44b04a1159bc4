"""Other buffers that a training forward changes, composed over the replicas as one device would have them.

A counter, a moving average, a flag: a chunk turns the buffer b into a * b + c, element by element, with an `a` that does not
depend on the data. `a` is found once, by running a chunk again on shifted values of the buffer: the shift that comes out is a times the one
that went in. Then a replica's chunks together are one such map, and the replicas' maps are applied in order.

A buffer is *order-dependent* if the loss changes with its value, or another buffer does, or its new value is not of that
form: the chunks of one step would have to run one after another. It is reported, and the last replica's value is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshloom.random import preserved_draws

CHANGED, RESHAPED, DEPENDENT = range(3)  # facts about a buffer, one number each


@dataclass
class _Buffer:
    """A buffer: its value when `last` seen; over this step: `start`, `decay` [numel], this replica's product of a over its chunks."""

    name: str
    module: nn.Module
    key: str
    original: Tensor  # the object; a forward may put another in its place
    last: Tensor
    start: Tensor
    decay: Tensor
    factor: Tensor  # a [numel], where `known`
    known: Tensor
    changed: bool = False
    reshaped: bool = False
    dependent: bool = False

    def now(self) -> Tensor | None:
        return self.module._buffers.get(self.key)  # pyright: ignore[reportPrivateUsage]

    def put(self, value: Tensor) -> None:
        self.module._buffers[self.key] = value  # pyright: ignore[reportPrivateUsage]


class Recurrences:
    """The buffers of `model` that are not in `handled` (identities), over one step's chunks.

    joined: all replicas' chunks with one number are one chunk, so that each replica's value is that of a part of it.
    changing: names of the buffers that every chunk changes, if that is known; otherwise it is seen by their values. Ranks that run chunks
        together, each with parts of the buffers, have to know: by its values one would run a chunk again and another would not.
    """

    def __init__(self, model: nn.Module, handled: set[int], *, joined: bool, changing: Collection[str] | None = None) -> None:
        modules = dict(model.named_modules(remove_duplicate=False))
        self._model = model
        self._joined = joined
        self._changing = changing
        self._begun = False  # a chunk of this step has run
        self._moving: list[_Buffer] = []
        # This step's chunks: how to run each again, where buffers changed in it, and all buffers' values after it.
        self._ran: list[tuple[Callable[[], Any], dict[str, Tensor], dict[str, Tensor]]] = []
        self._buffers: list[_Buffer] = []
        for name, buffer in model.named_buffers():
            if id(buffer) not in handled and (changing is None or name in changing):
                owner, _, key = name.rpartition(".")
                plain, ones = _flat(buffer), torch.ones_like(_flat(buffer))
                value = buffer.detach().clone()
                self._buffers.append(_Buffer(name, modules[owner], key, buffer, value, value, ones, ones, torch.zeros_like(plain, dtype=torch.bool)))

    @property
    def length(self) -> int:
        """Elements of what `facts` returns."""
        return 3 * len(self._buffers)

    @contextmanager
    def collecting(self, again: Callable[[], Any] | None) -> Iterator[None]:
        """Around a chunk. again: runs the chunk's forward anew with the same draws and returns its loss."""
        for buffer in self._buffers if not self._begun else []:
            now = buffer.now()
            if now is not None and _fits(now, buffer) and not _same(now, buffer.last):  # loaded since the last step
                buffer.last = buffer.start = now.detach().clone()
        self._begun = True
        yield
        changed: list[tuple[_Buffer, Tensor]] = []
        for buffer in self._buffers:
            now = buffer.now()
            if now is None or not _fits(now, buffer):
                buffer.reshaped = True
            elif self._changing is not None:
                changed.append((buffer, torch.ones_like(_flat(now), dtype=torch.bool)))
            elif not _same(now, buffer.last):
                changed.append((buffer, _differ(now, buffer.last)))
        if any(bool((where & ~buffer.known).any()) for buffer, where in changed if not buffer.dependent) and not self._joined:
            if again is None:
                for buffer, _ in changed:
                    buffer.dependent = True
            else:
                self._find_factors(changed, again)
        for buffer, where in changed:
            buffer.changed = True
            buffer.decay = torch.where(where, buffer.decay * buffer.factor, buffer.decay)
            now = buffer.now()
            assert now is not None
            buffer.last = now.detach().clone()
        if again is not None and self._buffers and not self._joined and self._changing is None:
            self._ran.append((again, {buffer.name: where for buffer, where in changed}, {buffer.name: buffer.last for buffer in self._buffers}))

    def facts(self) -> list[int]:
        """Of every buffer: changed in this step, of another shape now, order-dependent."""
        return [int(fact) for each in self._buffers for fact in (each.changed, each.reshaped, each.dependent or (each.changed and self._joined))]

    def agree(self, facts: Sequence[Sequence[int]]) -> None:
        """Take the union of all replicas' facts."""
        for number, buffer in enumerate(self._buffers):
            mine = [any(rank[3 * number + fact] for rank in facts) for fact in range(3)]
            buffer.reshaped, buffer.dependent = mine[RESHAPED], mine[DEPENDENT]
        self._moving = [
            buffer
            for number, buffer in enumerate(self._buffers)
            if any(rank[3 * number + CHANGED] for rank in facts) and not any(rank[3 * number + RESHAPED] for rank in facts)
        ]

    @property
    def moving_length(self) -> int:
        """Elements of what `take` returns."""
        return 2 * sum(len(buffer.decay) for buffer in self._moving)

    def take(self) -> Tensor:
        """This replica's maps of the buffers that changed anywhere: a, then c, of each. int64, or the bits of float64."""
        parts: list[Tensor] = []
        for buffer in self._moving:
            if not buffer.dependent:
                self._find_untouched(buffer)
            now = buffer.now()
            assert now is not None
            start, end, decay = _flat(buffer.start), _flat(now), buffer.decay
            if buffer.dependent and buffer.changed:
                decay = torch.zeros_like(decay)
            added = torch.where(decay == 0, end, end - decay * start)
            parts += [decay.view(torch.int64), added.view(torch.int64)]
        return torch.cat(parts)

    def apply(self, parts: Tensor) -> list[str]:
        """Apply all replicas' maps [replicas, moving_length] in order, and start the next step; names of order-dependent buffers."""
        found: list[str] = []
        at = 0
        for buffer in self._moving:
            n = len(buffer.decay)
            value = _flat(buffer.start)
            maps = [(row[at : at + n].view(value.dtype), row[at + n : at + 2 * n].view(value.dtype)) for row in parts]
            for decay, added in maps:
                value = torch.where(decay == 0, added, decay * value + added)
            at += 2 * n
            now = buffer.now()
            assert now is not None
            if now is buffer.original:
                with torch.no_grad():
                    now.copy_(_unflat(value, now))
            else:
                buffer.put(_unflat(value, now))
            if buffer.dependent and not (self._joined and all(_same(added, maps[0][1]) for _, added in maps)):
                found.append(buffer.name)
        self._next_step()
        return found

    def _next_step(self) -> None:
        self._begun = False
        self._ran = []
        for buffer in self._buffers:
            now = buffer.now()
            if now is not None and _fits(now, buffer) and (buffer.changed or not _same(now, buffer.last)):
                buffer.last = now.detach().clone()
            buffer.start, buffer.decay = buffer.last, torch.ones_like(buffer.decay)
            buffer.changed = buffer.reshaped = False
            buffer.dependent = buffer.dependent and not self._joined

    def _find_untouched(self, buffer: _Buffer) -> None:
        """Elements that changed on some replica and not in a chunk here: were they left alone, or did the chunk make of them what they were?

        An element that overwrites, or decays towards, the value it has stays the same; only a run on a shifted value can tell.
        """
        for again, where, values in self._ran:
            value = values[buffer.name]
            unclear = torch.isfinite(_flat(value)) & ~(buffer.known & (buffer.factor == 1)) & (buffer.decay != 0)
            unclear = unclear & ~where[buffer.name] if buffer.name in where else unclear
            if not bool(unclear.any()):
                continue
            point = _finite(value)
            shifted = _unflat(_flat(point) + _shifts(point, point)[0], point)
            with _restored(self._model):
                try:
                    (result,), _ = self._run([buffer], [shifted], again)
                except Exception:  # a forward may refuse a value that it would never see
                    buffer.dependent = True
                    return
            factor = _factor(_flat(result) - _flat(point), _flat(shifted) - _flat(point), value.dtype)
            if not _close([factor, factor], unclear, value.dtype):
                buffer.dependent = True
                return
            buffer.decay = torch.where(unclear, buffer.decay * factor, buffer.decay)

    def _run(self, buffers: Sequence[_Buffer], values: Sequence[Tensor], again: Callable[[], Any]) -> tuple[list[Tensor], Any]:
        """What a chunk makes of the buffers' `values`, and its loss. To be called within `_restored`."""
        for buffer, value in zip(buffers, values, strict=True):
            buffer.put(value.clone())
        with torch.no_grad(), preserved_draws():
            loss = again()
        results = [buffer.now() for buffer in buffers]
        if any(result is None or not _fits(result, buffer) for result, buffer in zip(results, buffers, strict=True)):
            raise ValueError("a buffer took another shape")
        return [result.detach().clone() for result in results if result is not None], loss

    def _find_factors(self, changed: Sequence[tuple[_Buffer, Tensor]], again: Callable[[], Any]) -> None:
        """Find `a` of the elements that changed in the chunk that just ran, or that the buffer is order-dependent."""
        buffers = [buffer for buffer, _ in changed]

        points = [_finite(buffer.last) for buffer in buffers]
        with _restored(self._model):
            base, loss = self._run(buffers, points, again)
            for index, (buffer, where) in enumerate(changed):
                if buffer.dependent and self._changing is None:
                    continue
                shifts = _shifts(points[index], base[index])
                factors: list[Tensor] = []
                for shift in shifts:
                    value = _unflat(_flat(points[index]) + shift, buffer.last)
                    try:
                        results, shifted_loss = self._run(buffers, [*points[:index], value, *points[index + 1 :]], again)
                    except Exception:  # a forward may refuse a value that it would never see
                        buffer.dependent = True
                        break
                    buffer.dependent |= not _equal(loss, shifted_loss)
                    for other, result, expected in zip(buffers, results, base, strict=True):
                        if other is not buffer:
                            other.dependent |= not _same(result, expected)
                    factors.append(_factor(_flat(results[index]) - _flat(base[index]), _flat(value) - _flat(points[index]), buffer.last.dtype))
                if not buffer.dependent:
                    buffer.dependent = not _close(factors, where.view(-1), buffer.last.dtype)
                    fresh = where.view(-1) & ~buffer.known
                    buffer.factor = torch.where(fresh, factors[-1], buffer.factor)
                    buffer.known = buffer.known | fresh


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Put every buffer back, the object and its values."""
    kept = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()  # pyright: ignore[reportPrivateUsage]
        if buffer is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in kept:
                if not buffer.is_meta and not _same(buffer, value):  # a backward to come may want what did not change
                    buffer.copy_(value)
                module._buffers[name] = buffer  # pyright: ignore[reportPrivateUsage]


def _finite(value: Tensor) -> Tensor:
    return torch.nan_to_num(value, 0.0, 0.0, 0.0) if value.is_floating_point() else value


def _fits(now: Tensor, buffer: _Buffer) -> bool:
    return now.shape == buffer.last.shape and now.dtype == buffer.last.dtype


def _flat(value: Tensor) -> Tensor:
    """Elements as float64 or int64 [numel], complex ones as two."""
    value = torch.view_as_real(value.detach().resolve_conj()) if value.is_complex() else value.detach()
    return value.reshape(-1).to(torch.float64 if value.is_floating_point() else torch.int64)


def _unflat(flat: Tensor, like: Tensor) -> Tensor:
    if like.is_complex():
        return torch.view_as_complex(flat.view(*like.shape, 2)).to(like.dtype)
    return flat.view(like.shape).to(like.dtype)


def _differ(a: Tensor, b: Tensor) -> Tensor:
    """Where two values differ [numel]; NaN equals NaN."""
    a, b = _flat(a), _flat(b)
    return (a != b) & ~((a != a) & (b != b))


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or not bool(_differ(a, b).any())


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    return _same(a, b) if isinstance(a, Tensor) else a == b


def _shifts(value: Tensor, result: Tensor) -> list[Tensor]:
    """Two shifts [numel] that differ between elements, so that what mixes elements does not pass for linear."""
    flat = _flat(value)
    index = torch.arange(len(flat), device=flat.device)
    if value.dtype == torch.bool:
        return [1 - 2 * flat] * 2
    if not value.is_floating_point() and not value.is_complex():
        limits = torch.iinfo(value.dtype)
        sign = torch.where(flat > limits.max - 8, -1, 1)
        return [sign, sign * (2 + index % 3)]
    size = 1.0 + torch.nan_to_num(flat.abs()) + torch.nan_to_num(_flat(result).abs())  # large beside both, so that little is lost in the difference
    return [size, size * (2 + index % 3)]


def _factor(out: Tensor, shift: Tensor, dtype: torch.dtype) -> Tensor:
    if not shift.is_floating_point():
        exact = torch.where(shift == 0, 0, out // torch.where(shift == 0, 1, shift))
        return torch.where(exact * shift == out, exact, torch.iinfo(torch.int64).max)  # no whole number: not of the form
    factor = out / shift
    nearest = factor.round()  # kept and overwritten elements have 1 and 0, exactly
    return torch.where((factor - nearest).abs() < 16 * torch.finfo(dtype).eps, nearest, factor)


def _close(factors: Sequence[Tensor], where: Tensor, dtype: torch.dtype) -> bool:
    first, second = factors
    if not first.is_floating_point():
        return bool((((first == second) & (first.abs() < 2**31)) | ~where).all())
    return bool((((first - second).abs() <= 64 * torch.finfo(dtype).eps * (1 + first.abs())) | ~where).all())
