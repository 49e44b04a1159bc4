"""Records a loss function's own code as it runs in eager, and gives a loss function that an export can read in its place:
operators for the code, calls of the model's modules between them.

Each operator runs the code from its start to the next call. So code of modules is part of it only where that is little of the
work, where it sets nothing, and where no value decides what it calls (`steady_calls.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_leaves

from meshloom.core.errors import CaptureError
from meshloom.core.job import LossFunction
from meshloom.core.moments.branches import branches_as_written
from meshloom.core.random import derive, preserved_draws, seed_everything
from meshloom.program.capture.opaque_runs import is_plain
from meshloom.program.capture.restored import restored
from meshloom.program.capture.steady_calls import check_calls_are_steady
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
from meshloom.program.opaque.changed_gradients import ChangedGradients
from meshloom.program.opaque.loss_code import (
    METHOD,
    WHOLE,
    PlayedCall,
    modules_called,
    modules_entered,
    numbers_as_tensors,
)
from meshloom.program.opaque.stand_ins import OpaqueError, intercepted, operated, put_together, taken_apart
from meshloom.program.trace.attributes import TORCHS_OWN, plain_text
from meshloom.program.trace.frozen import equal_bits


@dataclass(frozen=True, kw_only=True)
class LossSegment:
    """The code up to a call of a module, or to its end. call: its operator; None: it makes no tensor. spec, leaves: of
    the call's arguments, or of the result: plain leaves, ("made", index) or ("given", operand). path: of the module;
    None at the end. grad: whether autograd records the module's call."""

    call: OpaqueCall | None
    spec: TreeSpec
    leaves: tuple[Any, ...]
    path: str | None
    grad: bool


@dataclass(frozen=True, kw_only=True)
class _Event:
    """A call of a module; `path` is None at the end. cost: of the code up to it. looked: whether it has looked at values by then, so that it
    may give another tensor where it gave one that it had got, or has hooked a gradient."""

    path: str | None
    given: Any
    returned: Any
    versions: Sequence[int]
    cost: OpaqueCost
    looked: bool
    grad: bool = True


def loss_to_read(model: nn.Module, loss: LossFunction, batches: Sequence[Leaves], kind: str) -> LossFunction:
    """A function like `loss` for batches like these, of operators and calls of modules; kind: `LOSS`, `WHOLE` or `own_code_of` a module.

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
            made = _operated(segment.call, operands, model, kind) if segment.call else []
            arguments = put_together(segment.leaves, segment.spec, made, operands)
            if segment.path is None:
                return arguments
            args, kwargs = arguments
            with nullcontext() if segment.grad else torch.no_grad():
                returned = submodule(model, segment.path)(*args, **kwargs)
            operands += [each for each in tree_leaves(returned) if isinstance(each, Tensor)]
        raise AssertionError

    return read


def _operated(call: OpaqueCall, operands: Sequence[Tensor], model: nn.Module, kind: str) -> list[Tensor]:
    by_name = dict([*model.named_parameters(), *model.named_buffers()])
    state = [by_name[names[0]] for names in call.state]
    return operated(call, operands, state, kind)


def _recorded(
    model: nn.Module, loss: LossFunction, leaves: Leaves, kind: str, seed: int
) -> list[LossSegment]:
    whole = kind == WHOLE
    watch, asked, changes = _Watch(model), _AskedForAll(), ChangedGradients()
    events: list[_Event] = []

    def has_looked() -> bool:
        return watch.has_looked or asked.has_asked or changes.has_hooked

    def handle(
        path: str, module: nn.Module, method: str, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        cost, looked, grad = watch.cost(), has_looked(), torch.is_grad_enabled()
        with watch.paused():
            own_writes.note()
            with changes.calling():
                returned = run(*args, **kwargs)
            own_writes.begin()
        events.append(
            _Event(
                path=path, given=(args, kwargs), returned=returned, versions=_versions(returned), cost=cost, looked=looked, grad=grad
            )
        )  # fmt: skip
        return returned

    with restored(model), preserved_draws():
        seed_everything(seed)
        batch = leaves.rebuild([each.detach().clone() for each in leaves.tensors.values()])
        spec, plain, operands = split_arguments((batch,), {})
        versions = _versions(operands)
        buffers = list(named_buffers(model) if whole else model.named_buffers())
        values = [each.detach().clone() for _, each in buffers]
        own_writes, (names, tensors) = _OwnWrites(model, sets=bool(modules_entered(kind))), state_of(model)
        as_buffers = {id(each) for _, each in buffers}
        parameters = [
            (name, each, each.detach().clone())
            for name, each in model.named_parameters()
            if id(each) not in as_buffers
        ]
        with (
            intercepted(model, modules_called(model, kind), handle),
            watch,
            branches_as_written(),
            asked,
            changes.watched(),
        ):
            with watch.paused():
                own_writes.begin()  # calls are intercepted now
            returned = numbers_as_tensors(loss(model, batch), operands)
            with watch.paused():
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
    if own_writes.attributes:
        raise CaptureError(f"it sets the attribute {min(own_writes.attributes)}")
    if watch.num_draws and not whole:
        raise CaptureError("it draws random numbers besides what its modules draw")
    used = [number for number, each in enumerate(tensors) if id(each) in watch.used]
    end = _Event(
        path=None, given=returned, returned=None, versions=(), cost=watch.cost(), looked=has_looked()
    )
    changes.check([(each.given, each.returned) for each in [*events, end]])
    if modules_entered(kind):
        _check_little(model, [tensors[number] for number in used], [*events, end], watch.flops_of_calls)
        made = [(each.path, each.given, each.returned) for each in [*events, end]]
        check_calls_are_steady(model, loss, leaves, modules_called(model, kind), made)
    state = [tensors[number] for number in used]
    written = tuple(number for number, each in enumerate(state) if id(each) in changed) if whole else ()
    common: Any = {
        "method": METHOD, "spec": spec, "leaves": plain, "state": tuple(names[number] for number in used), "modes": (),
        "attributes": (), "modules": (WHOLE,) if whole else tuple(dict.fromkeys(str(each.path) for each in events)),
    }  # fmt: skip
    segments: list[LossSegment] = []
    played: list[PlayedCall] = []
    for event in [*events, end]:
        made, places, recalled, structure = taken_apart(event.given, () if event.looked else operands)
        call = OpaqueCall(
            **common,
            written=written,
            results=tuple(map(meta_of, made)),
            places=tuple(places),
            num_leaves=len(recalled),
            returned=plain_text_of(tree_leaves(event.given)),
            num_draws=watch.num_draws,
            cost=event.cost,
            played=tuple(each.text() for each in played),
        )
        segments.append(
            LossSegment(
                call=call if made else None, spec=structure, leaves=tuple(recalled), path=event.path, grad=event.grad
            )
        )  # fmt: skip
        if event.path is not None:
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
        return call, segment.spec, segment.leaves, segment.path, segment.grad

    return len(one) == len(other) and all(facts(a) == facts(b) for a, b in zip(one, other, strict=True))


def _versions(tree: Any) -> list[int]:
    return [each._version for each in tree_leaves(tree) if isinstance(each, Tensor)]  # pyright: ignore[reportPrivateUsage]


MOST_CALLED = 128  # calls of modules between which code may run, from its start to each of them


def _check_little(
    model: nn.Module, own: Sequence[Tensor], events: Sequence[_Event], flops_of_calls: int
) -> None:
    """Raise `CaptureError` where too much would stay undivided, or run several times. own: parameters and buffers that code uses
    itself."""
    if len(events) == 1:
        raise CaptureError("it calls no module that is read")
    if len(events) > MOST_CALLED:
        raise CaptureError(f"it calls modules {len(events) - 1} times, and runs from its start to each call")
    again, size = sum(each.cost.flops for each in events), sum(each.numel() for each in model.parameters())
    if again > flops_of_calls:
        raise CaptureError(
            f"it runs from its start to each of its {len(events) - 1} calls, which takes more than what it calls"
        )
    if 2 * sum(each.numel() for each in own if isinstance(each, nn.Parameter)) > size:
        raise CaptureError("it uses most of the parameters itself")


class _OwnWrites:
    """The buffers and attributes that change outside of the modules that are read, in place or by others in their places.
    sets: whether attributes are looked at."""

    def __init__(self, model: nn.Module, *, sets: bool) -> None:
        self.names: set[str] = set()
        self.attributes: set[str] = set()
        self._model, self._sets = model, sets
        self.begin()

    def begin(self) -> None:
        """The loss's own code runs from here on."""
        self._before = {name: each.detach().clone() for name, each in self._model.named_buffers()}
        self._attributes = _attributes(self._model) if self._sets else {}

    def note(self) -> None:
        """It has run to here."""
        now = dict(self._model.named_buffers())
        self.names |= {
            name
            for name, each in self._before.items()
            if name not in now or now[name].shape != each.shape or not equal_bits(now[name], each)
        }
        attributes = _attributes(self._model) if self._sets else {}
        changed = attributes.items() ^ self._attributes.items()
        self.attributes |= {f"{path}.{name}" if path else name for (path, name), _ in changed}


def _attributes(model: nn.Module) -> dict[tuple[str, str], Any]:
    """(module, attribute) -> something that is equal while nothing in it changes."""
    return {
        (path, name): plain_text(value) or (id(value), _tensors(value))
        for path, module in model.named_modules()
        for name, value in list(vars(module).items())
        if name not in TORCHS_OWN
    }


def _tensors(value: Any) -> tuple[Any, ...]:
    found = value if isinstance(value, Tensor | list | tuple | dict) else ()
    return tuple(
        (id(each), _versions(each)[0]) if isinstance(each, Tensor) else id(each)
        for each in tree_leaves(found)
    )


_LOOKS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class _AskedForAll(TorchFunctionMode):
    """Whether code has asked a tensor for all of its values, for which no operator is called."""

    has_asked = False

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.has_asked |= getattr(func, "__name__", "") in ("numpy", "tolist")
        return func(*args, **(kwargs or {}))


class _Watch(TorchDispatchMode):
    """What code uses of a model, draws and costs, outside of pauses. used: identities of parameters and buffers.
    flops_of_calls: those in the pauses. has_looked: whether it has run what takes a value out of a tensor, or makes a shape of values."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.used: set[int] = set()
        self.num_draws = 0
        self.has_looked = False
        self._state = {id(each) for each in (*model.parameters(), *model.buffers())}
        self._is_on = True
        self._flops = self._read = self._written = self.flops_of_calls = 0

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
        tensors = [each for each in tree_leaves((args, kwargs, value)) if isinstance(each, Tensor)]
        is_counted = func.namespace != "prim" and all(is_plain(each) for each in tensors)
        work = flops(func, args, kwargs or {}, value) if is_counted else 0
        if not self._is_on:
            self.flops_of_calls += work
            return value
        self.used |= {id(each) for each in tensors} & self._state
        self.num_draws += torch.Tag.nondeterministic_seeded in func.tags
        self.has_looked |= not _LOOKS.isdisjoint(func.tags)
        if is_counted:
            self._flops += work
            read, written = bytes_read_and_written(func, args, kwargs or {}, value)
            self._read, self._written = self._read + read, self._written + written
        return value
