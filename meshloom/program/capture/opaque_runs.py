"""Runs a loss in eager to record the calls of its opaque modules and of leaf functions: layouts, draws, buffers written, costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshloom.core.errors import CaptureError
from meshloom.core.job import LossFunction
from meshloom.core.modules.named_leaves import NAMED, function_name, is_function
from meshloom.core.moments.branches import branches_as_written
from meshloom.core.moments.current_step import at_step
from meshloom.core.random import derive, preserved_draws, seed_everything
from meshloom.program.capture.reached import KeptTensors, check_arguments, order_now
from meshloom.program.capture.restored import cloned, own_memory, restored
from meshloom.program.cost.cost_rules import bytes_read_and_written, flops
from meshloom.program.ir.draws import CountDraws
from meshloom.program.ir.leaves import leaves_of
from meshloom.program.ir.nodes import Meta
from meshloom.program.ir.replaced import seen_as_exported
from meshloom.program.ir.sparse_constants import memory_of, storage_of
from meshloom.program.ir.step_input import answered_by_input, step_beside
from meshloom.program.opaque.call import (
    FUNCTION,
    OpaqueCall,
    OpaqueCost,
    OpaqueError,
    meta_of,
    plain_text_of,
    split_arguments,
    state_of,
)
from meshloom.program.opaque.functions import closed_over
from meshloom.program.opaque.stand_ins import Recorded, RecordedCall, intercepted, taken_apart
from meshloom.program.trace.frozen import equal_bits, python_states


def recorded_calls(
    model: nn.Module,
    loss: LossFunction,
    batches: Sequence[Any],
    leaves: Mapping[str, str],
) -> Recorded:
    """The calls of these modules, which must be alike for all `batches`. The model is unchanged afterwards.

    Leaf functions are recorded, too. The code around is told that it is traced, as in the export, and may make masks, say, that eager does without.
    Raises `OpaqueError` for what are no operators: their shapes depend on values, say.
    """
    first: dict[str, list[RecordedCall]] | None = None
    functions: dict[str, Any] = {}
    for number, batch in enumerate(batches):
        found = _calls(model, loss, batch, leaves, derive("capture", number), functions)
        first = found if first is None else first
        for path in first | found:
            calls, others = first.get(path, []), found.get(path, [])
            _check_number(path, calls, others)
            first[path] = [_merged(path, one, other) for one, other in zip(calls, others, strict=True)]
    return first or {}


def _calls(
    model: nn.Module,
    loss: LossFunction,
    batch: Any,
    leaves: Mapping[str, str],
    seed: int,
    functions: dict[str, Any],
) -> dict[str, list[RecordedCall]]:
    """functions: by name and closure, which later batches' are the same as."""
    paths = [path for path in leaves if not is_function(path)]
    found: dict[str, list[RecordedCall]] = {path: [] for path in paths}
    numbers, kept = Counter[str](), KeptTensors()

    def handle(
        path: str, module: nn.Module, method: str, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        before = python_states()
        try:
            trained = [each for each in module.parameters() if each.requires_grad]
            with seen_as_exported(False), at_step(0), own_memory(trained):
                if method == FUNCTION:
                    known = functions.setdefault(f"{run.name} {closed_over(run)}", run)
                    if known is not run:
                        raise CaptureError(
                            "each call of the loss defines it anew, so another rank cannot find it; define it at the top of its file"
                        )
                    kept.call((args, kwargs))
                returned, call = _record(model, module, method, run, args, kwargs)
        except CaptureError as error:
            raise OpaqueError(path, str(error)) from error
        if method == FUNCTION:
            kept.returned(path, returned)
            call = replace(call, call=replace(call.call, closed_over=closed_over(run)))
        elif leaves[path] != NAMED and python_states() != before:
            kind = type(module).__name__
            raise OpaqueError(
                path,
                f"it draws with random or numpy; name it, leaves=[{kind}], and each of its calls draws by itself",
            )
        name = function_name(path) if method == FUNCTION else path
        found.setdefault(path, []).append(replace(call, call=replace(call.call, number=numbers[name])))
        numbers[name] += 1
        return returned

    with restored(model), preserved_draws(), intercepted(model, paths, handle), seen_as_exported():
        seed_everything(seed)
        batch = cloned(batch)
        with answered_by_input(step_beside(list(leaves_of(batch).tensors.values()))):
            kept.check(loss(model, batch))
    return {path: calls for path, calls in found.items() if calls}


def _record(
    model: nn.Module,
    module: nn.Module,
    method: str,
    run: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, RecordedCall]:
    """What the call returned, and its record."""
    is_marked = method == FUNCTION
    spec, plain, inputs = split_arguments(args, kwargs, module.children() if is_marked else ())
    names, state = state_of(module)
    modes = tuple(each.training for each in module.modules())
    before = [each._version for each in (*inputs, *state)]  # pyright: ignore[reportPrivateUsage]
    # parameters may be given other data without a write that is counted
    trained = [number for number, each in enumerate(state) if each.requires_grad]
    values = [each.detach().clone() for each in state]
    places = [each.data_ptr() for each in state]
    attributes = _tensor_attributes(module)
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    meter, hooks, since = WorkMeter(), _num_hooks([*inputs, *state]), order_now()
    keeping = saved_tensors_hooks(pack, lambda each: each)
    with CountDraws() as counter, keeping, meter, branches_as_written():
        returned = run(*args, **kwargs)
    if _num_hooks([*inputs, *state]) != hooks:
        raise CaptureError(
            "it hooks the gradient of what it is given, or of a parameter, to which others may add"
        )
    if is_marked:
        check_arguments(model, returned, [*inputs, *state], meter.used, since)
    now = [each._version for each in (*inputs, *state)]  # pyright: ignore[reportPrivateUsage]
    replaced = {id(each) for each in state} - {id(each) for each in state_of(module)[1]}
    changed = [number for number, (was, each) in enumerate(zip(before, now, strict=True)) if was != each]
    if any(number < len(inputs) for number in changed):
        raise CaptureError(
            f"it writes to its input in place{'; write to a copy, x.clone()' if is_marked else ''}"
        )
    # batch normalization writes its running statistics without counting it as a write
    written = {number - len(inputs) for number in changed} | {
        number
        for number, (value, each, place) in enumerate(zip(values, state, places, strict=True))
        if id(each) in replaced or each.data_ptr() != place or not equal_bits(value, each)
    }
    if anew := [number for number in trained if id(state[number]) in replaced]:
        raise CaptureError(f"it puts another parameter in the place of {names[anew[0]][0]}")
    for number, value in enumerate(values):
        if value.shape != state[number].shape:
            raise CaptureError(
                f"it gives its buffer {names[number][0]} another shape, {list(state[number].shape)} in place of {list(value.shape)}"
            )
    if is_marked and written.intersection(trained):
        raise CaptureError("it writes to parameters in the forward that are trained")
    left = [
        (place, each)
        for place, each in _tensor_attributes(module).items()
        if attributes.get(place) is not each
    ]
    if left and is_marked:
        raise CaptureError(f"it keeps a tensor in the attribute {left[0][0][1]}; return it")
    made, leaf_places, recalled, structure = taken_apart(returned)
    results = [*made, *(each for _, each in left)]
    cost = replace(
        meter.cost(),
        **_backward(results, [*inputs, *(each for each in state)]),
        **kept_by_autograd(saved, inputs, state),
    )
    call = OpaqueCall(
        method=method,
        spec=spec,
        leaves=plain,
        state=names,
        modes=modes,
        written=tuple(sorted(written.difference(trained))),
        trained_writes=tuple(sorted(written.intersection(trained))),
        results=tuple(map(meta_of, results)),
        places=tuple(leaf_places),
        num_leaves=len(recalled),
        returned=plain_text_of(tree_leaves(returned)),
        attributes=tuple(place for place, _ in left),
        num_draws=counter.count,
        cost=cost,
    )
    layouts = tuple(replace(_input_meta(each), requires_grad=False) for each in inputs)
    return returned, RecordedCall(call=call, inputs=layouts, spec=structure, leaves=tuple(recalled))


def _num_hooks(tensors: Sequence[Tensor]) -> list[int]:
    return [len(each._backward_hooks or ()) for each in tensors]


def _input_meta(tensor: Tensor) -> Any:
    try:
        return meta_of(tensor)
    except CaptureError as error:
        raise CaptureError(str(error).replace("it returns", "it is given")) from error


def _check_number(path: str, calls: Sequence[RecordedCall], others: Sequence[RecordedCall]) -> None:
    if len(calls) != len(others):
        raise OpaqueError(
            path, f"it is called {len(calls)} times for one batch and {len(others)} times for another"
        )


def _merged(path: str, one: RecordedCall, other: RecordedCall) -> RecordedCall:
    """A call as it ran for two batches. What it leaves in attributes counts where both left it; how often it draws may
    differ."""
    mine, theirs = one.call, other.call
    made, others = (each.results[: len(each.places)] for each in (mine, theirs))
    if [each.shape for each in made] != [each.shape for each in others]:
        shapes = [[list(each.shape) for each in results] for results in (made, others)]
        raise OpaqueError(path, f"the shapes that it returns depend on values: {shapes[0]} and {shapes[1]}")
    left = {place: meta for place, meta in _left(mine).items() if _left(theirs).get(place) == meta}
    same = {"results": (*made, *left.values()), "attributes": tuple(left)}
    if (
        replace(mine, **same) != replace(theirs, cost=mine.cost, num_draws=mine.num_draws, results=(*others, *left.values()), attributes=tuple(left))
        or one.leaves != other.leaves
    ):  # fmt: skip
        raise OpaqueError(path, "what it is given or returns besides tensors depends on values")
    draws = mine.num_draws == theirs.num_draws and mine.draws_alike
    return replace(one, call=replace(mine, **same, draws_alike=draws))


def _left(call: OpaqueCall) -> dict[tuple[str, str], Meta]:
    return dict(zip(call.attributes, call.results[len(call.places) :], strict=True))


def _tensor_attributes(module: nn.Module) -> dict[tuple[str, str], Tensor]:
    """Plain attributes that are tensors, such as a loss that a module leaves for later."""
    return {
        (path, name): value
        for path, each in module.named_modules()
        for name, value in vars(each).items()
        if isinstance(value, Tensor)
    }


def _backward(results: Sequence[Tensor], operands: Sequence[Tensor]) -> dict[str, int]:
    """The cost of its backward, which runs once."""
    roots = [each for each in results if each.requires_grad]
    wanted = [each for each in operands if each.requires_grad]
    meter = WorkMeter()
    if roots and wanted:
        with suppress(Exception), meter:  # a user's backward may need what only the loss's own brings
            torch.autograd.grad(
                roots, wanted, [torch.ones_like(each) for each in roots], retain_graph=True, allow_unused=True
            )
    cost = meter.cost()
    return {
        "backward_flops": cost.flops,
        "backward_read_bytes": cost.read_bytes,
        "backward_written_bytes": cost.written_bytes,
    }


def kept_by_autograd(
    saved: Sequence[Tensor], inputs: Sequence[Tensor], state: Sequence[Tensor]
) -> Mapping[str, Any]:
    """What autograd keeps of a call that has saved these, as fields of `OpaqueCost`."""
    memory = {memory_of(each): storage_of(each).nbytes() for each in saved if is_plain(each)}
    of_inputs = {memory_of(each): number for number, each in enumerate(inputs)}
    kept_inputs = tuple(sorted(of_inputs[each] for each in memory.keys() & of_inputs.keys()))
    own = memory.keys() - of_inputs.keys() - {memory_of(each) for each in state}
    return {"saved_bytes": sum(memory[each] for each in own), "saved_inputs": kept_inputs}


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is dense, and no nested one."""
    return tensor.layout == torch.strided and not tensor.is_nested


class WorkMeter(TorchDispatchMode):
    """Adds up FLOPs and bytes. used: the memory of what operators were given."""

    def __init__(self) -> None:
        super().__init__()
        self.used: set[int] = set()
        self._flops = self._read = self._written = 0

    def cost(self) -> OpaqueCost:
        return OpaqueCost(flops=self._flops, read_bytes=self._read, written_bytes=self._written)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise CaptureError(f"it waits for other ranks, in {func.name()}; leave that out of it")
        self.used |= {memory_of(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        value = func(*args, **(kwargs or {}))
        if func.namespace != "prim" and all(
            is_plain(each) for each in tree_leaves((args, value)) if isinstance(each, Tensor)
        ):
            self._flops += flops(func, args, kwargs or {}, value)
            read, written = bytes_read_and_written(func, args, kwargs or {}, value)
            self._read, self._written = self._read + read, self._written + written
        return value
