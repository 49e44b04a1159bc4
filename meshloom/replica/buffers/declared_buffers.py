"""Buffers that a training forward changes, over one step's chunks, merged by the rules that the job declares
(`core/buffer_rules.py`). So no chunk waits for another, and no schedule and no plan makes a difference."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from meshloom.core.buffer_rules import BufferRule, Ema
from meshloom.core.errors import JobError
from meshloom.program.ir.parameter_writes import LOOK_EVERY
from meshloom.program.ir.written_parameters import named_buffers


@dataclass(frozen=True)
class Decay:
    """The rule of running statistics that a program updates: b <- decay * b + (e_k - decay * b0), of all elements."""

    decay: float


Rule = BufferRule | Decay


@dataclass
class _Buffer:
    """A buffer, or a parameter that counts as one. start: before the step. rule: None: none is declared."""

    name: str
    module: nn.Module
    key: str
    original: Tensor  # the object; a forward may put another in its place
    rule: Rule | None
    is_sure: bool  # every chunk changes it, as a program says
    start: Tensor = field(init=False)
    version: int = field(init=False)  # of `original`, when it had the value `start`
    moved: bool = field(init=False)  # in some step
    changed: bool = False  # in this one
    # of this step's chunks: what the last one left; decay and what was added; what each has left
    last: Tensor | None = None
    decay: Tensor | None = None
    added: Tensor | None = None
    ends: list[Tensor] = field(default_factory=list[Tensor])

    def __post_init__(self) -> None:
        # a teacher is written through `.data`, which torch does not count
        self.moved = isinstance(self.original, nn.Parameter)
        self.begin(self.original)

    @property
    def num_reals(self) -> int:
        return self.start.numel() * (2 if self.start.is_complex() else 1)

    def begin(self, now: Tensor) -> None:
        """A step, which finds this."""
        self.original, self.start = now, now.detach().clone()
        self.version = now._version  # pyright: ignore[reportPrivateUsage]

    def now(self) -> Tensor:
        """Raises `JobError` if a forward has changed its shape or dtype."""
        found = getattr(self.module, self.key, None)
        if found is None or found.shape != self.start.shape or found.dtype != self.start.dtype:
            now = "None" if found is None else f"{list(found.shape)} of {found.dtype}"
            raise JobError(
                f"A forward made {now} of the buffer {self.name}, which was {list(self.start.shape)} of {self.start.dtype}. A buffer keeps its shape: make it "
                "as large as it gets, with a counter beside it."
            )
        return found

    def may_differ(self, now: Tensor, look: bool) -> bool:
        """False: surely nobody has written it. look: also for writes around torch's own count (`.data`)."""
        counted = now is not self.original or now._version != self.version  # pyright: ignore[reportPrivateUsage]
        return self.is_sure or counted or self.moved or look

    def take(self, now: Tensor) -> None:
        """What a chunk has left, and put back what the step found."""
        differs = differ(now, self.start)
        if self.is_sure or bool(differs.any()):
            self.changed = self.moved = True
            self._add(now.detach().clone(), differs)
        else:
            self.leave()
        if now is not self.original:
            setattr(self.module, self.key, self.original)
            differs = differ(self.original, self.start)
        if bool(differs.any()):
            with torch.no_grad():
                self.original.copy_(self.start)
        self.version = self.original._version  # pyright: ignore[reportPrivateUsage]

    def leave(self) -> None:
        """A chunk that has not written it."""
        self._add(self.start, None)

    def _add(self, end: Tensor, differs: Tensor | None) -> None:
        self.last = end
        if isinstance(self.rule, Ema | Decay) and differs is not None:
            start, rule = flat(self.start), self.rule
            if self.decay is None or self.added is None:
                self.decay, self.added = torch.ones_like(start), torch.zeros_like(start)
            moved = torch.ones_like(differs) if isinstance(rule, Decay) else differs
            step = flat(end) - rule.decay * start
            self.added = torch.where(moved, rule.decay * self.added + step, self.added)
            self.decay = torch.where(moved, rule.decay * self.decay, self.decay)
        elif self.rule == "sum" and differs is not None:
            change = flat(end) - flat(self.start)
            self.added = change if self.added is None else self.added + change
        elif callable(self.rule):
            self.ends.append(end)

    def length(self, num_chunks: int) -> int:
        """Elements of what `part` returns."""
        times = 2 if isinstance(self.rule, Ema | Decay) else num_chunks if callable(self.rule) else 1
        return times * self.num_reals

    def part(self, num_chunks: int) -> list[Tensor]:
        """What this replica tells the others, each int64 or the bits of float64."""
        start = flat(self.start)
        nothing = torch.zeros_like(start)
        if isinstance(self.rule, Ema | Decay):
            parts = [torch.ones_like(start), nothing] if self.decay is None else [self.decay, self.added]
        elif self.rule == "sum":
            parts = [self.added]
        elif callable(self.rule):
            parts = [flat(each) for each in self.ends]
            parts += [nothing] * (num_chunks - len(parts))
        else:
            parts = [None if self.last is None else flat(self.last)]
        return [(nothing if each is None else each).view(torch.int64) for each in parts]

    def merged(self, rows: Sequence[Tensor], chunks: Sequence[int]) -> Tensor:
        """rows: of every replica what `part` returned. chunks: how many each has run."""
        start = flat(self.start)
        parts = [row.view(start.dtype).view(-1, self.num_reals) for row in rows]
        if isinstance(self.rule, Ema | Decay):
            value = start
            for decay, added in parts:
                untouched = (decay == 1) & (added == 0)
                value = torch.where(untouched, value, decay * value + added)
        elif self.rule == "sum":
            value = start + torch.stack([each for (each,) in parts]).sum(0)
        elif callable(self.rule):
            ends = [
                self.like(each) for part, count in zip(parts, chunks, strict=True) for each in part[:count]
            ]
            return self._by_function(self.rule, ends)
        else:
            value = next(
                part[0] for part, count in zip(reversed(parts), reversed(chunks), strict=True) if count
            )
        return self.like(value)

    def _by_function(self, rule: Callable[[Tensor, Sequence[Tensor]], Tensor], ends: list[Tensor]) -> Tensor:
        with torch.no_grad():
            found = rule(self.start.clone(), ends)
        if not isinstance(found, Tensor) or found.shape != self.start.shape:  # pyright: ignore[reportUnnecessaryIsInstance]
            made = list(found.shape) if isinstance(found, Tensor) else type(found).__name__  # pyright: ignore[reportUnnecessaryIsInstance]
            raise JobError(
                f"The rule of Job(buffers=...) for {self.name} returned {made}. It must return a tensor of the buffer's shape, {list(self.start.shape)}."
            )
        return found.detach().to(self.start)

    def like(self, value: Tensor) -> Tensor:
        """Inverse of `flat`."""
        if self.start.is_complex():
            return torch.view_as_complex(value.reshape(*self.start.shape, 2)).to(self.start.dtype)
        return value.reshape(self.start.shape).to(self.start.dtype)


class DeclaredBuffers:
    """The buffers of `model` that are not in `handled` (identities), and parameters that count as buffers.

    rule_of: of a buffer's name. num_chunks: of a replica, at most. changing: names of the buffers that every chunk changes, if that is
    known, otherwise it is seen by their values; perhaps: names of further ones, of modules that run as written.
    """

    def __init__(
        self, model: nn.Module, handled: Collection[int], rule_of: Callable[[str], Rule | None], *, num_chunks: int, alone: bool,
        changing: Collection[str] | None, perhaps: Collection[str] = (),
    ) -> None:  # fmt: skip
        modules = dict(model.named_modules(remove_duplicate=False))
        self._num_chunks = num_chunks
        self._steps = self._run = 0  # steps so far; chunks of this one
        self._begun = False
        self._chunks: list[int] = []  # of every replica in this step
        self._moving: list[_Buffer] = []
        self._told: set[str] = set()
        self._buffers: list[_Buffer] = []
        for name, buffer in named_buffers(model):
            owner, _, key = name.rpartition(".")
            rule = rule_of(name)
            # of one chunk a step what it leaves is the value, but for functions
            if id(buffer) in handled or (alone and not callable(rule)):
                continue
            if changing is None or name in changing or name in perhaps:
                is_sure = changing is not None and name in changing
                self._buffers.append(_Buffer(name, modules[owner], key, buffer, rule, is_sure))

    @property
    def length(self) -> int:
        """Elements of what `facts` returns."""
        return 1 + len(self._buffers) if self._buffers else 0

    @property
    def declared(self) -> dict[str, Rule]:
        """Buffers that have a rule."""
        return {each.name: each.rule for each in self._buffers if each.rule is not None}

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Around a chunk, which sees the buffers as before the step."""
        self._begin()
        yield
        self._run += 1
        for buffer in self._buffers:
            now = buffer.now()
            if buffer.may_differ(now, self._looks):
                buffer.take(now)
            else:
                buffer.leave()

    def facts(self) -> list[int]:
        """How many chunks have run here in this step, and of every buffer whether one changed it."""
        self._begin()
        return [self._run, *(int(each.changed) for each in self._buffers)] if self._buffers else []

    def agree(self, facts: Sequence[Sequence[int]]) -> list[str]:
        """Take the union of all replicas' facts; new names of buffers that change and have no rule."""
        self._chunks = [row[0] for row in facts]
        self._moving = [buffer for at, buffer in enumerate(self._buffers, 1) if any(row[at] for row in facts)]
        for each in self._moving:
            if isinstance(each.rule, Ema) and not (each.start.is_floating_point() or each.start.is_complex()):
                raise JobError(
                    f'Job(buffers=...) gives {each.name} the rule ml.ema({each.rule.decay}), and it has {each.start.dtype}. Give it "sum" or "last", by a pattern '
                    "before that one."
                )
        new = [each.name for each in self._moving if each.rule is None and each.name not in self._told]
        self._told.update(new)
        return new

    @property
    def moving_length(self) -> int:
        """Elements of what `take` returns."""
        return sum(each.length(self._num_chunks) for each in self._moving)

    def take(self) -> Tensor:
        """This replica's part of the changed buffers."""
        return torch.cat([part for each in self._moving for part in each.part(self._num_chunks)])

    def apply(self, rows: Tensor) -> None:
        """Merge all replicas' parts [replicas, moving_length], and start the next step."""
        at = 0
        for buffer in self._moving:
            length = buffer.length(self._num_chunks)
            value = buffer.merged([row[at : at + length].contiguous() for row in rows], self._chunks)
            at += length
            with torch.no_grad():
                buffer.original.copy_(value)
            buffer.begin(buffer.original)
        for buffer in self._buffers:
            buffer.changed, buffer.last, buffer.decay, buffer.added, buffer.ends = False, None, None, None, []
        self._begun, self._run = False, 0
        self._steps += 1

    @property
    def _looks(self) -> bool:
        return self._steps % LOOK_EVERY == 0

    def _begin(self) -> None:
        """Once a step, take over what was loaded, or put in place, since the last one."""
        for buffer in () if self._begun else self._buffers:
            now = buffer.now()
            if buffer.may_differ(now, self._looks):
                buffer.begin(now)
        self._begun = True


def flat(value: Tensor) -> Tensor:
    """Elements as float64 or int64 [n], complex ones as two."""
    value = torch.view_as_real(value.detach().resolve_conj()) if value.is_complex() else value.detach()
    return value.reshape(-1).to(torch.float64 if value.is_floating_point() else torch.int64)


def differ(a: Tensor, b: Tensor) -> Tensor:
    """Where two values differ [n]; NaN equals NaN."""
    a, b = flat(a), flat(b)
    return (a != b) & ~((a != a) & (b != b))
