"""Traces identical calls of modules once, so that repeated blocks cost the export of one.

Calls are identical if their modules have the same structure, classes, shapes and modes, get tensors of equal
layouts and equal numbers, under the same autocast and grad mode, and if the traced forward reads no plain
attribute in which the modules differ (a layer's index, say). A call is traced by itself if it has effects
that another could not repeat: it writes to its inputs or to attributes of its modules, returns views of its
inputs, or has hooks or opaque modules inside.

Calls are recorded as operators (`block_calls.py`); `unfold.py` puts copies of the traced nodes there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from meshloom.core.errors import CaptureError
from meshloom.program.ir.replaced import replaced
from meshloom.program.ir.sparse_constants import memory_of
from meshloom.program.opaque.stand_ins import is_standing_in, put_together, taken_apart
from meshloom.program.trace.attributes import TORCHS_OWN, plain_text
from meshloom.program.trace.block_calls import ENTER, LEAVE, REPEAT, REPEAT_SEVERAL, layouts_of

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_CONTENTS = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True, kw_only=True)
class _Block:
    """Facts about a module before it is called. parts: path below it -> module. structure: equal for modules
    that may have identical calls."""

    parts: Mapping[str, nn.Module]
    state: tuple[tuple[nn.Module, str, str], ...]  # module, `_parameters` or `_buffers`, name
    structure: int


@dataclass(kw_only=True)
class _TracedCall:
    """A traced call. attributes_read: by the module's dict. returned: tensors by place, or plain values."""

    number: int
    block: _Block
    attributes_read: set[tuple[int, str]]
    writes_buffers: bool
    returned: list[Any]
    spec: Any
    made: list[Tensor] = field(default_factory=list[Tensor])


class Folding:
    """Folds the calls of one export. count: calls that were not traced."""

    def __init__(self) -> None:
        self.count = 0
        self._around: Callable[[], Any] = lambda: None
        self._paths: dict[int, str] = {}
        # by a module's dict, which export's proxies of the module share
        self._owners: dict[int, nn.Module] = {}
        self._blocks: dict[int, _Block | None] = {}
        self._structures: dict[Any, int] = {}
        self._read: dict[Any, list[_TracedCall]] = {}
        self._called: set[int] = set()
        self._open: list[tuple[nn.Module, set[tuple[int, str]]]] = []
        self._numbers = 0
        self._kept: list[Any] = []  # objects whose ids are in keys

    @contextmanager
    def folded_inside(self, model: nn.Module, around: Callable[[], Any]) -> Iterator[None]:
        """Folds calls inside. around: the context of a call, equal where operators run alike."""
        self._around = around
        modules = list(model.modules())
        self._owners = {id(vars(each)): each for each in modules}
        self._paths = {id(vars(each)): path for path, each in model.named_modules()}
        kinds = {type(each) for each in modules if each is not model and any(True for _ in each.children())}
        definers = {definer for kind in kinds if (definer := _definer_of_forward(kind)) is not None}
        with ExitStack() as around_all:
            for definer in definers:
                folded = self._folded(vars(definer)["forward"])
                around_all.enter_context(replaced(definer, "forward", folded))
            around_all.enter_context(replaced(nn.Module, "__getattribute__", self._recording_look_up()))
            yield
        self._read.clear()
        self._kept.clear()

    def _recording_look_up(self) -> Any:
        """Python's look-up of a module's attributes, recording them for the calls that are being traced."""
        look, open_calls = object.__getattribute__, self._open

        def recording(module: Any, name: str) -> Any:
            value = look(module, name)
            if open_calls and name not in TORCHS_OWN and name != "__dict__":
                place = id(look(module, "__dict__")), name
                for _, attributes_read in open_calls:
                    attributes_read.add(place)
            return value

        return recording

    def _folded(self, forward: Any) -> Any:
        def folded(module: Any, *args: Any, **kwargs: Any) -> Any:
            owner = self._owners.get(id(vars(module)))
            # the forward of a base class, called by the module's own
            if owner is None or (self._open and self._open[-1][0] is owner):
                return forward(module, *args, **kwargs)
            return self._call(owner, lambda: forward(module, *args, **kwargs), args, kwargs)

        return folded

    def _call(
        self, module: nn.Module, run: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        block = self._block(module)
        called_before = id(module) in self._called
        self._called.add(id(module))
        if block is None:
            return self._trace_unfolded(module, run)
        leaves, spec = tree_flatten((args, kwargs))
        facts = tuple(self._leaf(leaves, leaf) for leaf in leaves)
        key = block.structure, spec, facts, self._around()
        try:
            known = self._read.setdefault(key, [])
        except TypeError:  # something in it has no hash
            return self._trace_unfolded(module, run)
        for other in known:
            if not (called_before and other.writes_buffers) and _may_stand_for(other, block):
                return self._repeat(other, block, leaves)
        return self._trace(module, block, run, leaves, known)

    def _trace_unfolded(self, module: nn.Module, run: Callable[[], Any]) -> Any:
        self._open.append((module, set()))
        try:
            return run()
        finally:
            self._open.pop()

    def _trace(
        self,
        module: nn.Module,
        block: _Block,
        run: Callable[[], Any],
        leaves: Sequence[Any],
        known: list[_TracedCall],
    ) -> Any:
        """Trace a call, and keep it for identical ones unless it cannot be repeated."""
        number = self._numbers = self._numbers + 1
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        state = _state(block)
        before, versions = _attributes(block), [each._version for each in (*given, *state)]  # pyright: ignore[reportPrivateUsage]
        ENTER(given, state, number, self._paths[id(vars(module))])
        attributes_read: set[tuple[int, str]] = set()
        self._open.append((module, attributes_read))
        try:
            result = run()
        finally:
            self._open.pop()
        now = [each._version for each in (*given, *state)]
        unchanged = now[: len(given)] == versions[: len(given)] and _are_unchanged(before, _attributes(block))
        repeatable = _returned(result, given, state) if unchanged else None
        if repeatable is not None:
            returned, spec, made = repeatable
            LEAVE(made, number)
            writes = now != versions
            known.append(
                _TracedCall(number=number, block=block, attributes_read=attributes_read, writes_buffers=writes, returned=returned, spec=spec, made=made)
            )  # fmt: skip
        return result

    def _repeat(self, other: _TracedCall, block: _Block, leaves: Sequence[Any]) -> Any:
        """The result of a call that is identical to a traced one."""
        self.count += 1
        here = {
            id(vars(one)): id(vars(part))
            for one, part in zip(other.block.parts.values(), block.parts.values(), strict=True)
        }
        # attributes that its forward would have read count for the calls around it
        for _, attributes_read in self._open:
            attributes_read.update(
                (here[owner], name) for owner, name in other.attributes_read if owner in here
            )
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        stand_in = REPEAT if len(other.made) == 1 else REPEAT_SEVERAL
        path = self._paths[id(vars(block.parts[""]))]
        made = stand_in(given, _state(block), other.number, path, *layouts_of(other.made))
        return put_together(other.returned, other.spec, [made] if stand_in is REPEAT else made, given)

    def _block(self, module: nn.Module) -> _Block | None:
        if id(module) not in self._blocks:
            self._blocks[id(module)] = _block_of(module, self._structures)
        return self._blocks[id(module)]

    def _leaf(self, leaves: Sequence[Any], leaf: Any) -> Any:
        """Facts about an argument of a call that identical calls share."""
        if isinstance(leaf, Tensor):
            same = next(number for number, each in enumerate(leaves) if each is leaf)
            return Tensor, same, *_layout(leaf), leaf.device
        text = plain_text(leaf)
        if text is None:
            self._kept.append(leaf)
        return (type(leaf), text) if text is not None else id(leaf)


def _definer_of_forward(kind: type) -> Any:
    """The class that defines the forward of a module's class; None if it is `nn.Module`, which has none."""
    definer = next((each for each in kind.__mro__ if "forward" in vars(each)), None)
    return definer if definer is not nn.Module else None


def _block_of(module: nn.Module, structures: dict[Any, int]) -> _Block | None:
    """None if a submodule has hooks, or is opaque. structures: known ones, with their numbers."""
    parts = dict(_parts(module, ""))
    if any(map(is_standing_in, parts.values())):
        return None
    if any(vars(each).get(name) for path, each in parts.items() if path for name in HOOKS):
        return None
    state = tuple(
        (each, kind, name)
        for each in parts.values()
        for kind in ("_parameters", "_buffers")
        for name, one in vars(each)[kind].items()
        if one is not None
    )
    tensors = [vars(each)[kind][name] for each, kind, name in state]
    first: dict[int, int] = {}
    facts = tuple(
        (first.setdefault(id(one), place), kind, name, type(one), *_layout(one))
        for place, (one, (_, kind, name)) in enumerate(zip(tensors, state, strict=True))
    )
    own = tuple(
        (path, type(each), each.training, tuple(vars(each)["_buffers"]), tuple(vars(each)["_parameters"]))
        for path, each in parts.items()
    )
    return _Block(parts=parts, state=state, structure=structures.setdefault((own, facts), len(structures)))


def _parts(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    yield path, module
    for name, child in vars(module)["_modules"].items():
        if child is not None:
            yield from _parts(child, f"{path}.{name}")


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    strides = tuple(tensor.stride()) if tensor.layout == torch.strided else tensor.layout
    return tuple(tensor.shape), tensor.dtype, strides, tensor.requires_grad


def _state(block: _Block) -> list[Tensor]:
    """Its current parameters and buffers."""
    return [vars(module)[kind][name] for module, kind, name in block.state]


def _attributes(block: _Block) -> list[dict[str, tuple[Any, str | None]]]:
    """Attributes of its modules, with texts of plain ones, and parameters, buffers and submodules by name."""
    return [
        {name: (value, plain_text(value)) for name, value in vars(part).items() if name not in TORCHS_OWN}
        | {f"{kind} {name}": (value, None) for kind in _CONTENTS for name, value in vars(part)[kind].items()}
        for part in block.parts.values()
    ]


def _are_unchanged(
    before: Sequence[Mapping[str, tuple[Any, str | None]]],
    now: Sequence[Mapping[str, tuple[Any, str | None]]],
) -> bool:
    return all(
        one.keys() == two.keys()
        and all(value is two[name][0] and text == two[name][1] for name, (value, text) in one.items())
        for one, two in zip(before, now, strict=True)
    )


def _may_stand_for(read: _TracedCall, block: _Block) -> bool:
    """Whether the traced call read no attribute in which the two differ."""
    if read.block is block:
        return True
    for one, other in zip(read.block.parts.values(), block.parts.values(), strict=True):
        mine, theirs = vars(one), vars(other)
        for name in mine.keys() | theirs.keys():
            if name in TORCHS_OWN or (id(mine), name) not in read.attributes_read:
                continue
            if name not in mine or name not in theirs or not _same(mine[name], theirs[name]):
                return False
    return True


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    text = plain_text(one)
    return text is not None and type(one) is type(other) and text == plain_text(other)


def _returned(
    result: Any, given: Sequence[Tensor], state: Sequence[Tensor]
) -> tuple[list[Any], Any, list[Tensor]] | None:
    """Leaves and structure of a call's result, and its new tensors. None if the call cannot be repeated."""
    try:
        made, _, returned, spec = taken_apart(result, given)
    except CaptureError:  # objects
        return None
    graded = torch.is_grad_enabled() and any(each.requires_grad for each in (*given, *state))
    if not made or any(
        each.layout != torch.strided or each.requires_grad != (graded and each.is_floating_point())
        for each in made
    ):
        return None
    memories = {memory_of(each) for each in made}
    if len(memories) < len(made) or not memories.isdisjoint(memory_of(each) for each in (*given, *state)):
        return None
    return returned, spec, made
