"""Tensor and pipeline parallel within a module that cannot be captured, since it logs, steps or branches: modules within it are divided, and the rest
runs as written, whole on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from meshloom.core.buffer_rules import BufferRule, rule_of
from meshloom.core.errors import JobError, TrainingError
from meshloom.loops.call_draws import CallDraws
from meshloom.loops.divided_module import DividedModule
from meshloom.loops.gradient_mean import AveragedExecution
from meshloom.loops.ranks import LoopRanks
from meshloom.loops.taken_shares import bind


class DividedWithin(AveragedExecution):
    """`module` on the ranks along tp and pp. divide: names of modules within it that are divided; "outermost": each that is called outermost, from its
    first call in grad mode on. make: what divides one, given it and its `rules` of buffers. Gradients of the rest are averaged over replicas."""

    def __init__(
        self, module: nn.Module, ranks: LoopRanks, divide: Sequence[str], make: Callable[..., DividedModule], rules: Mapping[str, BufferRule]
    ) -> None:  # fmt: skip
        super().__init__(ranks)
        self._module, self._ranks = module, ranks
        self._make = make
        self._rules, self._draws = rules, CallDraws(ranks.replica)
        self._parts: dict[str, tuple[nn.Module, DividedModule]] = {}  # by name
        self._inside = False  # a divided module's call
        self._takes_all = divide == "outermost"
        named = dict(module.named_modules())
        if missing := [] if self._takes_all else [name for name in divide if name not in named]:
            raise JobError(
                f"{type(module).__name__} has no module named {missing[0]!r} that could be divided. It has {', '.join(filter(None, named))}."
            )
        for name in named if self._takes_all else divide:
            if next(named[name].parameters(), None) is not None:
                named[name]._compiled_call_impl = _Arrival(self, name, named[name])  # pyright: ignore[reportPrivateUsage]
                if not self._takes_all:
                    self._divide(name, named[name])

    def call(
        self, compute: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], method: str = "forward"
    ) -> Any:  # fmt: skip
        share = bind((args, kwargs))
        self.refresh()
        before = {name: each._version for name, each in self._own_buffers()}
        with self._draws.of_a_call(), self.mean.within(share):
            results = compute(*args, **kwargs)
        changed = next(
            (name for name, each in self._own_buffers() if before.get(name) != each._version), None
        )
        if changed and self._ranks.plan.dp > 1:
            raise TrainingError(
                f"A call of {type(self._module).__name__} changes the buffer {changed}, which is in no module that is divided, and each of {self._ranks.plan.dp} "
                "replicas would have its own. Name a module that has it to be divided, or use a plan without dp."
            )
        self.refresh()
        if torch.is_grad_enabled():
            self.mean.follow(results, share)
        return results

    def arrived(self, name: str, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The results of a module within, which is called."""
        written = module._call_impl  # pyright: ignore[reportPrivateUsage]
        if self._inside:
            return written(*args, **kwargs)
        if name not in self._parts and self._takes_all and torch.is_grad_enabled():
            self._divide(name, module)
            self.refresh()
        if name not in self._parts:
            return written(*args, **kwargs)
        self._inside = True
        try:
            return self._parts[name][1].call(written, args, kwargs)
        finally:
            self._inside = False

    def accumulating(self) -> AbstractContextManager[None]:
        return _all([super().accumulating(), *(each.accumulating() for each in self._divided)])

    def whole(self) -> AbstractContextManager[None]:
        return _all([each.whole() for each in self._divided])

    @property
    def is_whole(self) -> bool:
        return any(each.is_whole for each in self._divided)

    def tensors(self) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        gathers = {
            f"{prefix}{name}": gather for prefix, each in self._prefixed() for name, gather in each.tensors()
        }
        for name, each in self._module.state_dict(keep_vars=True).items():
            if isinstance(each, Tensor):
                yield name, gathers.get(name, lambda each=each: each.detach())

    def alike(self) -> Iterable[tuple[str, Tensor]]:
        parts = self._prefixed()
        return chain(
            self._rest(), ((f"{prefix}{name}", one) for prefix, each in parts for name, one in each.alike())
        )

    def check_complete(self) -> None:
        super().check_complete()
        for each in self._divided:
            each.check_complete()

    def take_notes(self) -> list[str]:
        return [note for each in self._divided for note in each.take_notes()]

    @property
    def backwards(self) -> int:
        return super().backwards + sum(each.backwards for each in self._divided)

    @property
    def _divided(self) -> list[DividedModule]:
        return [each for _, each in self._parts.values()]

    def _prefixed(self) -> Iterator[tuple[str, DividedModule]]:
        for name, (_, each) in self._parts.items():
            yield f"{name}." if name else "", each

    def _divide(self, name: str, module: nn.Module) -> None:
        taken = {id(each): other for other, (one, _) in self._parts.items() for each in one.parameters()}
        others = [taken[id(each)] for each in module.parameters() if id(each) in taken]
        if others:
            one, other = (each or f"{type(self._module).__name__} itself" for each in (name, others[0]))
            raise JobError(
                f"{one} and {other} are each called outermost in training, and have parameters in common: they cannot each be divided. "
                "Name what is divided: a module that has them both, or one of them, whose parameters the other does not read by itself."
            )
        prefix = f"{name}." if name else ""
        rules: dict[str, Any] = {
            each: rule_of(prefix + each, self._rules) for each, _ in module.named_buffers()
        }
        self._parts[name] = (
            module,
            self._make(module, rules={each: rule for each, rule in rules.items() if rule is not None}),
        )

    def _rest(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that are in no divided module."""
        taken = {id(each) for module, _ in self._parts.values() for each in module.parameters()}
        return ((name, each) for name, each in self._module.named_parameters() if id(each) not in taken)

    def _own_buffers(self) -> list[tuple[str, Tensor]]:
        taken = {id(each) for module, _ in self._parts.values() for each in module.buffers()}
        return [(name, each) for name, each in self._module.named_buffers() if id(each) not in taken]

    def refresh(self) -> None:
        if self._ranks.plan.dp > 1:
            self.follow(self._rest())


class _Arrival:
    """Takes the calls of a module within, as what `Module.compile` compiles does. A copy of the module has none."""

    def __init__(self, owner: DividedWithin, name: str, module: nn.Module) -> None:
        self._owner, self._name, self._module = owner, name, module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._owner.arrived(self._name, self._module, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None


@contextmanager
def _all(contexts: Sequence[AbstractContextManager[None]]) -> Iterator[None]:
    with ExitStack() as stack:
        for each in contexts:
            stack.enter_context(each)
        yield
