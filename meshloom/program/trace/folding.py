"""While a loss is read: a module's call that is like one before it is noted as such and not read again, so
that alike blocks cost one reading.

Two calls are alike if their modules have the same structure, classes, shapes and modes, are given tensors
that are alike and equal numbers, under the same autocast and grad mode, and if no plain attribute in which
the modules differ (a layer's index, say) is looked at by the forward that is read. A call is read for itself,
as without all this, if it has effects that another could not repeat: it writes what it is given or attributes
of its modules, gives views of what it was given, or has hooks inside.

What is noted are stand-ins (`block_calls.py`); `unfold.py` puts the operators of the call that was read in
their place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from meshloom.program.ir.sparse_constants import memory_of
from meshloom.program.trace.attributes import TORCHS_OWN, plain_text
from meshloom.program.trace.block_calls import ALIKE, ALIKE_SEVERAL, ENTER, LEAVE, like
from meshloom.program.trace.readable import replaced

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_CONTENTS = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True, kw_only=True)
class _Block:
    """What is known of a module before it is called. parts: path below it -> module. structure: equal for
    modules that may be alike."""

    parts: Mapping[str, nn.Module]
    state: tuple[tuple[nn.Module, str, str], ...]  # module, `_parameters` or `_buffers`, name
    structure: int


@dataclass(kw_only=True)
class _Read:
    """A call that was read. looked_at: attributes, by the module's dictionary. returned: leaves of what it
    returned: tensors by place, or plain values."""

    number: int
    block: _Block
    looked_at: set[tuple[int, str]]
    writes_buffers: bool
    returned: list[Any]
    spec: Any
    made: list[Tensor] = field(default_factory=list[Tensor])


class Folding:
    """Of one reading. count: calls that were not read."""

    def __init__(self) -> None:
        self.count = 0
        self._around: Callable[[], Any] = lambda: None
        self._paths: dict[int, str] = {}
        # of a module's dictionary, which export's stand-ins for it share
        self._owners: dict[int, nn.Module] = {}
        self._blocks: dict[int, _Block | None] = {}
        self._structures: dict[Any, int] = {}
        self._read: dict[Any, list[_Read]] = {}
        self._called: set[int] = set()
        self._open: list[tuple[nn.Module, set[tuple[int, str]]]] = []
        self._numbers = 0
        self._kept: list[Any] = []  # what keys name by identity

    @contextmanager
    def noted(self, model: nn.Module, around: Callable[[], Any]) -> Iterator[None]:
        """While the loss runs. around: what surrounds a call: equal where it does the same."""
        self._around = around
        modules = list(model.modules())
        self._owners = {id(vars(each)): each for each in modules}
        self._paths = {id(vars(each)): path for path, each in model.named_modules()}
        kinds = {type(each) for each in modules if each is not model and any(True for _ in each.children())}
        ownership = {home for kind in kinds if (home := _home_of_forward(kind)) is not None}
        with ExitStack() as around_all:
            for home in ownership:
                around_all.enter_context(replaced(home, "forward", self._wrapped(vars(home)["forward"])))
            around_all.enter_context(replaced(nn.Module, "__getattribute__", self._looking()))
            yield
        self._read.clear()
        self._kept.clear()

    def _looking(self) -> Any:
        """Python's own look-up of a module's attribute, which notes it for the calls that are being read."""
        look, open_calls = object.__getattribute__, self._open

        def noting(module: Any, name: str) -> Any:
            value = look(module, name)
            if open_calls and name not in TORCHS_OWN and name != "__dict__":
                place = id(look(module, "__dict__")), name
                for _, looked_at in open_calls:
                    looked_at.add(place)
            return value

        return noting

    def _wrapped(self, forward: Any) -> Any:
        def folded(module: Any, *args: Any, **kwargs: Any) -> Any:
            owner = self._owners.get(id(vars(module)))
            # a forward that calls that of its base class
            if owner is None or (self._open and self._open[-1][0] is owner):
                return forward(module, *args, **kwargs)
            return self._call(owner, lambda: forward(module, *args, **kwargs), args, kwargs)

        return folded

    def _call(
        self, module: nn.Module, run: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        block = self._block(module)
        again = id(module) in self._called
        self._called.add(id(module))
        if block is None:
            return self._plainly(module, run)
        leaves, spec = tree_flatten((args, kwargs))
        key = (
            block.structure,
            spec,
            tuple(self._leaf(leaves, place) for place in range(len(leaves))),
            self._around(),
        )
        try:
            known = self._read.setdefault(key, [])
        except TypeError:  # something in it has no hash
            return self._plainly(module, run)
        for other in known:
            if not (again and other.writes_buffers) and _may_stand_for(other, block):
                return self._as(other, block, leaves)
        return self._reading(module, block, run, leaves, known)

    def _plainly(self, module: nn.Module, run: Callable[[], Any]) -> Any:
        self._open.append((module, set()))
        try:
            return run()
        finally:
            self._open.pop()

    def _reading(
        self,
        module: nn.Module,
        block: _Block,
        run: Callable[[], Any],
        leaves: Sequence[Any],
        known: list[_Read],
    ) -> Any:
        """Read a call, and keep it for others if they can be like it."""
        number = self._numbers = self._numbers + 1
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        state = _state(block)
        before, versions = _attributes(block), [each._version for each in (*given, *state)]  # pyright: ignore[reportPrivateUsage]
        ENTER(given, state, number, self._paths[id(vars(module))])
        looked_at: set[tuple[int, str]] = set()
        self._open.append((module, looked_at))
        try:
            result = run()
        finally:
            self._open.pop()
        now = [each._version for each in (*given, *state)]
        unchanged = now[: len(given)] == versions[: len(given)] and _are_same(before, _attributes(block))
        found = _returned(result, given, state) if unchanged else None
        if found is not None:
            returned, spec, made = found
            LEAVE(made, number)
            writes = now != versions
            known.append(
                _Read(number=number, block=block, looked_at=looked_at, writes_buffers=writes, returned=returned, spec=spec, made=made)
            )  # fmt: skip
        return result

    def _as(self, other: _Read, block: _Block, leaves: Sequence[Any]) -> Any:
        """What a call gives that is like one that was read."""
        self.count += 1
        here = {
            id(vars(one)): id(vars(part))
            for one, part in zip(other.block.parts.values(), block.parts.values(), strict=True)
        }
        # calls around this one depend on what its forward would have looked at
        for _, looked_at in self._open:
            looked_at.update((here[owner], name) for owner, name in other.looked_at if owner in here)
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        stand_in = ALIKE if len(other.made) == 1 else ALIKE_SEVERAL
        made = stand_in(
            given, _state(block), other.number, self._paths[id(vars(block.parts[""]))], *like(other.made)
        )
        tensors = {"made": [made] if stand_in is ALIKE else made, "given": given}
        return tree_unflatten(
            [tensors[each[0]][each[1]] if isinstance(each, _Place) else each for each in other.returned],
            other.spec,
        )

    def _block(self, module: nn.Module) -> _Block | None:
        if id(module) not in self._blocks:
            self._blocks[id(module)] = _block_of(module, self._structures)
        return self._blocks[id(module)]

    def _leaf(self, leaves: Sequence[Any], place: int) -> Any:
        """What has to be equal of a leaf that a call is given."""
        leaf = leaves[place]
        if isinstance(leaf, Tensor):
            same = next(number for number, each in enumerate(leaves) if each is leaf)
            return (
                Tensor,
                same,
                tuple(leaf.shape),
                leaf.dtype,
                _strides(leaf),
                leaf.requires_grad,
                leaf.device,
            )
        text = plain_text(leaf)
        if text is None:
            self._kept.append(leaf)
        return (type(leaf), text) if text is not None else id(leaf)


class _Place(tuple[str, int]):
    """Where a tensor is that a call returned."""


def _home_of_forward(kind: type) -> Any:
    """The class that a module's class has its forward from; None: from torch's base class of all, which has
    none."""
    home = next((each for each in kind.__mro__ if "forward" in vars(each)), None)
    return home if home is not nn.Module else None


def _block_of(module: nn.Module, structures: dict[Any, int]) -> _Block | None:
    """None: something in it has hooks. structures: those seen, with their numbers."""
    parts = dict(_parts(module, ""))
    if any(vars(each).get(name) for path, each in parts.items() if path for name in _HOOKS):
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
    facts = [
        (
            first.setdefault(id(one), place),
            kind,
            name,
            type(one),
            tuple(one.shape),
            one.dtype,
            _strides(one),
            one.requires_grad,
        )
        for place, (one, (_, kind, name)) in enumerate(zip(tensors, state, strict=True))
    ]
    own = [
        (path, type(each), each.training, tuple(vars(each)["_buffers"]), tuple(vars(each)["_parameters"]))
        for path, each in parts.items()
    ]
    return _Block(
        parts=parts, state=state, structure=structures.setdefault((tuple(own), tuple(facts)), len(structures))
    )


def _parts(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    yield path, module
    for name, child in vars(module)["_modules"].items():
        if child is not None:
            yield from _parts(child, f"{path}.{name}")


def _strides(tensor: Tensor) -> Any:
    return tuple(tensor.stride()) if tensor.layout == torch.strided else tensor.layout


def _state(block: _Block) -> list[Tensor]:
    """Its parameters and buffers as they are now."""
    return [vars(module)[kind][name] for module, kind, name in block.state]


def _attributes(block: _Block) -> list[dict[str, tuple[Any, str | None]]]:
    """What its modules hold, and the text of what is plain. Their parameters, buffers and parts by their
    names."""
    return [
        {name: (value, plain_text(value)) for name, value in vars(part).items() if name not in TORCHS_OWN}
        | {f"{kind} {name}": (value, None) for kind in _CONTENTS for name, value in vars(part)[kind].items()}
        for part in block.parts.values()
    ]


def _are_same(
    before: Sequence[Mapping[str, tuple[Any, str | None]]],
    now: Sequence[Mapping[str, tuple[Any, str | None]]],
) -> bool:
    return all(
        one.keys() == two.keys()
        and all(value is two[name][0] and text == two[name][1] for name, (value, text) in one.items())
        for one, two in zip(before, now, strict=True)
    )


def _may_stand_for(read: _Read, block: _Block) -> bool:
    """Whether nothing in which the two differ was looked at."""
    if read.block is block:
        return True
    for one, other in zip(read.block.parts.values(), block.parts.values(), strict=True):
        mine, theirs = vars(one), vars(other)
        for name in mine.keys() | theirs.keys():
            if name in TORCHS_OWN or (id(mine), name) not in read.looked_at:
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
    """The leaves of what a call returned, how they are arranged, and the tensors that it made. None: another
    call could not give their like."""
    leaves, spec = tree_flatten(result)
    made: list[Tensor] = []
    returned: list[Any] = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            if plain_text(leaf) is None:
                return None
            returned.append(leaf)
            continue
        place = next((place for place, each in enumerate(given) if each is leaf), None)
        if place is not None:
            returned.append(_Place(("given", place)))
            continue
        at = next((place for place, each in enumerate(made) if each is leaf), None)
        if at is None:
            at = len(made)
            made.append(leaf)
        returned.append(_Place(("made", at)))
    graded = torch.is_grad_enabled() and any(each.requires_grad for each in (*given, *state))
    if not made or any(
        each.layout != torch.strided or each.requires_grad != (graded and each.is_floating_point())
        for each in made
    ):
        return None
    memories = [memory_of(each) for each in (*made, *given, *state)]
    return (
        (returned, spec, made)
        if len(set(memories[: len(made)])) == len(made)
        and not set(memories[: len(made)]) & set(memories[len(made) :])
        else None
    )
