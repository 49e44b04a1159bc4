"""The reference's buffers after a step: a second implementation of the rule in docs/buffers.md.

Every chunk reads the buffers as they were at the start of the step. Writes are merged in chunk order: a
recurrence by rerunning the chunk with the merged value of the chunks before it, anything else by taking the
last value. torch's own normalization layers do not read in training what they write, so their buffers are
simply updated chunk after chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.instancenorm import _InstanceNorm  # pyright: ignore[reportPrivateUsage]

Buffers = dict[str, Tensor]
Rerun = Callable[[Any, Buffers], Buffers]  # runs a chunk on these buffers and returns the new ones
_LARGE = 2**21
_PART = 64  # a shift by this part of a value is small


Numbers = dict[tuple[str, str], float]  # (module, attribute)


def plain_numbers(model: nn.Module) -> Numbers:
    """Numbers in attributes of modules, which chunks of a step all find as they were before it."""
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) in (int, float)
    }


def changed_numbers(model: nn.Module, before: Numbers) -> Numbers:
    """Those that differ from `before`, of the same attributes."""
    now = plain_numbers(model)
    return {place: now[place] for place, was in before.items() if place in now and now[place] != was}


def put_numbers(model: nn.Module, numbers: Numbers) -> None:
    """Set these attributes."""
    for (path, name), value in numbers.items():
        vars(model.get_submodule(path))[name] = value


class BufferMerging:
    """The buffers of `model` from step to step. The kind of each buffer's write is determined at its first
    write."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._norms = [
            module
            for module in model.modules()
            if getattr(type(module), "forward", None) in (_BatchNorm.forward, _InstanceNorm.forward)
        ]
        self._know(self._norms)

    def look(self, run: Callable[[], object]) -> None:
        """Whether statistics change even if the layers leave them alone: something copies them, and they are merged like
        all other buffers from now on. run: a chunk. Of the model only these statistics are as before afterwards."""
        running = [
            each
            for module in self._norms
            for each in (vars(module)["_buffers"]["running_mean"], vars(module)["_buffers"]["running_var"])
            if each is not None
        ]
        before = [each.detach().clone() for each in running]
        momenta = [vars(module)["momentum"] for module in self._norms]
        try:
            for module in self._norms:
                vars(module)["momentum"] = 0.0
            # what is copied from one to another must differ
            for number, each in enumerate(running):
                each.detach().add_(1.0 + number / len(running))
            shifted = [each.detach().clone() for each in running]
            run()
            if not all(_same(each, value) for each, value in zip(running, shifted, strict=True)):
                self._know([])
        finally:
            for module, momentum in zip(self._norms, momenta, strict=True):
                vars(module)["momentum"] = momentum
            for each, value in zip(running, before, strict=True):
                each.detach().copy_(value)

    def _know(self, write_only: Sequence[nn.Module]) -> None:
        model = self._model
        excluded = {id(buffer) for module in write_only for buffer in module.buffers(recurse=False)}
        modules = dict(model.named_modules(remove_duplicate=False))
        names = [name for name, buffer in model.named_buffers() if id(buffer) not in excluded]
        # a forward may write parameters that are not trained
        parameters = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        names += parameters
        self._parameters = set(parameters)  # never the reason to tie others to them
        self._places = {name: (modules[name.rpartition(".")[0]], name.rpartition(".")[2]) for name in names}
        self._recurrent: dict[str, bool] = {}
        self._depends_on: dict[str, set[str]] = {}  # buffer -> the other buffers that its write depends on
        self._tied: list[set[str]] = []

    def snapshot(self, known: Mapping[str, Tensor] | None = None) -> Buffers:
        """Copies of the buffers. known: earlier copies, reused for buffers that did not change."""
        found = {name: _tensors_with(module, key)[key] for name, (module, key) in self._places.items()}
        known = known or {}
        return {
            name: known[name] if name in known and _same(known[name], value) else value.detach().clone()
            for name, value in found.items()
            if value is not None
        }

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Set the buffers to these values; a buffer of another shape is replaced by a new tensor."""
        for name, value in values.items():
            module, key = self._places[name]
            buffer = _tensors_with(module, key)[key]
            if buffer is not None and buffer.shape == value.shape and buffer.dtype == value.dtype:
                buffer.detach().copy_(value)
            else:
                vars(module)["_buffers"][key] = value.clone()

    def merge(self, start: Buffers, chunks: Sequence[tuple[Any, Buffers]], rerun: Rerun) -> Buffers:
        """The buffers after the step. chunks: what `rerun` runs, and the buffers it made of `start`, in
        order."""
        written = [
            {name for name, value in new.items() if name not in start or not _same(value, start[name])}
            for _, new in chunks
        ]
        for (chunk, new), names in zip(chunks, written, strict=True) if len(chunks) > 1 else ():
            # one of another shape is written in its final way from the next step on
            names = {name for name in names if name in start and start[name].shape == new[name].shape}
            if not names <= self._recurrent.keys():
                self._classify(chunk, start, sorted(names), rerun)
        merged = dict(start)
        resized = {
            name for _, new in chunks for name, value in new.items()
            if name not in start or value.shape != start[name].shape
        }  # fmt: skip
        for number, ((chunk, new), names) in enumerate(zip(chunks, written, strict=True)):
            tied = set[str]().union(*(group for group in self._tied if group & names))
            changed = {name for name, value in merged.items() if not _same(value, start[name])}
            recurrences = [
                name for name in merged
                if number and self._recurrent.get(name) and name in (changed | names) - tied - resized
            ]  # fmt: skip
            separate = [name for name in recurrences if self._depends_on[name]]
            together = [name for name in recurrences if name not in separate]
            for replayed in (together, *([name] for name in separate)):
                if replayed:
                    after = rerun(chunk, {**start, **{name: merged[name] for name in replayed}})
                    for name in replayed:
                        overwritten = ~torch.isfinite(start[name]) & ~_equal(new[name], start[name])
                        merged[name] = torch.where(overwritten, new[name], after[name])
            for name in (tied | names) - set(recurrences):
                value = new[name]
                if name not in tied | resized and not self._recurrent.get(name):
                    value = torch.where(_equal(value, start[name]), merged[name], value)
                merged[name] = value
        return merged

    def _classify(self, chunk: Any, start: Buffers, names: Sequence[str], rerun: Rerun) -> None:
        """Decide by perturbation which writes are recurrences: adding a shift to the buffer adds a
        multiple of it to the result, whatever the shift."""
        start = {
            name: torch.nan_to_num(value, 0.0, 0.0, 0.0) if value.is_floating_point() else value
            for name, value in start.items()
        }
        base = rerun(chunk, start)

        def run(shifts: Mapping[str, Tensor]) -> Buffers | None:
            shifted = {
                name: value + shifts[name] if value.dtype != torch.bool else ~value
                for name, value in start.items()
                if name in shifts
            }
            try:
                return rerun(chunk, {**start, **shifted})
            except Exception:  # the shifted value may be invalid
                return None

        def multiple(name: str, shift: Tensor, after: Buffers, before: Buffers) -> Tensor:
            wide = torch.complex128 if shift.is_complex() else torch.float64
            return (after[name].to(wide) - before[name].to(wide)) / shift.to(wide)

        def nearly_equal(name: str, found: Sequence[Tensor], tolerance: float) -> bool:
            eps = (
                torch.finfo(start[name].dtype).eps
                if start[name].is_floating_point() or start[name].is_complex()
                else 0.0
            )
            return all(
                bool(((each - found[0]).abs() <= tolerance * eps * (1 + found[0].abs())).all())
                for each in found
            )

        single = {
            name: [(shift, run({name: shift})) for shift in _shifts(start[name], base[name])]
            for name in names
        }
        rough: set[str] = set()
        for name, runs in single.items():
            if sum(after is not None for _, after in runs) < 2 and start[name].is_floating_point():
                rough.add(name)  # an observer's minimum may move, but not beyond its maximum
                runs += [(shift, run({name: shift})) for shift in _close_by(start[name], base[name])]
        depends_on: dict[str, set[str]] = {name: set() for name in names}
        for other, runs in single.items():
            known = [after for _, after in runs if after is not None]
            for name in names:
                near = not known and self._places[name][0] is self._places[other][0]
                if name != other and (near or any(not _same(after[name], base[name]) for after in known)):
                    depends_on[name].add(other)
        for name in names:
            found = [multiple(name, shift, after, base) for shift, after in single[name] if after is not None]
            known = self._recurrent.get(name, True)  # what was none once stays none
            self._recurrent[name] = (
                known and len(found) > 1 and nearly_equal(name, found, 64 * _PART if name in rough else 64)
            )
            self._depends_on[name] = depends_on[name]
            if not self._recurrent[name] or not depends_on[name]:
                continue
            for number in range(2):
                shifts = {
                    other: _shifts(start[other], base[other])[number] for other in (*depends_on[name], name)
                }
                before, after = run({other: shifts[other] for other in depends_on[name]}), run(shifts)
                if before is not None and after is not None:
                    found.append(multiple(name, shifts[name], after, before))
            if not nearly_equal(name, found, 1024) or len(found) == sum(
                after is not None for _, after in single[name]
            ):
                steering = {name, *depends_on[name]} - (self._parameters - {name})
                group = steering.union(*(each for each in self._tied if each & steering))
                self._tied = [*(each for each in self._tied if not each & group), group]


def _tensors_with(module: nn.Module, key: str) -> dict[str, Any]:
    own = vars(module)
    return own["_parameters"] if key in own["_parameters"] else own["_buffers"]


def _shifts(value: Tensor, result: Tensor) -> list[Tensor]:
    if value.dtype == torch.bool:
        return [torch.ones_like(value, dtype=torch.int64) - 2 * value.long()] * 2
    # pairwise distinct
    places = (
        torch.arange(value.numel(), device=value.device, dtype=torch.float64).view(value.shape) * 2**0.5
    ) % 1
    if not value.is_floating_point() and not value.is_complex():
        whole = (places * (30 if torch.iinfo(value.dtype).bits < 32 else 700)).long()
        small = [torch.ones_like(value), (-2 - whole if value.dtype.is_signed else 2 + whole).to(value.dtype)]
        return (
            [*small, small[0] * _LARGE, small[1] * _LARGE] if torch.iinfo(value.dtype).bits >= 32 else small
        )
    size = 1 + torch.nan_to_num(value.abs()) + torch.nan_to_num(result.abs())
    return [each.to(value.dtype) for each in (size, size * (2 + places), size * (-3 - places))]


def _close_by(value: Tensor, result: Tensor) -> list[Tensor]:
    size = (value.abs() + result.abs()).nan_to_num() / _PART
    size = torch.where(size > 0, size, 1 / _PART).to(value.dtype)
    return [size, -size]


def _equal(a: Tensor, b: Tensor) -> Tensor:
    return (a == b) | ((a != a) & (b != b))


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool(_equal(a, b).all())
