"""Compiles a program into a Python function of ATen calls, for one device and dtype, and runs it."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from meshloom.comm.group import Group
from meshloom.core.errors import CaptureError
from meshloom.data.to_device import lifted
from meshloom.program.ir.callables import keyed, keyed_out_of_place, out_of_place
from meshloom.program.ir.contexts import Entered
from meshloom.program.ir.nodes import Node, Ref, refs_in
from meshloom.program.ir.program import Program
from meshloom.program.opaque.bound import OpaqueModule
from meshloom.program.operators.collectives import Joint
from meshloom.program.recompute.saved_frame import Elsewhere
from meshloom.program.run.batch_norms import NORMS, AlignedNorms, aligned
from meshloom.program.run.regions import Regions

Shared = dict[Any, Callable[..., Any]]  # functions of programs that differ in integers only


class Runner:
    """A compiled program."""

    def __init__(
        self,
        program: Program,
        function: Callable[..., Any],
        special: Sequence[Any],
        constants: list[Tensor],
        device: torch.device,
        dtype: torch.dtype | None,
        numbers: Sequence[int] | None = None,
    ) -> None:
        self._function = function
        self._numbers = () if numbers is None else (numbers,)
        self._special = special
        self._parameters = [each.name for each in used_variables(program, program.parameters)]
        self._buffers = [each.name for each in used_variables(program, program.buffers)]
        self._updates = list(program.updates)
        self._num_outputs = len(program.outputs)
        self._constants = constants
        self._device = device
        self._dtype = dtype
        self._contexts = program.contexts

    def run(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        leaves: Iterable[Tensor],
        visit: Any = None,
        group: Group | None = None,
        elsewhere: Elsewhere | None = None,
    ) -> list[Any]:
        """As `run_flat`; leaves: the batch's tensors in order. visit: as in `run_program`. elsewhere: only a
        recomputation needs to know it."""
        dtype = self._dtype
        inputs = [leaf.to(self._device, lifted(leaf.dtype, dtype)) for leaf in leaves]
        state = [parameters[name] for name in self._parameters] + [buffers[name] for name in self._buffers]
        given = *state, *self._constants, *inputs, *self._numbers
        with Entered(self._contexts, device=self._device.type, lifted=dtype is not None) as entered:
            values = self._function(entered, visit, Special(self._special, group), *given)
        if self._updates:
            with torch.no_grad():
                for name, value in zip(self._updates, values[self._num_outputs :], strict=True):
                    buffers[name].copy_(value)
        return list(values[: self._num_outputs])


def compile_program(
    program: Program,
    device: torch.device,
    dtype: torch.dtype | None,
    *,
    visiting: bool = False,
    shared: Shared | None = None,
) -> Runner:
    """A runner whose function takes (entered, visit, special, parameters..., buffers..., constants...,
    inputs...) and returns outputs and updates.

    dtype: convert everything of floating point to it. visiting: call `visit` with every node and its value.
    shared: functions of programs that differ in integers only, which are then one more argument, the last.
    """
    if dtype is not None and dtype not in (torch.float32, torch.float64):
        raise CaptureError(
            f"A program can run in torch.float32 or torch.float64, not in {dtype}. For a lower precision, capture a job whose model has it."
        )
    state = [*used_variables(program, program.parameters), *used_variables(program, program.buffers)]
    given = [*(each.value for each in state), *program.constants, *(each.value for each in program.inputs)]
    outputs = [*program.outputs, *program.updates.values()]
    constants = [each.to(device, lifted(each.dtype, dtype)) for each in program.constants.values()]
    if program.compiler is not None and not visiting:
        later = [ref.name for ref in refs_in(tuple(outputs))]
        nodes = regions_of(program, device, dtype).joined(program.nodes, later)
        lowered = lower(program, nodes, given, outputs, device, dtype)
        return Runner(program, lowered.module.forward, lowered.special, constants, device, dtype)
    if shared is not None and not visiting:
        # In some of the programs linear layers may have been replaced by special operators.
        targets = tuple(node.target if _has_name(node) else type(node.target) for node in program.nodes)
        key = device, dtype, targets
        if key not in shared:
            lowered = lower(program, program.nodes, given, outputs, device, dtype, open_numbers=True)
            shared[key] = lowered.module.forward
        special = [node.target for node in program.nodes if _is_special(node)]
        numbers = _numbers_in(program.nodes, outputs)
        return Runner(program, shared[key], special, constants, device, dtype, numbers)
    lowered = lower(program, program.nodes, given, outputs, device, dtype, visiting=visiting)
    function = lowered.module.forward
    if visiting:
        nodes = {node.name: node for node in program.nodes}
        plain: Any = function
        function = lambda entered, visit, special, *values: plain(  # noqa: E731
            entered, _Visit(nodes, visit), special, *values
        )
    return Runner(program, function, lowered.special, constants, device, dtype)


def regions_of(program: Program, device: torch.device, dtype: torch.dtype | None) -> Regions:
    """What makes the regions of a program that its compiler compiles."""

    def place(value: Any) -> Any:
        return _built(value, {}, program.device, device, dtype, None)

    return Regions(program, program.compiler, place)


@dataclass(frozen=True, kw_only=True)
class Lowered:
    """Nodes as a function of (entered, visit, special, given...). made: value -> its node in the graph.
    special: targets for `Special`."""

    module: Any
    made: Mapping[str, fx.Node]
    special: Sequence[Any]


def lower(
    program: Program,
    nodes: Iterable[Node],
    given: Iterable[str],
    outputs: Iterable[Any],
    device: torch.device,
    dtype: torch.dtype | None,
    *,
    visiting: bool = False,
    mark: str | None = None,
    open_numbers: bool = False,
) -> Lowered:
    """A function of some nodes of `program`, from the values `given` to `outputs`.

    mark: the node before which `special.mark` is called.
    open_numbers: integers among the operands are one more argument, a list in order (`_numbers_in`).
    """
    graph = fx.Graph()
    entered, visit, special = (graph.placeholder(name) for name in ("entered", "visit", "special"))
    specials: list[Any] = []
    # Not by their own names: fx renames Python's, as `sum` to `sum_1`, which may be another value's name.
    made = {name: graph.placeholder(f"given_{number}") for number, name in enumerate(given)}
    contexts = program.contexts
    opened: Callable[[], fx.Node] | None = None
    if open_numbers:
        numbers, count = graph.placeholder("numbers"), itertools.count()
        opened = lambda: graph.call_function(operator.getitem, (numbers, next(count)))  # noqa: E731

    def built(value: Any) -> Any:
        return _built(value, made, program.device, device, dtype, opened)

    number = -1
    for node in nodes:
        if contexts[number] != node.context or number < 0:
            number = contexts.index(node.context)
            graph.call_method("move_to", (entered, number))
        if node.name == mark:
            graph.call_method("mark", (special,))
        args, kwargs = built((node.args, dict(node.kwargs)))
        target = node.target
        if node.num_draws and target is out_of_place:
            target = keyed_out_of_place
        elif node.num_draws:
            target, args = keyed, (target, *args)
        elif device.type == "cpu" and target in NORMS:
            target, args = aligned, (target, *args)
        if target is keyed and not hasattr(args[0], "__name__"):
            specials.append(args[0])
            made[node.name] = graph.call_method("draw", (special, len(specials) - 1, *args[1:]), kwargs)
        elif isinstance(target, Joint):
            specials.append(target)
            made[node.name] = graph.call_method("communicate", (special, len(specials) - 1, *args))
        elif not _has_name(node):  # a callable object, which a graph cannot name
            specials.append(target)
            made[node.name] = graph.call_method("call", (special, len(specials) - 1, *args), kwargs)
        else:
            made[node.name] = graph.call_function(target, args, kwargs)
        if visiting:
            graph.call_function(_visited, (visit, node.name, made[node.name]))
    graph.output(tuple(map(built, outputs)))
    return Lowered(module=fx.GraphModule(nn.Module(), graph), made=made, special=specials)


def _has_name(node: Node) -> bool:
    return hasattr(node.target, "__name__")


def _is_special(node: Node) -> bool:
    """Whether a node is one of `Lowered.special`."""
    if node.num_draws:
        return not _has_name(node)
    return isinstance(node.target, Joint) or not _has_name(node)


def _numbers_in(nodes: Iterable[Node], outputs: Iterable[Any]) -> list[int]:
    """The integers among operands and outputs, in order."""
    found: list[int] = []

    def take(value: Any) -> None:
        if type(value) is int:
            found.append(value)
        elif isinstance(value, tuple | list):
            for each in value:
                take(each)
        elif isinstance(value, dict):
            take(list(value.values()))

    for node in nodes:
        take((node.args, dict(node.kwargs)))
    take(tuple(outputs))
    return found


class Special:
    """Callables of a program that are no plain functions. group: the ranks over which it is sharded. around_opaque:
    a context for opaque modules."""

    def __init__(
        self,
        targets: Sequence[Any],
        group: Group | None,
        around_opaque: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._targets = targets
        self._group = group
        self._around_opaque = around_opaque
        self.seed: int | None = None  # of the generator, when `mark` was called

    def mark(self) -> None:
        """Record the position in the sequence of draws."""
        self.seed = torch.default_generator.initial_seed()

    def communicate(self, number: int, *args: Any) -> Any:
        """Call number `number`, which may communicate with other ranks."""
        return self._targets[number].run(self._group, *args)

    def call(self, number: int, *args: Any, **kwargs: Any) -> Any:
        """Call number `number`, without communication."""
        with self._around(number):
            return self._targets[number](*args, **kwargs)

    def draw(self, number: int, *args: Any, **kwargs: Any) -> Any:
        """Call number `number`, which draws, with keyed seeds."""
        with self._around(number):
            return keyed(self._targets[number], *args, **kwargs)

    def _around(self, number: int) -> AbstractContextManager[Any]:
        target = self._targets[number]
        if not isinstance(target, OpaqueModule):
            return nullcontext()
        return self._aligning() if target.has_batch_norms else self._around_opaque()

    @contextmanager
    def _aligning(self) -> Iterator[None]:
        with self._around_opaque(), AlignedNorms():
            yield


class _Visit:
    def __init__(self, nodes: Mapping[str, Node], visit: Callable[[Node, Any], None]) -> None:
        self.nodes, self.visit = nodes, visit


def _visited(visit: _Visit, name: str, value: Any) -> None:
    visit.visit(visit.nodes[name], value)


def _built(
    value: Any,
    made: Mapping[str, fx.Node],
    captured_on: torch.device,
    device: torch.device,
    dtype: torch.dtype | None,
    opened: Callable[[], fx.Node] | None,
) -> Any:
    """Arguments for the graph: references as its nodes, and the device and dtype of the run. opened: the
    stand-in for the next integer."""
    if isinstance(value, Ref):
        return made[value.name]
    if isinstance(value, tuple | list):
        parts = [_built(each, made, captured_on, device, dtype, opened) for each in value]
        return parts if isinstance(value, list) else tuple(parts)
    if isinstance(value, dict):
        return {key: _built(each, made, captured_on, device, dtype, opened) for key, each in value.items()}
    if isinstance(value, torch.device):
        return device if value.type == captured_on.type else value
    if type(value) is int and opened:
        return opened()
    return lifted(value, dtype) if isinstance(value, torch.dtype) else value


def used_variables(program: Program, variables: Mapping[str, Any]) -> list[Any]:
    """The parameters or buffers that are read."""
    names = {ref.name for node in program.nodes for ref in node.operands()}
    names |= {ref.name for ref in refs_in((*program.outputs, *program.updates.values()))}
    return [each for each in variables.values() if each.value in names]
