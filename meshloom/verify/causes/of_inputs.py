"""What ranks' programs are given that is not their chunk's own: data, numbers and texts of its batch, what its loss draws with `random` and
numpy, seeds of torch's draws. To be asked as forwards run once more, with the objects that they have run with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshloom.core.units import plural
from meshloom.program.ir.batch_values import specialized_to, text_of
from meshloom.program.ir.draws import seed_of_draw
from meshloom.program.ir.leaves import Leaves, leaves_of
from meshloom.program.ir.lines import describe_line
from meshloom.program.ir.nodes import Node
from meshloom.program.ir.program import Program
from meshloom.program.opaque.bound import OpaqueModule
from meshloom.program.opaque.loss_code import OpaqueLoss
from meshloom.program.python_draws.explore import DrawnBatch
from meshloom.verify.reference.mistakes import Cause, CauseKind
from meshloom.verify.reference.observers import digest_values

# kind of the cause; chunk; module, if it is known; what is given
Fact = tuple[CauseKind, int, str, str]
# chunk, name of a value, digest, and of what was sent where it is computed, else ""
Message = tuple[int, str, str, str]


class GivenInputs:
    """own: chunk's number -> its batch, with what its loss draws; in the order of microbatches. found: what was other, each once. messages: what
    stages sent each other."""

    def __init__(self, own: Mapping[int, Any]) -> None:
        self.found: dict[Fact, None] = {}
        self.messages: list[Message] = []
        self._chunks, self._drawn = [*own], any(isinstance(each, DrawnBatch) for each in own.values())
        self._own = {chunk: leaves_of(batch) for chunk, batch in own.items()}

    def given(self, microbatch: int, program: Program, inputs: Mapping[str, Tensor]) -> None:
        """What a program gets for a microbatch, by name in the batch."""
        chunk = self._chunks[microbatch]
        own = self._own[chunk]
        for name, wanted in specialized_to(program.others).items():
            if name in own.values and (text := text_of(own.values[name])) != wanted:
                what = f"it is the program for batches in which {self._said(name)} is {wanted}, and the chunk has {text}"
                self.found.setdefault(("stale", chunk, "", what))
        for name, value in inputs.items():
            right = _value_of(own, name, value)
            if right is not None and digest_values(right) == digest_values(value):
                continue
            other = next(
                (
                    number
                    for number, each in self._own.items()
                    if number != chunk and _is(_value_of(each, name, value), value)
                ),
                None,
            )
            those = "" if other is None else f", that of chunk {other}"
            shown, own_shown = _shown(value), "none" if right is None else _shown(right)
            if self._drawn and name.startswith("drawn."):
                what = f"what its loss draws with random or numpy, or makes of the step, is {shown}{those}, and the chunk's own is {own_shown}"
                self.found.setdefault(("same draws", chunk, "", what))
            elif name in own.values:
                what = f"{self._said(name)} is {shown}{those}, and the chunk's own is {own_shown}"
                self.found.setdefault(("stale", chunk, "", what))
            else:
                what = f"{self._said(name)} has other values than the chunk's{those}"
                self.found.setdefault(("data" if other is None else "microbatches", chunk, "", what))

    def received(self, microbatch: int, values: Mapping[str, Tensor]) -> None:
        """What a stage got of earlier ones."""
        chunk = self._chunks[microbatch]
        self.messages += [(chunk, name, digest_values(value), "") for name, value in values.items()]

    def sent(self, microbatch: int, program: Program, values: Mapping[str, Tensor]) -> None:
        """What a stage has for later ones."""
        chunk, nodes = self._chunks[microbatch], {node.name: node for node in program.nodes}
        for name, value in values.items():
            where = _described(nodes[name]) if name in nodes else f"the value {name}"
            self.messages.append((chunk, name, digest_values(value), where))

    def _said(self, name: str) -> str:
        return f"{name.removeprefix('batch.') if self._drawn else name} of the batch"


def altered_messages(messages: Sequence[Sequence[Any]]) -> Iterator[Fact]:
    """What arrives otherwise than it was sent, of all messages between the stages of one replica and one rank along tp."""
    sent: dict[tuple[int, str], dict[str, str]] = {}
    for chunk, name, digest, where in messages:
        if where:
            sent.setdefault((chunk, name), {})[digest] = where
    for chunk, name, digest, where in messages:
        known = sent.get((chunk, name), {})
        if not where and known and digest not in known:
            what = f"what {next(iter(known.values()))} has made arrives with other values at the stage that it is sent to"
            yield "stages", chunk, "", what


class DrawSeeds:
    """The seeds of torch's draws in a chunk's forward. seed: of the chunk. Each draw is seeded from the one before, on whatever stage that is.
    draw: whether there are any, or may be."""

    def __init__(self, chunk: int, seed: int) -> None:
        self.found: dict[Fact, None] = {}
        self.draw = False
        self._chunk, self._seed, self._known = chunk, seed, True
        self._last = seed  # after the operator before

    def begin(self) -> None:
        """Before a stage's forward, which has the chunk's seed."""
        self._last = self._seed

    def visit(self, node: Node) -> None:
        """After an operator."""
        before, self._last = self._last, torch.initial_seed()
        # code that runs as written may draw as often as it likes
        self._known = self._known and not isinstance(node.target, OpaqueModule | OpaqueLoss)
        self.draw = self.draw or not self._known or (node.draw is not None and not _drops_nothing(node))
        if not self._known or node.draw is None or self.found or _drops_nothing(node):
            return
        if before != seed_of_draw(self._seed, node.draw):
            what = f"{_described(node)} draws with another seed than draw {node.draw} of the chunk has: random numbers are others from there on"
            self.found.setdefault(("same draws", self._chunk, node.path, what))


def causes_of(facts: Iterable[Sequence[Any]]) -> Iterator[Cause]:
    """One of each kind of `Fact`."""
    by_kind: dict[CauseKind, list[Sequence[Any]]] = {}
    for each in facts:
        by_kind.setdefault(each[0], []).append(each)
    for kind, found in by_kind.items():
        first = min(found, key=lambda each: each[1])
        others = len({each[1] for each in found}) - 1
        more = f" So it is, in its own way, with {others} other {plural('chunk', others)}." if others else ""
        sentence = f"The forwards of the step, run once more by the ranks' programs, are not given what is theirs: of chunk {first[1]} {first[3]}.{more}"
        yield Cause(kind, sentence, explains=True)


def _described(node: Node) -> str:
    return f"{node.operator} of {node.path or 'the model or loss'} at {describe_line(node.line)}"


def _value_of(leaves: Leaves, name: str, like: Tensor) -> Tensor | None:
    if name in leaves.tensors:
        return leaves.tensors[name]
    return torch.tensor(leaves.values[name], dtype=like.dtype) if name in leaves.values else None


def _drops_nothing(node: Node) -> bool:
    """Whether an operator that counts as a draw has a rate of dropout, and that is 0."""
    schema = getattr(node.target, "_schema", None)
    for place, argument in enumerate(schema.arguments if schema else ()):
        if argument.name in ("dropout_p", "p", "dropout"):
            given = node.args[place] if place < len(node.args) else argument.default_value
            return node.kwargs.get(argument.name, given) == 0.0
    return False


def _is(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and digest_values(one) == digest_values(other)


def _shown(value: Tensor) -> str:
    return f"{value.item():.6g}" if value.numel() == 1 else f"a tensor of {value.numel()} elements"
