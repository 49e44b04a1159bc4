"""A module whose parameters the replicas share among them: each has some of their rows, and gathers the whole to compute.

    zero=1, 2    the whole model at the first forward after a change, and kept until the next change
    zero=3       each block (of a `ModuleList` or `Sequential`; the module for the rest) for its own forward, once more for its backward

The backward of gathering is the mean over replicas of the whole gradient, of which each keeps its rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from meshloom.comm.group import Group
from meshloom.core.buffer_rules import BufferRule
from meshloom.core.modules.compiled import not_compiled
from meshloom.core.plan_shares import chunk_sizes
from meshloom.loops.call_draws import CallDraws
from meshloom.loops.execution import Execution
from meshloom.loops.gathering import Gatherer, Gathering
from meshloom.loops.made_parts import become, keep_states_in_parts, make_part
from meshloom.loops.part_place import PartError, PartPlace
from meshloom.loops.part_tensor import (
    PartParameter,
    plain,
    take_as_plain,
    whole_tensor,
)
from meshloom.loops.taken_shares import TakenShare, bind, newest
from meshloom.loops.written_calls import WrittenCalls


class ShardedModule(Execution):
    """group: the replicas; its ranks are their numbers. rules, joined: as of `WrittenCalls`.

    Numbers (parameters without dims) stay whole on every rank. The replicas call the same blocks in the same order.
    """

    def __init__(
        self, module: nn.Module, group: Group, *, zero: int, rules: Mapping[str, BufferRule] | None = None, joined: Group | None = None
    ) -> None:  # fmt: skip
        self._module, self.group, self.zero = module, group, zero
        self._blocks = list(dict.fromkeys(_blocks(module)))
        self._weight = 1.0  # of the newest call
        self._is_whole, self._calling = False, False
        # of what computes, and whether with its own parameters alone
        self._open: list[tuple[nn.Module, bool, ExitStack]] = []
        self.gatherer = Gatherer(group, keeps=zero != 3)
        take_as_plain()
        keep_states_in_parts()
        self._draws = CallDraws(group.rank)
        self._calls = WrittenCalls(module, group, rules or {}, self._draws, joined)
        self._divide()
        others = (each for each in _modules(module, self._blocks) if each is not module and _slots(each))
        for each in [module, *self._blocks, *others]:
            each.register_forward_pre_hook(self._enter, prepend=True)
            each.register_forward_hook(self._leave, always_call=True)

    def call(
        self, compute: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], method: str = "forward"
    ) -> Any:  # fmt: skip
        share = bind((args, kwargs))
        if self._is_whole:
            with torch.no_grad():  # nobody would reduce a gradient
                return compute(*args, **kwargs)
        self._weight = self._weight_of(share)
        self.gatherer.again = None
        self._divide()
        before, self._calling = self._calling, True
        if method != "forward":  # whose hooks gather
            compute = partial(self._with_own, compute)
        try:
            return self._calls.call(compute, args, kwargs)
        finally:
            self._calling = before

    def stepped(self) -> None:
        """What a call that goes on has gathered is gathered anew."""
        opened = [each[:2] for each in self._open]
        while self._open:
            self._open.pop()[2].close()
        for module, own in opened:
            self._enter(module, own=own)

    def _with_own(self, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A method of the module, which has the module's own parameters whole. Modules within it gather theirs when they are called, and
        the method may change those of others, step, and call again."""
        self._enter(self._module, own=True)
        try:
            return compute(*args, **kwargs)
        finally:
            self._leave(self._module)

    def _weight_of(self, share: TakenShare | None) -> float:
        return share._replace(replica=self.group.rank).weight if share else 1.0

    def _weight_here(self) -> float:
        """Of the call, or of what recomputes in its backward; of a module that the script calls by itself, of the newest share."""
        in_backward = torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        return self._weight if self._calling or in_backward else self._weight_of(newest())

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Reduces at each backward nevertheless: gradients that wait would be whole."""
        yield

    @contextmanager
    def whole(self) -> Iterator[None]:
        parts = [each for each in self._module.parameters() if isinstance(each, PartParameter)]
        for each in parts:
            data, gradient = whole_tensor(each), each.grad
            gradient = gradient if gradient is None else whole_tensor(gradient)
            each.grad = None
            become(each, nn.Parameter, data)
            each.grad = gradient
        before, self._is_whole = self._is_whole, True
        try:
            yield
        finally:
            self._is_whole = before
            self.gatherer.kept.clear()
            for each in parts:
                make_part(each, each.place)

    def tensors(self) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        for name, each in self._module.state_dict(keep_vars=True).items():
            if isinstance(each, Tensor):
                yield name, lambda each=each: whole_tensor(each)

    def alike(self) -> Iterator[tuple[str, Tensor]]:
        return (each for each in self._module.named_parameters() if not isinstance(each[1], PartParameter))

    @property
    def backwards(self) -> int:
        return self.gatherer.reductions

    def take_notes(self) -> list[str]:
        return self._calls.take_notes()

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedModule:
        """Of a copy of the module, in the same group."""
        memo[id(self)] = copied = copy.copy(self)
        copied._module = copy.deepcopy(self._module, memo)
        copied._blocks = [copy.deepcopy(each, memo) for each in self._blocks]
        copied._open, copied.gatherer = [], Gatherer(self.group, keeps=self.zero != 3)
        copied._calls = self._calls.of_a_copy()
        return copied

    def _divide(self) -> None:
        """Makes parts of parameters that are whole, such as those that were added since."""
        for name, each in self._module.named_parameters():
            if type(each) is nn.Parameter and each.dim():
                each.data = each.data.contiguous()
                self.group.broadcast(each.data, 0).wait()
                sizes = tuple(chunk_sizes(each.shape[0], self.group.size))
                make_part(each, PartPlace(name=name, shape=each.shape, dim=0, sizes=sizes, group=self.group))
            elif type(each) not in (nn.Parameter, PartParameter, Tensor):
                raise PartError(
                    f"{name} is a {type(each).__name__}, of which zero={self.zero} makes no parts: of an nn.Parameter it does."
                )

    @not_compiled
    def _enter(self, module: nn.Module, _: Any = None, *, own: bool = False) -> None:
        """Of the module, its blocks, and modules that are called by themselves, such as by what recomputes them in backward."""
        with ExitStack() as stack:
            stack.enter_context(self._gathered(module, own=own))
            self._open.append((module, own, stack.pop_all()))

    @not_compiled
    def _leave(self, module: nn.Module, *_: Any) -> None:
        if self._open and self._open[-1][0] is module:  # else entering has failed
            self._open.pop()[2].close()

    @contextmanager
    def _gathered(self, module: nn.Module, *, own: bool) -> Iterator[None]:
        """Has the parameters of a module, under zero=3 without its blocks, whole in their places, those that are not there yet. own: without those of
        modules within it."""
        is_unit = self.zero == 3 and (module is self._module or module in self._blocks)
        without = [each for each in self._blocks if each is not module] if self.zero == 3 else []
        slots = [slot for each in ([module] if own else _modules(module, without)) for slot in _slots(each)]
        parameters = list(dict.fromkeys(slot.parameter for slot in slots))
        if not parameters:
            yield
            return
        gathering = Gathering(self.gatherer, parameters, self._weight_here())
        wholes = dict(zip(parameters, gathering.with_graph(), strict=True))
        versions = [each._version for each in wholes.values()]
        try:
            for slot in slots:
                slot.set(wholes[slot.parameter])
            with gathering.freed(wholes.values()) if is_unit else nullcontext():
                yield
        finally:
            for slot in slots:
                slot.set(slot.parameter)
        for at, (parameter, each) in enumerate(wholes.items()):
            if isinstance(parameter, PartParameter) and (
                each._version != versions[at]
                or (own and parameter._version == gathering.versions[at] and _differ(parameter, each))
            ):
                raise parameter.place.refusal("A change in place, within forward,")


class _Slot(NamedTuple):
    module: nn.Module
    name: str
    parameter: nn.Parameter

    def set(self, tensor: Tensor) -> None:
        vars(self.module)["_parameters"][self.name] = tensor
        if isinstance(self.module, nn.RNNBase):  # which keeps a list of them
            cells = cast(Any, self.module)
            cells._flat_weights = [getattr(cells, each) for each in cells._flat_weights_names]


def _differ(parameter: PartParameter, whole: Tensor) -> bool:
    """Whether the whole was changed, as by `.data`, which has no version."""
    one, other = parameter.place.own_part(whole.detach()), plain(parameter.detach())
    return not torch.equal(one.nan_to_num(), other.nan_to_num())


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost elements of lists of modules that have parameters."""
    of_list = isinstance(module, nn.ModuleList | nn.Sequential)
    for child in module.children():
        if not of_list or isinstance(child, nn.ModuleList):
            yield from _blocks(child)
        elif next(child.parameters(), None) is not None:
            yield child


def _modules(module: nn.Module, without: Collection[nn.Module]) -> Iterator[nn.Module]:
    """The module and those in it, but for some."""
    yield module
    for child in module.children():
        if child not in without:
            yield from _modules(child, without)


def _slots(module: nn.Module) -> list[_Slot]:
    own = module.named_parameters(recurse=False, remove_duplicate=False)
    return [_Slot(module, name, each) for name, each in own if isinstance(each, nn.Parameter)]
