"""Finds out whether hidden units of an opaque module can be divided among ranks: its own code runs on a few of them.

Nothing of the code is read. Dims of equal size in its parameters are tried together, with random numbers in them:

    f(units 0-4) = f(units 0, 1) + f(unit 2) + f(units 3, 4) - 2 f(none)        results, and gradients of all that it is given

holds where the code treats each of these units alike and adds up what they give, as in an MLP, or in experts that each run on the
rows that are routed to them. A tensor that is reshaped to sizes of the whole, drawn for, or normalised over them fails. So does code
that asks for a value that depends on units, or that holds no more with numbers a hundred times as large.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from meshloom.core.job import LossFunction
from meshloom.core.moments.branches import branches_as_written
from meshloom.core.random import derive, preserved_draws, seed_everything
from meshloom.program.capture.opaque_runs import MOST_CALLS, MOST_TIMES, CallMeter, MoreCallsError, WorkMeter
from meshloom.program.capture.restored import cloned, restored
from meshloom.program.ir.nodes import Node, submodule
from meshloom.program.ir.program import Program
from meshloom.program.opaque.asked_of_units import AskedOfUnits
from meshloom.program.opaque.call import OpaqueCall, state_of
from meshloom.program.opaque.hidden_units import HiddenUnits, UnitsDim
from meshloom.program.opaque.loss_code import is_code
from meshloom.program.opaque.module_tensors import ModuleTensors
from meshloom.program.opaque.operator import call_of_node, is_opaque
from meshloom.program.opaque.product_dims import ProductDims
from meshloom.program.opaque.stand_ins import intercepted
from meshloom.program.opaque.unit_trial import TOLERANCE, UnitTrial
from meshloom.program.trace.attributes import TORCHS_OWN

MOST_TRIALS = 256  # of one module
MOST_COMBINED = 4096  # ways to choose dims of one size
MOST_REST = 1 / 3  # of the work; a second run of more takes longer than dividing saves
SEVERAL = (2, 3, 4)  # tensors that may have been made one: a gate and a value, gates of a cell
PARTS = ((0, 1), (2,), (3, 4))  # units that run alone
LARGE = 100.0  # times the numbers of the first trial


def with_hidden_units(
    program: Program, model: nn.Module, loss: LossFunction, batch: Any, whole: Collection[str] = ()
) -> Program:
    """The program whose opaque calls know which hidden units of them can be divided. whole: modules that are not tried."""
    calls: dict[str, list[OpaqueCall]] = {}
    for node in _modules_of(program):
        calls.setdefault(node.args[2], []).append(call_of_node(node))
    paths = [path for path, each in calls.items() if path not in whole and all(map(_may_be_divided, each))]
    found = _found(model, loss, batch, paths, calls)
    if not found:
        return program
    return replace(program, nodes=tuple(_with_units(node, found) for node in program.nodes))


def undivided(program: Program) -> frozenset[str]:
    """The opaque modules of which no units are divided."""
    return frozenset(str(each.args[2]) for each in _modules_of(program) if call_of_node(each).units is None)


def _modules_of(program: Program) -> list[Node]:
    """The opaque operators that are modules."""
    return [each for each in program.nodes if is_opaque(each) and not is_code(each.args[2])]


def _may_be_divided(call: OpaqueCall) -> bool:
    floating = all(each.dtype.is_floating_point for each in call.results)
    writes = bool(call.written or call.settled)
    return bool(call.results) and floating and not call.num_draws and call.draws_alike and not writes


def _with_units(node: Node, found: Mapping[str, HiddenUnits]) -> Node:
    if not is_opaque(node) or node.args[2] not in found:
        return node
    call = replace(call_of_node(node), units=found[node.args[2]])
    return replace(node, args=(*node.args[:3], call.text()))


def _found(
    model: nn.Module,
    loss: LossFunction,
    batch: Any,
    paths: Sequence[str],
    calls: Mapping[str, Sequence[OpaqueCall]],
) -> dict[str, HiddenUnits]:
    """The units that all calls of a module in this batch allow."""
    found: dict[str, HiddenUnits | None] = {}
    # modules of one class whose tensors are alike are divided alike, which one trial confirms
    known: dict[Any, HiddenUnits | None] = {}

    def handle(
        path: str, module: nn.Module, method: str, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        with ProductDims(state_of(module)[1]) as products, branches_as_written(), CallMeter() as meter:
            returned = run(*args, **kwargs)
        with restored(module), preserved_draws(), torch.autocast(_device(module), enabled=False):
            trials = _Trials(module, run, args, kwargs, calls[path][0], products, meter.calls)
            kind = type(module), tuple((names, tuple(each.shape)) for names, each in trials.named())
            if path in found:
                found[path] = trials.confirmed(found[path])
            elif kind in known and (known[kind] is None or trials.confirmed(known[kind])):
                found[path] = known[kind]
            else:
                found[path] = known[kind] = trials.best()
        return returned

    if paths:
        with restored(model), preserved_draws(), intercepted(model, paths, handle):
            seed_everything(derive("capture", 0))
            loss(model, cloned(batch))
    return {path: units for path, units in found.items() if units is not None}


def _device(module: nn.Module) -> str:
    return next((each.device.type for each in module.parameters()), "cpu")


class _Trials:
    """A call of a module, run on some of its units."""

    def __init__(
        self,
        module: nn.Module,
        run: Callable[..., Any],
        args: Any,
        kwargs: Any,
        call: OpaqueCall,
        products: ProductDims,
        num_calls: int,
    ) -> None:
        """num_calls: of operators in the call itself."""
        self._most_calls, self._calls_left = MOST_TIMES * num_calls, MOST_CALLS
        self._module, self._run, self._given, self._call = module, run, (args, kwargs), call
        self._names, self._state = state_of(module)
        self._tensors = ModuleTensors(module, self._names)
        self._products = products

    def named(self) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        """Its parameters and buffers."""
        return zip(self._names, self._state, strict=True)

    def best(self) -> HiddenUnits | None:
        """The division of the most bytes that holds; None if code whose work follows values takes too much of it."""
        tried = sorted(self._combined(), key=lambda each: -each[0])[:MOST_TRIALS]
        with suppress(MoreCallsError):
            return next((units for _, dims, count in tried if (units := self.result(dims, count))), None)
        return None

    def confirmed(self, known: HiddenUnits | None) -> HiddenUnits | None:
        """The division of another call, if it holds for this one."""
        found = None
        with suppress(MoreCallsError):
            found = self.result(known.dims, known.count) if known is not None else None
        return known if found is not None and known is not None and found.results == known.results else None

    def _combined(self) -> Iterator[tuple[int, tuple[UnitsDim, ...], int]]:
        """Ways to choose the dims of units, with the elements that they divide."""
        alike: dict[Any, list[int]] = {}  # parameters of alike modules, such as experts
        for number, tensor in enumerate(self._state):
            if isinstance(tensor, nn.Parameter) and tensor.is_floating_point():
                alike.setdefault(self._kind(number), []).append(number)
        for found in (self._products.kept, self._products.summed):
            for numbers in alike.values():
                dims = set[int]().union(*(found.get(each, ()) for each in numbers))
                found.update(dict.fromkeys(numbers, dims))
        sizes = {size for _, shape in alike if len(shape) > 1 for size in shape if size > 1}
        for count in sizes:
            ways = [
                [
                    (),
                    *(
                        tuple(replace(dim, number=each) for each in numbers)
                        for dim in self._dims(numbers, count)
                    ),
                ]
                for numbers in alike.values()
            ]
            if math.prod(map(len, ways)) > MOST_COMBINED:
                continue
            for chosen in itertools.product(*ways):
                dims = tuple(itertools.chain(*chosen))
                firsts = [each[0] for each in chosen if each]
                if any(map(self._is_summed, firsts)) and not all(map(self._is_summed, firsts)):
                    yield sum(self._state[each.number].numel() for each in dims), dims, count

    def _dims(self, numbers: Sequence[int], count: int) -> Iterator[UnitsDim]:
        """Where alike tensors may have this many units: alone, or several to each, one after another or side by side. Of a
        factor of matrix products, where these keep units, or sum over them."""
        kept, summed = self._products.kept[numbers[0]], self._products.summed[numbers[0]]
        for dim, size in enumerate(self._state[numbers[0]].shape):
            if (kept or summed) and dim not in kept | summed:
                continue
            if size == count:
                yield UnitsDim(number=-1, dim=dim)
            elif size % count == 0 and size // count in SEVERAL and dim not in summed:
                yield UnitsDim(number=-1, dim=dim, outer=size // count)
                yield UnitsDim(number=-1, dim=dim, inner=size // count)

    def _is_summed(self, each: UnitsDim) -> bool:
        return each.dim in self._products.summed[each.number]

    def result(self, dims: Sequence[UnitsDim], count: int) -> HiddenUnits | None:
        """The units in these dims, if they can be divided."""
        for dtype in (torch.float64, self._dtype()):
            with suppress(Exception):  # what the user's code raises for fewer units
                units = self._tried(dims, count, dtype)
                return units if units and self._holds_when_large(units, dtype) else None
        return None

    def _dtype(self) -> torch.dtype:
        return next((each.dtype for each in self._state if each.is_floating_point()), torch.float64)

    def _tried(self, dims: Sequence[UnitsDim], count: int, dtype: torch.dtype) -> HiddenUnits | None:
        if dtype not in TOLERANCE or not self._call.cost.flops:
            return None
        before = _attributes(self._module)
        trial = self._trial(dims, count, dtype, 1.0)
        if trial is None:
            return None
        kinds = trial.kinds()
        rest = min(1.0, trial.rest_flops / self._call.cost.flops)
        if set(kinds) == {"same"} or ("rest" in kinds and rest > MOST_REST):
            return None
        if "rest" in kinds and not _are_same(before, _attributes(self._module)):
            return None  # a second run would count twice
        units = HiddenUnits(count=count, dims=tuple(dims), results=kinds, rest=rest)
        gradients = trial.gradients(units)
        if gradients is None:
            return None
        used = {self._kind(each.number) for each in dims if gradients[id(trial.state[each.number])].any()}
        return units if used == {self._kind(each.number) for each in dims} else None

    def _holds_when_large(self, units: HiddenUnits, dtype: torch.dtype) -> bool:
        """Whether it is so with large numbers, too, as what clips a norm changes small ones nowhere. What fails on them
        says nothing."""
        with suppress(Exception, MoreCallsError):
            trial = self._trial(units.dims, units.count, dtype, LARGE)
            if trial is not None and all(map(_is_finite, trial.whole)):
                return trial.gradients(units) is not None
        return True

    def _trial(
        self, dims: Sequence[UnitsDim], count: int, dtype: torch.dtype, scale: float
    ) -> UnitTrial | None:
        """scale: of the numbers as parameters."""
        parts = [part for each in PARTS if (part := [unit for unit in each if unit < count])]
        given, state = self._drawn(dims, sum(map(len, parts)), dtype, scale)
        asked = AskedOfUnits([state[each.number] for each in dims])
        with asked.watching():
            whole = self._outcome(given, state)
        if [tuple(each.shape) for each in whole] != [each.shape for each in self._call.results]:
            return None
        some = [self._outcome(given, _some(state, dims, part)) for part in parts]
        with WorkMeter() as work:
            none = self._outcome(given, _some(state, dims, ()))
        return UnitTrial(
            given=given, state=state, whole=whole, none=none, some=some, sizes=[*map(len, parts)], asked=asked,
            rest_flops=work.cost().flops, tolerance=TOLERANCE[dtype],
        )  # fmt: skip

    def _kind(self, number: int) -> Any:
        """Equal for tensors of alike modules, such as experts."""
        return tuple(re.sub(r"\d+", "#", each) for each in self._names[number]), tuple(
            self._state[number].shape
        )

    def _drawn(
        self, dims: Sequence[UnitsDim], num_units: int, dtype: torch.dtype, scale: float
    ) -> tuple[Any, list[Tensor]]:
        """The arguments, and tensors with a few of the units: random numbers as parameters, which may all be zero at the start."""
        source = torch.Generator().manual_seed(0)
        by_number = {each.number: each for each in dims}
        found: list[Tensor] = []
        for number, tensor in enumerate(self._state):
            if not isinstance(tensor, nn.Parameter) or not tensor.is_floating_point():
                found.append(tensor.detach().to(dtype) if _is_floating(tensor) else tensor)
                continue
            shape = list(tensor.shape)
            if number in by_number:
                dim = by_number[number]
                shape[dim.dim] = dim.outer * num_units * dim.inner
            # about 1 from rows of any length
            size = scale * (1.7 / math.sqrt(shape[-1]) if len(shape) > 1 else 1.0)
            drawn = size * (2 * torch.rand(shape, generator=source, dtype=dtype) - 1)
            found.append(drawn.to(tensor.device).requires_grad_())

        def given(tensor: Tensor) -> Tensor:
            if not _is_floating(tensor):
                return tensor.clone()
            return tensor.detach().to(dtype, copy=True).requires_grad_()

        return tree_map_only(Tensor, given, self._given), found

    def _outcome(self, given: Any, state: Sequence[Tensor]) -> list[Tensor]:
        """Its results. Raises `MoreCallsError` where it takes too many operators."""
        meter = CallMeter(min(self._most_calls, self._calls_left))
        try:
            with self._tensors.replaced_by(state), torch.enable_grad(), meter:
                returned = self._run(*given[0], **given[1])
                left = [vars(submodule(self._module, below))[name] for below, name in self._call.attributes]
        finally:
            self._calls_left -= meter.calls
        leaves = tree_leaves(returned)
        return [*(leaves[place] for place in self._call.places), *left]


def _some(state: Sequence[Tensor], dims: Sequence[UnitsDim], units: Sequence[int]) -> list[Tensor]:
    found = list(state)
    for each in dims:
        found[each.number] = each.some(state[each.number], units)
    return found


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _is_finite(value: Tensor) -> bool:
    return bool(value.isfinite().all())


def _attributes(module: nn.Module) -> dict[tuple[str, str], Any]:
    """What its modules remember besides tensors: the objects, and how long lists are."""
    return {
        (path, name): (value, len(value) if isinstance(value, list | dict | set) else 0)
        for path, each in module.named_modules()
        for name, value in vars(each).items()
        if name not in TORCHS_OWN and not isinstance(value, Tensor)
    }


def _are_same(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> bool:
    return before.keys() == after.keys() and all(
        before[place][0] is value and before[place][1] == length for place, (value, length) in after.items()
    )
