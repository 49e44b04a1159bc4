"""Runs a program in segments, and recomputes in the backward what was not kept.

    forward     [segment 0] -- x1 -> [segment 1] -- x2 -> [segment 2] -> loss
                a tensor that autograd saves in a segment is itself if its memory is kept, else a handle
    backward    the first handle of segment 2 is unpacked: operators run again on what was kept, and all of its
                handles get their tensors; then segment 1, then 0

Autograd's graph is the same as without recomputation, so gradients are the same, in the same order of
summation. Which operators save what, and in whose memory, is observed in the first run of a segment.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.node import map_arg

from meshloom.comm.group import Group
from meshloom.core.random import seed_torch
from meshloom.data.to_device import lifted
from meshloom.program.ir.contexts import Entered
from meshloom.program.ir.draws import seed_of_draw
from meshloom.program.ir.nodes import Ref
from meshloom.program.ir.program import Program
from meshloom.program.recompute.saved_frame import Elsewhere, Frame, Handle, is_elsewhere, open_saved
from meshloom.program.recompute.saved_tensors import Save, SegmentRecomputation, recomputation_of, saves_of
from meshloom.program.recompute.segments import Segment, segments_of
from meshloom.program.run.runner import Runner, Special, compile_program, lower, regions_of, used_variables

_torch: Any = torch  # for modules looked up by device type


class RecomputingRunner:
    """A compiled program. kept: nodes that are never recomputed. Without gradients it runs as `Runner`."""

    def __init__(
        self, program: Program, kept: frozenset[str], device: torch.device, dtype: torch.dtype | None
    ) -> None:
        self._program, self._device, self._dtype = program, device, dtype
        self._plain: Runner | None = None
        self._parameters = [(each.value, each.name) for each in used_variables(program, program.parameters)]
        self._buffers = [(each.value, each.name) for each in used_variables(program, program.buffers)]
        self._constants = {
            name: each.to(device, lifted(each.dtype, dtype)) for name, each in program.constants.items()
        }
        self._contexts = program.contexts
        self._segments = [
            _Runs(program, each, kept, device, dtype) for each in _segments(program, kept, device, dtype)
        ]

    def run(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        leaves: Iterable[Tensor],
        visit: Any = None,
        group: Group | None = None,
        elsewhere: Elsewhere | None = None,
    ) -> list[Any]:
        """As `Runner.run`."""
        if not torch.is_grad_enabled():
            if self._plain is None:
                self._plain = compile_program(self._program, self._device, self._dtype)
            return self._plain.run(parameters, buffers, leaves, visit, group)
        program, dtype = self._program, self._dtype
        values: dict[str, Any] = {value: parameters[name] for value, name in self._parameters}
        values |= {value: buffers[name] for value, name in self._buffers}
        values |= self._constants
        for each, leaf in zip(program.inputs, leaves, strict=True):
            values[each.value] = leaf.to(self._device, lifted(leaf.dtype, dtype))
        first_runs: list[_FirstRun] = []
        with Entered(self._contexts, device=self._device.type, lifted=dtype is not None) as entered:
            for runs in self._segments:
                runs.run(entered, values, _ProgramRun(group, elsewhere), first_runs)
                for name in runs.segment.dying:
                    del values[name]
        outputs = [values[each.name] if isinstance(each, Ref) else each for each in program.outputs]
        if program.updates:
            with torch.no_grad():
                for name, ref in program.updates.items():
                    buffers[name].copy_(values[ref.name])
        values.clear()
        for each in first_runs:
            each.forget_what_died()
        return outputs


def _segments(
    program: Program, kept: frozenset[str], device: torch.device, dtype: torch.dtype | None
) -> Sequence[Segment]:
    """Those of the program, their operators in compiled regions if it has a compiler."""
    segments = segments_of(program)
    if program.compiler is None:
        return segments
    regions = regions_of(program, device, dtype)
    return [replace(each, nodes=regions.joined(each.nodes, each.results, kept)) for each in segments]


class _ProgramRun(NamedTuple):
    """What one run of a program needs besides tensors. group: the ranks over which it is sharded. elsewhere: has
    the values of parameters."""

    group: Group | None
    elsewhere: Elsewhere | None

    def has(self, tensor: Tensor) -> Any:
        """What is kept of a tensor elsewhere; None: it is not."""
        kept = self.elsewhere.pack(tensor) if self.elsewhere else tensor
        return kept if is_elsewhere(kept) else None

    def keeping_all(self) -> AbstractContextManager[Any]:
        """A context in which what autograd saves is kept, as opaque modules save what values say."""
        return saved_tensors_hooks(self.elsewhere.pack if self.elsewhere else _itself, open_saved)

    def watching(self) -> AbstractContextManager[Any]:
        return self.elsewhere.watching() if self.elsewhere else nullcontext()


class _Runs:
    """A segment, compiled for every layout of its inputs, which determines what is saved."""

    def __init__(
        self,
        program: Program,
        segment: Segment,
        kept: frozenset[str],
        device: torch.device,
        dtype: torch.dtype | None,
    ) -> None:
        self.program, self.segment, self.kept, self.device, self.dtype = program, segment, kept, device, dtype
        self.contexts = program.contexts
        changing = {program.buffers[name].value for name in program.changing}
        self._changing = [name for name in segment.given if name in changing]
        self.compiled: dict[Any, _Compiled] = {}

    def run(
        self, entered: Entered, values: dict[str, Any], around: _ProgramRun, first_runs: list[_FirstRun]
    ) -> None:
        """Run the forward; adds the segment's results to `values`."""
        given = [values[name] for name in self.segment.given]
        key = tuple(map(_layout, given))
        as_it_was = {name: values[name].clone() for name in self._changing}
        run = self.compiled.get(key)
        if run is None:
            run = _FirstRun(self, key)
            first_runs.append(run)
        results = run.forward(entered, given, as_it_was, around)
        values.update(zip(self.segment.results, results, strict=False))

    def function(
        self, nodes: Any, given: Sequence[str], results: Iterable[str], mark: str | None = None
    ) -> tuple[Any, Sequence[Any], Mapping[str, fx.Node]]:
        """A module of some of the nodes, its targets for `Special`, and its graph's nodes."""
        lowered = lower(self.program, nodes, given, map(Ref, results), self.device, self.dtype, mark=mark)
        return lowered.module, lowered.special, lowered.made


class _Compiled:
    """A segment and its recomputation, as functions."""

    def __init__(self, runs: _Runs, recipe: SegmentRecomputation) -> None:
        self._runs, self.recipe = runs, recipe
        segment = runs.segment
        module, self._special, _ = runs.function(
            segment.nodes, segment.given, [*segment.results, *recipe.held_made], recipe.first_draw
        )
        self._forward = module.forward
        self._num_results = len(segment.results)
        self._held_given = [(name, segment.given.index(name)) for name in recipe.held_given]
        self._wanted = tuple(dict.fromkeys(source.value for source in recipe.sources.values()))
        self._recompute: tuple[Any, Sequence[Any]] | None = None

    def forward(
        self, entered: Entered, given: Sequence[Any], as_it_was: Mapping[str, Tensor], around: _ProgramRun
    ) -> Sequence[Any]:
        """The results, then what is held for recomputation. as_it_was: values of buffers that change."""
        special = Special(self._special, around.group, around.keeping_all)
        if not any(self.recipe.again):
            return self._forward(entered, None, special, *given)
        frame = Frame(self.recipe.again, partial(self.recompute, around), around.elsewhere)
        with saved_tensors_hooks(frame.pack, open_saved):
            results = self._forward(entered, None, special, *given)
        held = [as_it_was.get(name, given[at]) for name, at in self._held_given]
        frame.close(special.seed, held, results[self._num_results :])
        return results

    def recompute(self, around: _ProgramRun, held: Sequence[Any], seed: int | None) -> dict[int, Tensor]:
        """Number of a saved tensor -> the tensor, for those that are recomputed."""
        recipe, runs = self.recipe, self._runs
        if self._recompute is None:
            names = [*recipe.held_given, *recipe.held_made]
            module, special, _ = runs.function(recipe.nodes, names, self._wanted)
            self._recompute = module.forward, special
        function, special = self._recompute
        found: dict[int, Tensor] = {}
        count = 0

        def pack(tensor: Tensor) -> None:
            nonlocal count
            if around.has(tensor) is not None:
                return
            for number, layout in recipe.captures.get(count, ()):
                detached = tensor.detach()  # so that it does not keep its graph alive
                found[number] = detached if layout is None else detached.as_strided(*layout)
            count += 1

        with (
            around.watching(),
            _from_seed(seed, runs.device),
            torch.enable_grad(),  # before contexts are entered, which read it
            saved_tensors_hooks(pack, open_saved),
            Entered(runs.contexts, device=runs.device.type, lifted=runs.dtype is not None) as entered,
        ):
            results = function(entered, None, Special(special, around.group), *held)
        values = dict(zip(self._wanted, results, strict=True))
        return found | {number: source.of(values[source.value]) for number, source in recipe.sources.items()}


class _FirstRun:
    """The first run of a segment with a layout: keeps everything, and observes what need not be kept."""

    def __init__(self, runs: _Runs, key: Any) -> None:
        self._runs, self._key = runs, key
        self._saves: list[Save] = []
        self._borders: set[str] = set()
        self._handles: list[weakref.ref[Handle]] = []

    def forward(
        self, entered: Entered, given: Sequence[Any], as_it_was: Mapping[str, Tensor], around: _ProgramRun
    ) -> Sequence[Any]:
        """The segment's results."""
        runs, segment = self._runs, self._runs.segment
        first_draw = next((node.name for node in segment.nodes if node.num_draws), None)
        module, targets, made = runs.function(segment.nodes, segment.given, segment.results, first_draw)
        special = Special(targets, around.group, around.keeping_all)
        watch = _Watch(module.graph, {each: name for name, each in made.items()})
        saved: list[tuple[str, Tensor]] = []

        def pack(tensor: Tensor) -> Any:
            if (elsewhere := around.has(tensor)) is not None:
                return elsewhere
            handle = Handle(None, tensor)
            saved.append((watch.here, tensor))
            self._handles.append(weakref.ref(handle))
            return handle

        with saved_tensors_hooks(pack, open_saved):
            results = watch.run(entered, None, special, *given)
        values = dict(zip(segment.given, given, strict=True)) | watch.values
        # Looking where they lie is no use of parameters that are elsewhere, for which these would be gathered.
        with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
            self._saves, self._borders = saves_of(segment, values, saved)
        saved.clear()  # the graph references `pack`, whose closure would keep the tensors
        compiled = self._compile(None)
        recipe = compiled.recipe
        frame = Frame(recipe.again, partial(compiled.recompute, around))
        frame.take_over(self._handles)
        seed = None
        if special.seed is not None and recipe.first_draw is not None:
            numbers = {node.name: node.draw or 0 for node in segment.nodes}
            seed = seed_of_draw(special.seed, numbers[recipe.first_draw] - numbers[str(first_draw)])
        held = [as_it_was.get(name, values[name]) for name in recipe.held_given]
        frame.close(seed, held, [values[name] for name in recipe.held_made])
        watch.values.clear()
        return results

    def forget_what_died(self) -> None:
        """After the program has run: tensors that autograd has freed, as the loss does not depend on them,
        need not be recomputed in later runs."""
        alive = {number for number, handle in enumerate(self._handles) if handle() is not None}
        if len(alive) < len(self._handles):
            self._compile(alive)

    def _compile(self, needed: set[int] | None) -> _Compiled:
        runs = self._runs
        recipe = recomputation_of(runs.segment, self._saves, self._borders, runs.kept, needed)
        compiled = runs.compiled[self._key] = _Compiled(runs, recipe)
        return compiled


class _Watch:
    """Runs a graph node by node. names: nodes that are values. values: their results. here: the name now."""

    def __init__(self, graph: fx.Graph, names: Mapping[fx.Node, str]) -> None:
        self.values: dict[str, Any] = {}
        self.here = ""
        self._graph, self._names = graph, names

    def run(self, *given: Any) -> Any:
        """The graph's result."""
        values, known = iter(given), dict[fx.Node, Any]()
        for node in self._graph.nodes:
            if node.op == "placeholder":
                known[node] = next(values)
                continue
            args, kwargs = map_arg((node.args, node.kwargs), known.__getitem__)
            if node.op == "output":
                return args[0]
            self.here = self._names.get(node, self.here)
            if callable(node.target):
                known[node] = node.target(*args, **kwargs)
            else:
                known[node] = getattr(args[0], node.target)(*args[1:], **kwargs)
            if node in self._names:
                self.values[self._names[node]] = known[node]
        raise AssertionError("a graph without an output")


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _layout(value: Any) -> Any:
    """Facts about a value that affect operators, besides shape and type, which the program fixes."""
    if isinstance(value, nn.Parameter):
        return value.requires_grad  # its strides never change, and may not be known between uses
    if isinstance(value, Tensor):
        return value.requires_grad, value.stride()
    return tuple(map(_layout, value)) if isinstance(value, tuple | list) else None


@contextmanager
def _from_seed(seed: int | None, device: torch.device) -> Iterator[None]:
    """Draws start from `seed`; generators are restored on exit."""
    if seed is None:
        yield
        return
    before = torch.get_rng_state()
    module = None if device.type == "cpu" else _torch.get_device_module(device)
    there = module.get_rng_state(device) if module else None
    seed_torch(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before)
        if module:
            module.set_rng_state(there, device)
