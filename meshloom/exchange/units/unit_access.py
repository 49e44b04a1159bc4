"""Where the user's code or a program uses parameters of units: gathers each unit before, and lets go of it
after.

    forward of the unit's module     a hook before it, a hook after it
    backward                         what autograd saves of a unit's values is where to find them, also of a cast of a
                                     parameter, as autocast makes it; the unit is gathered when the first of it is
                                     wanted back, and dropped after the last; so is a parameter that is saved while its
                                     values are not here, as an autograd function does that has not read it last
    anywhere else                    whatever torch function gets a parameter finds it gathered; it then stays
                                     until the chunk ends (a loss that reads weights, calls of parts of a unit)
    a transform of torch.func        finds all units gathered, which stay until the chunk ends
    a program                        whatever operator gets a parameter finds it gathered; it is dropped when an
                                     operator uses another unit, in forward and backward, and at the end of an action

A recomputation in backward (`torch.utils.checkpoint`) is a forward like any other; what it saves refers to the
values themselves, which stay as long as it does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from meshloom.core.errors import JobError, TrainingError
from meshloom.core.modules.casts import FrozenCasts, cast_of
from meshloom.core.moments.uncompiled import left_out
from meshloom.exchange.units.unit_casts import UnitCasts
from meshloom.exchange.units.unit_gathering import STEP, UnitGathering
from meshloom.exchange.units.unit_slices import Layout, Unit, UnitEntry
from meshloom.program.ir.parameter_writes import FIRST_LOOKS, LOOK_EVERY, untrained_write

_torch: Any = torch  # for private names


class UnitAccess:
    """Of the model's units on one rank. in_programs: they are used in programs, not in modules."""

    def __init__(self, gathering: UnitGathering, *, in_programs: bool = False) -> None:
        self._units, self._gathering, self._in_programs = gathering.units, gathering, in_programs
        self._in_use: list[Unit] = []  # by a program: those that do not stay
        self._computing = False
        # storage -> the unit and the part whose values it holds, as long as it lives
        self._here: dict[int, tuple[Unit, int, StorageWeakRef]] = {}
        # storage of what is in a parameter's place while its values are not here -> the unit, the part and the parameter
        self._absent = {
            entry.absent.untyped_storage()._cdata: (unit, number, entry)  # pyright: ignore[reportPrivateUsage]
            for unit in self._units
            for number, part in enumerate(unit.parts)
            for entry in part.entries
        }
        self._written: UnitEntry | None = None
        self._num_steps = 0
        trains_all = all(part.is_trainable for unit in self._units for part in unit.parts)
        self._first_looks = 0 if trains_all else FIRST_LOOKS
        self._looks = False  # in this pass: whether what is written is seen by values
        self._casts = UnitCasts()
        self._frozen = FrozenCasts()

    def connect(self) -> ExitStack:
        """Hooks on the units' modules, until the returned stack is closed."""
        undo = ExitStack()
        for unit in self._units if not self._in_programs else ():
            if unit.module is not None:
                before = unit.module.register_forward_pre_hook(self._before(unit), prepend=True)
                after = unit.module.register_forward_hook(self._after(unit), always_call=True)
                undo.callback(before.remove)
                undo.callback(after.remove)
        return undo

    @contextmanager
    def computing(self, kind: str, *, idle: bool = False) -> Iterator[None]:
        """Context of forwards and backwards; all ranks enter and leave it together. kind: of the pass, which
        is like others of its kind. idle: this rank will not compute."""
        self._gathering.begin_pass(kind)
        self._computing, self._written = True, None
        self._looks = kind == STEP and (
            self._num_steps < self._first_looks or self._num_steps % LOOK_EVERY == 0
        )
        self._num_steps += kind == STEP
        try:
            with (
                torch.autograd.graph.saved_tensors_hooks(left_out(self.pack), left_out(unpack)),
                _transforms(),
                self.watching(),
            ):
                for unit in self._units if not idle else ():
                    if unit.module is None:
                        unit.stays = True
                        self._need([unit])
                yield
            self.chunk_ended()
            self._gathering.end_pass()
        finally:
            self._computing = False
            self._in_use = []
            self._casts.clear()
            for unit in self._units:
                unit.stays, unit.num_running = False, 0
                self._drop(unit)
        if self._written is not None:
            if not self._written.parameter.requires_grad:
                raise untrained_write([self._written.name])
            raise JobError(
                f"{self._written.name} was changed in a forward or backward. With zero=3 its values are a copy that is let go of, so the change would be lost. "
                "Leave it to the optimizer, compute the changed value anew in forward, or use zero=2."
            )

    def gather_all(self) -> None:
        """All units are here until the chunk ends."""
        for unit in self._units:
            unit.stays = True
        self._need(self._units)

    def chunk_ended(self) -> None:
        """After a chunk's backward."""
        self._gathering.chunk_ended()
        self._casts.clear()
        for unit in self._units:
            if unit.module is not None:
                unit.stays = False
                self._drop(unit)

    def action_ended(self) -> None:
        """After an action of a pipeline on this rank, or in its place where only other replicas have it."""
        self._turn_to([])
        self._gathering.end_action()

    def meet(self) -> None:
        """Before a collective of the replicas within forward or backward."""
        self._gathering.meet()

    def _before(self, unit: Unit) -> Callable[[nn.Module, Any], None]:
        def before(module: nn.Module, inputs: Any) -> None:
            if not self._computing:
                raise TrainingError(
                    f"{unit.name} was called between steps. With zero=3 its parameters are gathered only in steps and evaluations. Use zero=2 to call it."
                )
            unit.num_running += 1
            self._need([unit])

        return before

    def _after(self, unit: Unit) -> Callable[[nn.Module, Any, Any], None]:
        def after(module: nn.Module, inputs: Any, output: Any) -> None:
            unit.num_running = max(unit.num_running - 1, 0)
            if not unit.num_running and not unit.stays:
                self._drop(unit)  # what is saved for backward is gathered again there

        return after

    def _need(self, units: Iterable[Unit]) -> None:
        missing = [unit for unit in units if unit.values is None]
        self._gathering.need(missing)
        for unit in missing:
            for number, values in enumerate(unit.values or ()):
                storage = values.untyped_storage()
                self._here[storage._cdata] = unit, number, StorageWeakRef(storage)  # pyright: ignore[reportPrivateUsage]
            self._casts.fill(unit)

    def _drop(self, unit: Unit) -> None:
        if unit.values is not None:
            self._casts.let_go(unit)
            self._here = {key: each for key, each in self._here.items() if not each[2].expired()}
        self._written = unit.empty(looks=self._looks) or self._written

    def _use(self, parameters: Iterable[Tensor]) -> None:
        """Some parameters are used."""
        units = [self._gathering.unit_of(each) for each in parameters]
        if self._in_programs:
            used = [unit for unit in units if unit is not None and not unit.stays]
            if used and used != self._in_use:
                self._turn_to(used)
            return
        missing = {unit.number: unit for unit in units if unit is not None and unit.values is None}
        for unit in missing.values():
            unit.stays = True
        if missing:
            self._need(missing.values())

    def _turn_to(self, units: Sequence[Unit]) -> None:
        """A program uses these units, besides those that stay, and no others until further notice."""
        for unit in self._in_use:
            if unit not in units:
                self._drop(unit)
        self._need(units)
        self._in_use = list(units)

    def pack(self, tensor: Tensor) -> Any:
        """What is kept of a tensor that autograd saves: of a unit's values where to find them, also of a parameter whose values are
        not here; else itself."""
        if tensor.layout != torch.strided:
            return tensor
        with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
            saved = self._place_of(tensor)  # for which no values are needed
        return tensor if saved is None else saved

    def _place_of(self, tensor: Tensor) -> _Saved | None:
        storage = tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
        layout = tensor.size(), tensor.stride(), int(tensor.storage_offset())
        if (found := self._here.get(storage)) is not None:
            return _Saved(self, found[0], found[1], layout, tensor.dtype)
        if (absent := self._absent.get(storage)) is not None:
            return _Saved(self, absent[0], absent[1], absent[2].layout, tensor.dtype)
        trained = cast_of(tensor)
        cast = self._gathering.place_of(self._frozen.cast_of(tensor) if trained is None else trained)
        if cast is None:
            return None
        unit, part, entry = cast
        number = unit.parts.index(part)
        if trained is not None:
            self._casts.used(unit, number, entry, tensor)
        return _Saved(self, unit, number, layout, tensor.dtype, slice(entry.start, entry.stop))

    def watching(self) -> AbstractContextManager[Any]:
        """Context in which operators find values in the parameters that they get. Backwards need one of their
        own, as torch suspends it while it calls them."""
        return _Uses(self._use, self._casts, self._frozen)

    def saved(self, unit: Unit) -> None:
        """One more tensor is saved for backward."""
        unit.num_saved += 1

    def wanted_back(self, unit: Unit, part: int) -> Tensor:
        """The unit's values, for a tensor that was saved."""
        if self._in_programs and not unit.stays:
            self._turn_to([unit])
        else:
            self._need([unit])
        assert unit.values is not None
        return unit.values[part]

    def forgotten(self, unit: Unit) -> None:
        """One saved tensor is not needed any more."""
        unit.num_saved -= 1
        if not unit.is_needed and not self._in_programs:
            self._drop(unit)


class _Saved:
    """A tensor that autograd has saved, as a place in its unit's values. cast: of a cast of a parameter, which elements this has."""

    def __init__(
        self, access: UnitAccess, unit: Unit, part: int, layout: Layout, dtype: torch.dtype, cast: slice | None = None
    ) -> None:  # fmt: skip
        self._access, self._unit, self._part, self._cast = access, unit, part, cast
        self._layout, self._dtype = layout, dtype
        access.saved(unit)

    def __del__(self) -> None:
        self._access.forgotten(self._unit)

    def tensor(self) -> Tensor:
        """The tensor that was saved."""
        values = self._access.wanted_back(self._unit, self._part)
        if self._cast is not None:
            flat = values[self._cast].to(self._dtype, copy=True)
        else:
            flat = values if values.dtype == self._dtype else values.view(self._dtype)
        return flat.as_strided(*self._layout)


def unpack(saved: Any) -> Tensor:
    """The tensor of what `UnitAccess.pack` has returned."""
    return saved.tensor() if isinstance(saved, _Saved) else saved


class _WithoutHooks:
    """What disables hooks on saved tensors for a transform of `torch.func`, which refuses to take gradients under them:
    hooks of units are taken off for so long, and what is saved are the values themselves, which stay.

    real: torch's, in whose place it is. num_open: contexts in which it is; those of simulated ranks do not end in the order of their
    beginning.
    """

    def __init__(self, real: Callable[..., Any]) -> None:
        self.real, self.num_open = real, 0

    @contextmanager
    def __call__(self, message: str) -> Iterator[None]:
        top = _torch._C._autograd._top_saved_tensors_default_hooks(True)
        access = getattr(inspect.unwrap(top[0]), "__self__", None) if top else None
        if not isinstance(access, UnitAccess):  # inside another transform, or under hooks of the user's
            with self.real(message):
                yield
            return
        access.gather_all()
        _torch._C._autograd._pop_saved_tensors_default_hooks()
        try:
            with self.real(message):
                yield
        finally:
            _torch._C._autograd._push_saved_tensors_default_hooks(*top)


@contextmanager
def _transforms() -> Iterator[None]:
    """Context in which `torch.func` can take gradients."""
    graph, name = torch.autograd.graph, "disable_saved_tensors_hooks"
    if not isinstance(getattr(graph, name), _WithoutHooks):
        setattr(graph, name, _WithoutHooks(getattr(graph, name)))
    installed: _WithoutHooks = getattr(graph, name)
    installed.num_open += 1
    try:
        yield
    finally:
        installed.num_open -= 1
        if not installed.num_open:
            setattr(graph, name, installed.real)


class _Uses(TorchFunctionMode):
    """Tells `use` of parameters that torch functions get, `casts` of what they make of them, and `frozen` of what they are given."""

    def __init__(self, use: Callable[[list[Tensor]], None], casts: UnitCasts, frozen: FrozenCasts) -> None:
        super().__init__()
        self._use, self._casts, self._frozen = use, casts, frozen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _READ_NO_VALUES:
            given = (*args, *kwargs.values())
            found = list(_parameters(given))
            if found:
                self._use(found)
                with self._frozen.running(func, given):
                    made = func(*args, **kwargs)
                if (
                    not torch.compiler.is_compiling()
                ):  # what is made within compiled code does not leave it as a cast
                    self._casts.made_by_user(made)
                return made
        return func(*args, **kwargs)


def _parameters(values: Iterable[Any]) -> Iterator[Tensor]:
    for each in values:
        if isinstance(each, nn.Parameter):
            yield each
        elif type(each) in (list, tuple):
            yield from _parameters(each)
        elif type(each) is dict:
            yield from _parameters(each.values())


# What torch functions get of a parameter without reading its values.
_PROPERTIES = (
    "shape dtype device layout requires_grad is_leaf grad grad_fn ndim itemsize nbytes is_cuda is_cpu is_sparse "
    "is_meta is_quantized is_nested is_mkldnn _backward_hooks _post_accumulate_grad_hooks _version"
)
_METHODS = (
    "size dim ndimension numel nelement element_size stride is_floating_point is_complex is_contiguous is_same_size "
    "get_device requires_grad_ register_hook __hash__ __len__ backward"
)
_FUNCTIONS = "numel is_floating_point is_complex zeros_like ones_like empty_like full_like"
_READ_NO_VALUES = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in _PROPERTIES.split()),
        *(getattr(Tensor, name) for name in _METHODS.split()),
        *(getattr(torch, name) for name in _FUNCTIONS.split()),
        torch.autograd.grad,
        Tensor.grad.__set__,  # type: ignore[attr-defined]
        Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
    }
)
