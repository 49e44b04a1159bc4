"""What a forward leaves on its modules besides results, such as `self.stride = x.shape[-1] // 2`: its program leaves nothing there. Plain values that
follow from shapes are put there after each call; in place of all else is a `LeftBehind`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from meshloom.core.errors import CODE_ERRORS, CaptureError
from meshloom.core.modules.named_leaves import is_within
from meshloom.loops.captured_forward import CapturedForward
from meshloom.loops.copied_module import copied
from meshloom.loops.earlier_calls import check_earlier_calls
from meshloom.loops.left_behind import LeftBehind
from meshloom.loops.places import Place, attributes, get_at, set_at, where
from meshloom.pipeline.stages.program_store import MOST_KEPT
from meshloom.program.capture.guarded_values import MISSING, SEQUENCES, At, is_plain_value
from meshloom.program.capture.shapes import fake_of
from meshloom.program.ir.batch_values import specialized_to, stand_ins
from meshloom.program.ir.leaves import copy_of, leaves_of
from meshloom.program.store.fifo_cache import FifoCache
from meshloom.program.trace.on_cpu import fake_mode


class Left(NamedTuple):
    """By calls of one forward. found: all that they leave, plain values (value,) and others (). values: those that follow from shapes, and that the
    forward sets before it reads them."""

    found: Mapping[Place, tuple[Any, ...]]
    values: Mapping[Place, Any]


class LeftValues:
    """On `module`, by all of its forwards. known: what was found so far, as in `Left`. of_calls: what is no plain value, of copies on the rank
    that looks."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.known: dict[Place, tuple[Any, ...]] = {}
        self.of_calls: dict[Place, Any] = {}
        self._of_calls: dict[Any, Left] = FifoCache(MOST_KEPT)
        self._instead: dict[Place, LeftBehind] = {}
        self._put: dict[Place, Any] = {}

    def has(self, key: Any) -> bool:
        """Whether it was found what calls of this key leave."""
        return key in self._of_calls

    def add(self, key: Any, left: Left) -> None:
        """What calls of this key leave."""
        new = left.found.keys() - self.known.keys()
        if new:  # others may set them, too, to what they were
            self._of_calls.clear()
        for place in new:
            self._instead[place] = LeftBehind(where(self._module, place), get_at(self._module, place))
        self.known.update(left.found)
        self._of_calls[key] = left
        self.put(key)

    def put(self, key: Any) -> None:
        """After a call."""
        left = self._of_calls[key]
        for place in left.found:
            is_value = place in left.values
            self._put[place] = copy.deepcopy(left.values[place]) if is_value else self._instead[place]
            set_at(self._module, place, self._put[place])

    def script_has_set(self) -> bool:
        """Whether the script has set, since a call, what a forward may read. Forwards find it from now on."""
        places = [place for place, put in self._put.items() if get_at(self._module, place) is not put]
        taken = [self._put.pop(place) for place in places]
        for place in places:
            del self.known[place]
            self._of_calls.clear()
        return any(isinstance(each, LeftBehind) for each in taken)

    def sets(self, key: Any, at: At) -> bool:
        """Whether calls of this key set it before they read it."""
        values = self._of_calls[key].values
        return any(at.owner is self._module.get_submodule(path) and at.key == name for path, name in values)

    def take_back(self, module: nn.Module) -> nn.Module:
        """Makes a copy of the module what forwards find."""
        for place in self._put:
            set_at(module, place, _copy(self._instead[place].before))
        return module

    @contextmanager
    def as_written(self) -> Iterator[None]:
        """A context in which the module's own forwards run."""
        self.take_back(self._module)
        found = {place: get_at(self._module, place) for place in self._put}
        try:
            yield
        finally:
            for place, put in self._put.items():
                if get_at(self._module, place) is found[place]:
                    set_at(self._module, place, put)


class _GoesByItError(CaptureError):
    pass


def left_by(
    model: nn.Module, forward: CapturedForward, batch: Any, others: Mapping[str, str | None], left: LeftValues, leaves: Collection[str]
) -> Left:  # fmt: skip
    """What a forward leaves. model: stays as it is. others: how its program treats what is no tensor in the batch. left: what forwards
    have left before. leaves: paths of modules whose own code runs, and leaves what it leaves.

    Raises `CaptureError` where it goes by what another call has left.
    """
    found = _left_by(model, forward, batch, others, left.known)
    found = found._replace(
        found={
            place: each
            for place, each in found.found.items()
            if not any(is_within(place[0], path) for path in leaves)
        }
    )
    if places := [place for place, each in found.found.items() if not each]:
        check_earlier_calls(model, forward, batch, places, left.of_calls)
    return found


def _left_by(
    model: nn.Module,
    forward: CapturedForward,
    batch: Any,
    others: Mapping[str, str | None],
    known: Mapping[Place, tuple[Any, ...]],
) -> Left:
    leaves, mode = leaves_of(batch), fake_mode(static_shapes=True, allow_non_fake_inputs=True)
    fakes = {id(each): fake_of(each, mode) for each in (*model.parameters(), *model.buffers())}
    unread = {name: object() for name in others if name not in specialized_to(others)}
    inputs = {
        name: fake_of(each.detach(), mode).requires_grad_(each.requires_grad)
        for name, each in leaves.tensors.items()
    }

    def without_values(found: nn.Module) -> None:
        with mode:
            forward(found, leaves.rebuild(list(inputs.values()), {**unread, **stand_ins(others, leaves)}))

    try:
        return _left(lambda: copied(model, dict(fakes)), without_values, known)
    except _GoesByItError:
        raise
    except CODE_ERRORS:  # it goes by values
        inputs = {name: copy_of(each) for name, each in leaves.tensors.items()}
    found = _left(
        lambda: copied(model, {}), lambda found: forward(found, leaves.rebuild(list(inputs.values()))), known
    )
    return found._replace(values={})


def _left(
    make: Callable[[], nn.Module],
    run: Callable[[nn.Module], None],
    known: Mapping[Place, tuple[Any, ...]],
) -> Left:
    model = make()
    before = dict(attributes(model))
    states = {place: _state(each) for place, each in before.items()}
    run(model)
    after = dict(attributes(model))
    changed = [
        place for place in {**before, **after} if states.get(place) != _state(after.get(place, MISSING))
    ]
    found = {place: _plain(after.get(place, MISSING), before.get(place, MISSING)) for place in changed}
    values, read = _set_first(make, run, [place for place, each in {**known, **found}.items() if each])
    found = {**{place: (each,) for place, each in values.items()}, **found}
    for place in (each for each in read if known.get(each, found.get(each)) != found.get(each)):
        model = make()
        set_at(model, place, known[place][0])
        try:
            run(model)
        except CODE_ERRORS as error:
            raise _goes_by(model, place, known[place][0]) from error
        if get_at(model, place) != after.get(place, MISSING):
            raise _goes_by(model, place, known[place][0])
    return Left(found, values)


def _set_first(
    make: Callable[[], nn.Module], run: Callable[[nn.Module], None], places: list[Place]
) -> tuple[dict[Place, Any], list[Place]]:
    """The plain values of those of these places that a run sets before it reads them; and the places that it reads before."""
    read: list[Place] = []
    while places:
        model, instead = make(), {place: LeftBehind(place[1]) for place in places}
        for place, each in instead.items():
            set_at(model, place, each)
        try:
            run(model)
            now = {place: get_at(model, place) for place in places}
        except CODE_ERRORS:
            now = {}
        met = [place for place, each in instead.items() if each.was_read]
        if not met:
            return {place: each for place, each in now.items() if is_plain_value(each)}, read
        read += met
        places = [place for place in places if place not in met]
    return {}, read


def _goes_by(model: nn.Module, place: Place, value: Any) -> _GoesByItError:
    return _GoesByItError(
        f"The forward reads {where(model, place)}, which an earlier call has set ({value!r}): a program keeps what it was when it was captured. "
        "Set it when the module is made, or make it a buffer that is updated with torch; or use a plan with dp and zero alone."
    )


def _copy(value: Any) -> Any:
    return value if value is MISSING else copy.deepcopy(value)


def _plain(now: Any, before: Any) -> tuple[Any, ...]:
    is_filled = now is before  # an entry of it was set
    return (copy.deepcopy(now),) if is_plain_value(now) and now is not MISSING and not is_filled else ()


def _state(value: Any, depth: int = 0) -> Any:
    """Equal as long as the value is the same, and what is in it."""
    if isinstance(value, Tensor):
        return id(value), None if value.is_inference() else value._version
    if isinstance(value, dict | SEQUENCES) and depth < 8:
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        return type(value), [_state(each, depth + 1) for each in parts]
    return repr(value) if is_plain_value(value) else id(value)
