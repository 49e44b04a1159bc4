"""Records how a model is built instead of filling its tensors.

Inside `record`, tensors are what they always are, with memory of their own that is never touched: operators
go to the tape and are not computed, so the system gives no pages for them. Views, ties, `.data`,
`nn.Parameter` and deep copies are real. Where the constructor asks for values (`.item()`, `if`, a mask as
index), these alone are computed from the tape, one tensor at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes  # pyright: ignore[reportPrivateUsage]
from torch.utils._pytree import tree_leaves, tree_map

from meshloom.core.modules.module_caches import no_tensors_kept
from meshloom.core.moments.uncompiled import uncompiled
from meshloom.parameters.construction.draw_marks import draws_made, set_mark
from meshloom.parameters.construction.exits import (
    Exits,
    tracing_refused,
    truncated_normal_whole,
    without_functions,
)
from meshloom.parameters.construction.operators import OperatorKind, kind_of
from meshloom.parameters.construction.replay import Replay
from meshloom.parameters.construction.storages import StorageNumbers
from meshloom.parameters.construction.tape import (
    NotRecordableError,
    Place,
    Tape,
    TapeOperator,
    constant_digest,
)


@dataclass(frozen=True, kw_only=True)
class RecordedTensors:
    """The tensors of a recorded model.

    places: by name, all names of tied ones. outside: storages of other tensors that are still referred to,
        such as plain attributes of modules, by number; they have memory. values_read: how often the
        construction asked for values; draws_read: for such that depend on draws.
    """

    tape: Tape
    replay: Replay
    places: Mapping[str, Place]
    outside: Mapping[int, torch.UntypedStorage]
    values_read: int
    draws_read: int


def record(build: Callable[[], nn.Module]) -> tuple[nn.Module, RecordedTensors]:
    """The model that `build` returns, whose parameters and buffers have storages of 0 bytes, and how to fill
    them.

    `random` and numpy are in the state after the construction; torch's default generator is after
    `RecordedTensors.replay.finish()`. Tensors that torch's operators did not make (from numpy) keep their
    memory. Raises `NotRecordableError`.
    """
    recording = ConstructionRecording()
    settings: Any = torch.utils.deterministic
    fills, settings.fill_uninitialized_memory = settings.fill_uninitialized_memory, False
    try:
        with (
            no_tensors_kept(),
            tracing_refused(),
            recording,
            Exits(recording),
            truncated_normal_whole(recording),
            uncompiled(),
        ):
            model = build()
    finally:
        settings.fill_uninitialized_memory = fills
    return model, recording.finish(model)


class ConstructionRecording(TorchDispatchMode):
    """Records all operators within its context."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, for seconds

    def __init__(self) -> None:
        super().__init__()
        self.tape = Tape(first=torch.get_rng_state().numpy().tobytes())
        self.replay = Replay(self.tape)
        self._values_read = self._draws_read = 0
        self._storages = StorageNumbers(self.tape)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        on_meta = _is_meta(kwargs.get("device"))
        if on_meta or (tensors and kwargs.get("device") is None and all(each.is_meta for each in tensors)):
            return func(*args, **kwargs)
        _check(func, tensors, kwargs.get("device"))
        kind = kind_of(func)
        if kind.changes_view:
            return self._change_view(func, kind, args, kwargs)
        if kind.is_view or kind.is_metadata:
            return func(*args, **kwargs)
        if kind.reads_values(args) or any(each.layout != torch.strided for each in tensors):
            return self._compute(func, kind, args, kwargs)
        return self._record(func, kind, args, kwargs)

    def finish(self, model: nn.Module) -> RecordedTensors:
        """The tensors of `model`; frees their memory."""
        self.tape.final = draws_made(len(self.tape.draws))
        named = [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
        places = {name: self._storages.place(each) for name, each in named if _is_strided(name, each)}
        for number, storage in self.tape.constants.items():
            if constant_digest(storage) != self.tape.digests[number]:
                raise NotRecordableError("it changes a tensor in ways that torch does not see")
        inside = {place.storage for place in places.values()}
        for number in inside - set(self.tape.constants):
            self._storages.storage(number).resize_(0)
        return RecordedTensors(
            tape=self.tape,
            replay=self.replay,
            places=places,
            outside=self._storages.outside(inside),
            values_read=self._values_read,
            draws_read=self._draws_read,
        )

    def has_values(self, tensor: Tensor) -> bool:
        """Whether its memory is filled: a tensor that no recorded operator made or changed."""
        number = self._storages.number(tensor.untyped_storage())
        return number is None or (number in self.tape.constants and not self.tape.is_written(number))

    def computed(self, tensor: Tensor) -> Tensor:
        """A tensor with the values that `tensor` has at this point of the construction."""
        if tensor.is_meta or tensor.layout != torch.strided or self.has_values(tensor):
            return tensor
        place = self._storages.place(tensor)
        self._values_read += 1
        self._draws_read += self.replay.first_draw(place.storage) >= 0
        return place.within(self.replay.values(place.storage))

    def truncated_normal(
        self, function: Callable[..., Tensor], tensor: Tensor, *bounds: float, generator: Any = None
    ) -> Tensor:
        """Records `trunc_normal_` as one operator: how often it draws depends on what it has drawn."""
        _check(function, [tensor], None)
        kind = OperatorKind(name="trunc_normal_", draws=True, overwrites=True, writes=(0,))
        return self._append(function, kind, (tensor, *bounds), {"generator": generator}, tensor)

    def _record(self, func: Any, kind: OperatorKind, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if kind.writes:
            if kind.may_resize and not _keeps_shape(func, args, kwargs):
                raise NotRecordableError(f"{func} changes the shape of its result")
            result = kind.result_of(func, args, kwargs, _by_shape)
        else:
            try:
                result = _by_shape(func, args, kwargs)
            except (RuntimeError, NotImplementedError):
                result = _NO_SHAPES
            if result is _NO_SHAPES:  # what has no shapes is computed, or raises as it does without us
                return self._compute(func, kind, args, kwargs)
            result = tree_map(_untouched, result)
        if kind.is_empty:
            for each in tree_leaves(result):
                self._storages.add(each.untyped_storage())
            return result
        return self._append(func, kind, args, kwargs, result)

    def _append(
        self, func: Any, kind: OperatorKind, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> Any:
        kwargs = {key: each for key, each in kwargs.items() if key != "pin_memory"}
        generator: Any = kwargs.pop("generator", None)
        default: Any = torch.default_generator
        own: Any = None if generator is default else generator
        state: bytes | None = None if own is None else own.get_state().numpy().tobytes()
        draws = kind.draws and own is None
        start = draws_made(len(self.tape.draws)) if draws else None
        changed = [each for each in kind.changed(args, kwargs) if not each.is_meta]
        replaced = {id(each) for each in changed} if kind.overwrites else set[int]()
        writes = [self._storages.place(each) for each in changed]
        reads = [
            self._storages.place(each).storage
            for each in tree_leaves((args, kwargs))
            if isinstance(each, Tensor) and not each.is_meta and id(each) not in replaced
        ]
        placed: Any = tree_map(self._placed, (tuple(args), kwargs))
        results = [self._placed_if_new(each) for each in tree_leaves(result)]
        new = [each.storage for each in results if each is not None]
        for each in writes:
            self.tape.keep_constant(each.storage)
        whole = [each.storage for each in writes if each.covers(self.tape.num_bytes[each.storage])]
        self.tape.append(
            TapeOperator(
                function=func,
                args=placed[0],
                kwargs=placed[1],
                results=tuple(results),
                reads=() if kind.by_shape else tuple(dict.fromkeys(reads)),
                writes=tuple(dict.fromkeys([*(each.storage for each in writes), *new])),
                overwrites=(*(whole if kind.overwrites else ()), *new),
                default_dtype=torch.get_default_dtype(),
                draw=len(self.tape.draws) if draws else None,
                start=start,
                generator=state,
            )
        )
        if own is not None:
            with _disable_current_modes(), without_functions():
                self.replay.advance(self.tape.operators[-1], own)
        elif draws:
            set_mark(len(self.tape.draws) - 1)
        return result

    def _placed(self, each: Any) -> Any:
        return self._storages.place(each) if isinstance(each, Tensor) and not each.is_meta else each

    def _placed_if_new(self, each: Any) -> Place | None:
        if not isinstance(each, Tensor) or self._storages.number(each.untyped_storage()) is not None:
            return None
        self._storages.add(each.untyped_storage())
        return self._storages.place(each)

    def _compute(self, func: Any, kind: OperatorKind, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The operator's result, computed from the values of its arguments."""
        changed = kind.changed(args, kwargs)
        if kind.draws or any(each.layout == torch.strided for each in changed):
            raise NotRecordableError(f"{func} is applied to tensors of a kind that is not recorded")
        known: tuple[Any, dict[str, Any]] = tree_map(
            lambda each: self.computed(each) if isinstance(each, Tensor) else each, (tuple(args), kwargs)
        )
        return func(*known[0], **known[1])

    def _change_view(self, func: Any, kind: OperatorKind, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Transposes in place, sets another storage, resizes: where no values move."""
        storage = args[0].untyped_storage()
        before, number = storage.nbytes(), self._storages.number(storage)
        if kind.resizes and before and number is not None:
            raise NotRecordableError(f"{func} changes the size of a tensor that has values")
        result = func(*args, **kwargs)
        if kind.resizes and number is not None:
            self.tape.num_bytes[number] = storage.nbytes()
        return result


def _is_strided(name: str, tensor: Tensor) -> bool:
    """Whether a parameter or buffer is one that the tape knows; others stay as they are."""
    if tensor.is_meta or tensor.layout != torch.strided:
        return False
    _check(name, [tensor], None)
    return True


def _check(func: Any, tensors: Sequence[Tensor], device: Any) -> None:
    """Raises `NotRecordableError` for tensors that are not the CPU's own."""
    if device is not None and torch.device(device).type != "cpu":
        raise NotRecordableError(f"{func} makes a tensor on {device}")
    for each in tensors:
        if each.device.type not in ("cpu", "meta"):
            raise NotRecordableError(f"{func} uses a tensor on {each.device}")
        if _dispatches(type(each)):
            raise NotRecordableError(f"{func} uses a {type(each).__name__}")


def _dispatches(kind: Any) -> bool:
    """Whether a class of tensors has operators of its own."""
    plain: Any = Tensor
    return kind.__torch_dispatch__ is not plain.__torch_dispatch__


def _is_meta(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"


_NO_SHAPES = object()


def _by_shape(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The results of an operator, on the meta device."""

    def shape_of(each: Any) -> Any:
        if isinstance(each, Tensor):
            return torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="meta")
        return None if isinstance(each, torch.Generator) else each

    placed, named = tree_map(shape_of, (tuple(args), dict(kwargs)))
    if kind_of(func).takes_device:
        named["device"] = torch.device("meta")
    named.pop("pin_memory", None)
    return func(*placed, **named)


def _keeps_shape(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    found = [each for each in tree_leaves(_by_shape(func, args, kwargs)) if isinstance(each, Tensor)]
    changed = kind_of(func).changed(args, kwargs)
    return [each.shape for each in found] == [each.shape for each in changed]


def _untouched(each: Any) -> Any:
    if not isinstance(each, Tensor):
        return each
    if each.layout != torch.strided:
        raise RuntimeError("not strided")
    return torch.empty_strided(each.shape, each.stride(), dtype=each.dtype)
