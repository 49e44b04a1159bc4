"""Records a loss function's own code as it runs in eager, and gives a loss function that an export can read in its place:
operators for the code, calls of the model's modules between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_leaves

from meshloom.core.errors import CaptureError
from meshloom.core.job import LossFunction
from meshloom.core.moments.branches import branches_as_written
from meshloom.core.random import derive, preserved_draws, seed_everything
from meshloom.program.capture.opaque_runs import is_plain
from meshloom.program.capture.restored import restored
from meshloom.program.cost.cost_rules import bytes_read_and_written, flops
from meshloom.program.ir.batch_values import ReadError
from meshloom.program.ir.leaves import Leaves
from meshloom.program.ir.nodes import submodule
from meshloom.program.ir.written_parameters import named_buffers
from meshloom.program.opaque.call import (
    OpaqueCall,
    OpaqueCost,
    meta_of,
    plain_text_of,
    split_arguments,
    state_of,
)
from meshloom.program.opaque.loss_code import LOSS, METHOD, WHOLE, PlayedCall, numbers_as_tensors, paths_of
from meshloom.program.opaque.stand_ins import OpaqueError, intercepted, operated, put_together, taken_apart
from meshloom.program.trace.frozen import equal_bits


@dataclass(frozen=True, kw_only=True)
class LossSegment:
    """The code up to a call of a module, or to its end. call: its operator; None: it makes no tensor. spec, leaves: of
    the call's arguments, or of the result: plain leaves, ("made", index) or ("given", operand). path: of the module;
    None at the end."""

    call: OpaqueCall | None
    spec: TreeSpec
    leaves: tuple[Any, ...]
    path: str | None


@dataclass
class _Event:
    path: str
    given: Any
    returned: Any
    versions: list[int] = field(default_factory=list[int])


def loss_to_read(model: nn.Module, loss: LossFunction, batches: Sequence[Leaves], kind: str) -> LossFunction:
    """A function like `loss` for batches like these, of operators and calls of modules; kind: `LOSS` or `WHOLE`.

    Raises `OpaqueError` where the code is no operator.
    """
    segments: list[LossSegment] | None = None
    for number, leaves in enumerate(batches):
        try:
            found = _recorded(model, loss, leaves, kind, derive("capture", number))
        except CaptureError as error:
            raise OpaqueError(kind, str(error)) from error
        except ReadError:
            raise
        except Exception as error:  # the user's own; the error of the attempt before says where
            raise OpaqueError(kind, f"it fails with {type(error).__name__}: {error}") from error
        if segments is not None and not _are_alike(segments, found):
            raise OpaqueError(kind, "what it calls, returns or draws depends on values")
        segments = segments or found
    assert segments is not None
    known = segments

    def read(model: Any, batch: Any) -> Any:
        operands = split_arguments((batch,), {})[2]
        for segment in known:
            made = _operated(segment.call, operands, model) if segment.call else []
            arguments = put_together(segment.leaves, segment.spec, made, operands)
            if segment.path is None:
                return arguments
            args, kwargs = arguments
            returned = submodule(model, segment.path)(*args, **kwargs)
            operands += [each for each in tree_leaves(returned) if isinstance(each, Tensor)]
        raise AssertionError

    return read


def _operated(call: OpaqueCall, operands: Sequence[Tensor], model: nn.Module) -> list[Tensor]:
    by_name = dict([*model.named_parameters(), *model.named_buffers()])
    state = [by_name[names[0]] for names in call.state]
    return operated(call, operands, state, WHOLE if WHOLE in call.modules else LOSS)


def _recorded(
    model: nn.Module, loss: LossFunction, leaves: Leaves, kind: str, seed: int
) -> list[LossSegment]:
    whole = kind == WHOLE
    watch = _Watch(model)
    events: list[_Event] = []

    def handle(
        path: str, module: nn.Module, method: str, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        with watch.paused():
            own_writes.note()
            returned = run(*args, **kwargs)
            own_writes.begin()
        events.append(_Event(path, (args, kwargs), returned, _versions(returned)))
        return returned

    with restored(model), preserved_draws():
        seed_everything(seed)
        batch = leaves.rebuild([each.detach().clone() for each in leaves.tensors.values()])
        spec, plain, operands = split_arguments((batch,), {})
        versions = _versions(operands)
        buffers = list(named_buffers(model) if whole else model.named_buffers())
        values = [each.detach().clone() for _, each in buffers]
        own_writes, (names, tensors) = _OwnWrites(model), state_of(model)
        as_buffers = {id(each) for _, each in buffers}
        parameters = [
            (name, each, each.detach().clone())
            for name, each in model.named_parameters()
            if id(each) not in as_buffers
        ]
        with intercepted(model, () if whole else paths_of(model), handle), watch, branches_as_written():
            returned = numbers_as_tensors(loss(model, batch), operands)
        own_writes.note()
        now = dict(named_buffers(model) if whole else model.named_buffers())
        for (name, _), value in zip(buffers, values, strict=True):
            if name not in now:
                raise CaptureError(f"it removes the buffer {name}")
            if now[name].shape != value.shape:
                raise CaptureError(
                    f"the buffer {name} gets another shape, {list(now[name].shape)} in place of {list(value.shape)}"
                )
        changed = {
            id(each)
            for (name, each), value in zip(buffers, values, strict=True)
            if not equal_bits(now[name], value)
        }
        for name, each in model.named_parameters():
            if each.grad is not None:
                raise CaptureError(f"it adds to the gradient of {name} itself")
        for name, each, value in parameters:
            if not equal_bits(each.detach(), value):
                raise CaptureError(f"it writes to the parameter {name}")
    if versions != _versions(operands) or any(each.versions != _versions(each.returned) for each in events):
        raise CaptureError("it writes in place to the batch or to what a module returned")
    if own_writes.names and not whole:
        raise CaptureError(f"it writes to the buffer {min(own_writes.names)}")
    if watch.num_draws and not whole:
        raise CaptureError("it draws random numbers besides what its modules draw")
    used = [number for number, each in enumerate(tensors) if id(each) in watch.used]
    state = [tensors[number] for number in used]
    written = tuple(number for number, each in enumerate(state) if id(each) in changed) if whole else ()
    common: Any = {
        "method": METHOD, "spec": spec, "leaves": plain, "state": tuple(names[number] for number in used), "modes": (),
        "attributes": (), "modules": (WHOLE,) if whole else tuple(dict.fromkeys(each.path for each in events)),
    }  # fmt: skip
    segments: list[LossSegment] = []
    played: list[PlayedCall] = []
    for event in [*events, None]:
        value = returned if event is None else event.given
        made, places, recalled, structure = taken_apart(value, operands)
        call = OpaqueCall(
            **common,
            written=written,
            results=tuple(map(meta_of, made)),
            places=tuple(places),
            num_leaves=len(recalled),
            returned=plain_text_of(tree_leaves(value)),
            num_draws=watch.num_draws,
            cost=watch.cost() if event is None else OpaqueCost(),
            played=tuple(each.text() for each in played),
        )
        path = None if event is None else event.path
        segments.append(
            LossSegment(call=call if made else None, spec=structure, leaves=tuple(recalled), path=path)
        )
        if event is not None:
            new = [each for each in tree_leaves(event.returned) if isinstance(each, Tensor)]
            for each in new:
                meta_of(each)  # dense, or refused
            numbers = {id(each): len(operands) + number for number, each in enumerate(new)}
            played.append(
                PlayedCall.of(event.path, event.returned, lambda each, numbers=numbers: numbers[id(each)])
            )
            operands = [*operands, *new]
    return segments


def _are_alike(one: Sequence[LossSegment], other: Sequence[LossSegment]) -> bool:
    def facts(segment: LossSegment) -> Any:
        call = replace(segment.call, cost=OpaqueCost()) if segment.call else None
        return call, segment.spec, segment.leaves, segment.path

    return len(one) == len(other) and all(facts(a) == facts(b) for a, b in zip(one, other, strict=True))


def _versions(tree: Any) -> list[int]:
    return [each._version for each in tree_leaves(tree) if isinstance(each, Tensor)]  # pyright: ignore[reportPrivateUsage]


class _OwnWrites:
    """The buffers that change outside of the modules that are read, in place or by others in their places."""

    def __init__(self, model: nn.Module) -> None:
        self.names: set[str] = set()
        self._model = model
        self.begin()

    def begin(self) -> None:
        """The loss's own code runs from here on."""
        self._before = {name: each.detach().clone() for name, each in self._model.named_buffers()}

    def note(self) -> None:
        """It has run to here."""
        now = dict(self._model.named_buffers())
        self.names |= {
            name
            for name, each in self._before.items()
            if name not in now or now[name].shape != each.shape or not equal_bits(now[name], each)
        }


class _Watch(TorchDispatchMode):
    """What code uses of a model, draws and costs, outside of pauses. used: identities of parameters and buffers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.used: set[int] = set()
        self.num_draws = 0
        self._state = {id(each) for each in (*model.parameters(), *model.buffers())}
        self._is_on = True
        self._flops = self._read = self._written = 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context of which nothing is recorded."""
        self._is_on = False
        try:
            yield
        finally:
            self._is_on = True

    def cost(self) -> OpaqueCost:
        """Its backward counts twice its forward."""
        return OpaqueCost(
            flops=self._flops, read_bytes=self._read, written_bytes=self._written, backward_flops=2 * self._flops,
            backward_read_bytes=self._read, backward_written_bytes=self._written, saved_bytes=self._written,
        )  # fmt: skip

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        value = func(*args, **(kwargs or {}))
        if self._is_on:
            tensors = [each for each in tree_leaves((args, kwargs, value)) if isinstance(each, Tensor)]
            self.used |= {id(each) for each in tensors} & self._state
            self.num_draws += torch.Tag.nondeterministic_seeded in func.tags
            if func.namespace != "prim" and all(is_plain(each) for each in tensors):
                self._flops += flops(func, args, kwargs or {}, value)
                read, written = bytes_read_and_written(func, args, kwargs or {}, value)
                self._read, self._written = self._read + read, self._written + written
        return value
