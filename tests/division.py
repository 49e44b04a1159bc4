"""A job's loss divided over simulated ranks, against the job's own module on one device.

The oracle is eager: the module in float64, its draws keyed. Of a division it knows which indices of each
parameter and buffer each rank holds, and whose gradients are whole.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate

from meshloom.comm.pieces import Pieces
from meshloom.core.job import Job
from meshloom.core.random import KeyedDraws, preserved_draws, seed_everything
from meshloom.program.capture.capture import capture
from meshloom.program.ir.nodes import Node
from meshloom.program.ir.program import Program
from meshloom.program.trace.precision import build_model, default_precision, in_precision
from meshloom.tensor_parallel.layout.cuts import candidates, covers, numbers_of, pieces_of
from meshloom.tensor_parallel.layout.layout import Layout, layout_of
from meshloom.tensor_parallel.layout.placement import INVARIANT, PARTIAL, REPLICATED, Cut, Part, Placement
from meshloom.tensor_parallel.partition import Partition, partition
from meshloom.tensor_parallel.rules.table import BUILT_IN
from meshloom.tensor_parallel.search.choose import DivisionChoice, Rates, choose
from meshloom.tensor_parallel.search.strategies import Strategy, strategies_of
from tests.on_ranks import run_on_ranks

SEED = 3
RATES = Rates(
    flops_per_second=1e6,
    bytes_per_second=1e5,
    link_bytes_per_second=1e5,
    latency_seconds=1e-5,
    start_seconds=1e-5,
)  # for which tiny models pay
FLOOR = 1e-3  # of the largest gradient's norm: what is smaller is compared with that

Decide = Callable[[Layout, int], DivisionChoice]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A job that is divided: its program, and what its own module computes of a batch in float64."""

    model: nn.Module
    batch: Any
    layout: Layout
    outputs: list[Tensor]
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor]

    @property
    def program(self) -> Program:
        """What is divided."""
        return self.layout.program


@dataclass(frozen=True, kw_only=True)
class Compared:
    """error: the largest of any output, gradient or buffer, relative. what: which it was."""

    error: float
    what: str
    partition: Partition


def subject_of(job: Job, *, batches: tuple[Any, Any] | None = None) -> Subject:
    """Read a job's loss in float64, and run its module eagerly on the first batch."""
    if batches is None:
        data = job.data()
        batches = (
            default_collate([data[at] for at in range(3)]),
            default_collate([data[at] for at in range(3, 6)]),
        )
    program = capture(job, batches, dtype=torch.float64)
    model = build_model(job, torch.float64, training=True)
    before = {name: each.detach().clone() for name, each in model.named_buffers()}
    batch = in_precision(batches[0], torch.float64)
    with preserved_draws(), default_precision(torch.float64):
        seed_everything(SEED)
        with KeyedDraws(), _Lifted():
            outputs = [torch.as_tensor(each) for each in tree_leaves(job.loss(model, _cloned(batch)))]
            outputs[0].sum().backward()
    gradients = {
        name: None if each.grad is None else each.grad.detach() for name, each in model.named_parameters()
    }
    buffers = {name: each.detach().clone() for name, each in model.named_buffers()}
    with torch.no_grad():
        for name, each in model.named_buffers():
            each.copy_(before[name])
    return Subject(
        model=model,
        batch=batch,
        layout=layout_of(program, BUILT_IN),
        outputs=[each.detach() for each in outputs],
        gradients=gradients,
        buffers=buffers,
    )


def cheapest(layout: Layout, num_ranks: int) -> DivisionChoice:
    """The division that a plan would have, at rates for which tiny models are worth dividing."""
    return choose(layout, num_ranks, RATES)


def compare(
    subject: Subject,
    num_ranks: int,
    decide: Decide = cheapest,
    visit: Callable[[int, Node, Any], None] | None = None,
) -> Compared:
    """Divide over `num_ranks` ranks and compare with one device."""
    part = partition(decide(subject.layout, num_ranks))
    ranks = range(num_ranks)
    named = dict(subject.model.named_parameters())
    parameters = [
        {
            name: selected(each.detach(), _held(part.parameters[name], rank))
            .clone()
            .requires_grad_(each.requires_grad)
            for name, each in named.items()
        }
        for rank in ranks
    ]
    buffers = [
        {
            name: selected(each.detach(), _held(part.buffers[name], rank)).clone()
            for name, each in subject.model.named_buffers()
        }
        for rank in ranks
    ]
    with preserved_draws(), default_precision(torch.float64):
        results = run_on_ranks(
            part.programs,
            parameters,
            buffers,
            subject.batch,
            _backward,
            seed=SEED,
            dtype=torch.float64,
            visit=visit,
        )
    outputs = [[torch.as_tensor(each) for each in tree_leaves(result)] for result in results]
    errors = [
        *_outputs(subject, outputs),
        *_gradients(subject, part, parameters),
        *_buffers(subject, part, buffers),
    ]
    error, what = max(errors, key=lambda each: each[0] if each[0] == each[0] else float("inf"))
    return Compared(error=error, what=what, partition=part)


def _backward(_: int, returned: Any) -> None:
    torch.as_tensor(tree_leaves(returned)[0]).sum().backward()


def _outputs(subject: Subject, outputs: list[list[Tensor]]) -> Iterator[tuple[float, str]]:
    for rank, row in enumerate(outputs):
        for number, (mine, theirs) in enumerate(zip(row, subject.outputs, strict=True)):
            yield _error(mine.detach(), theirs, 0.0), f"output {number} on rank {rank}"


def _gradients(
    subject: Subject, part: Partition, parameters: list[dict[str, Tensor]]
) -> Iterator[tuple[float, str]]:
    largest = max(float(each.norm()) for each in subject.gradients.values() if each is not None)
    for name, expected in subject.gradients.items():
        found = [each[name].grad for each in parameters]
        if expected is None:
            yield (
                0.0 if all(each is None for each in found) else float("inf"),
                f"whether {name} has a gradient",
            )
            continue
        pieces = part.parameters[name]
        index = [_held(pieces, rank) for rank in range(pieces.num_ranks)]
        found = [
            each if each is not None else torch.zeros_like(selected(expected, index[rank]))
            for rank, each in enumerate(found)
        ]
        holders = torch.zeros(expected.shape)
        total = torch.zeros_like(expected)
        for rank, each in enumerate(found):
            add_part(holders, index[rank], torch.ones(each.shape))
            add_part(total, index[rank], each)
        variable = subject.program.parameters[name]
        if part.choice.input_placements[variable.value] == INVARIANT:
            for rank, each in enumerate(found):
                yield _error(each, expected, FLOOR * largest), f"gradient of {name} on rank {rank}"
            continue
        shared = bool((holders > 1).any())
        yield (
            0.0 if shared == (name in part.summed) or not variable.meta.requires_grad else float("inf"),
            f"whether {name} is summed",
        )
        yield _error(total, expected, FLOOR * largest), f"gradient of {name}"


def _buffers(
    subject: Subject, part: Partition, buffers: list[dict[str, Tensor]]
) -> Iterator[tuple[float, str]]:
    for name, expected in subject.buffers.items():
        for rank, row in enumerate(buffers):
            yield (
                _error(row[name], selected(expected, _held(part.buffers[name], rank)), 1e-3),
                f"buffer {name} on rank {rank}",
            )


def _held(pieces: Pieces, rank: int) -> list[Tensor]:
    """The indices of each dim that a rank holds."""
    return [
        torch.arange(size)
        if runs is None
        else torch.cat([torch.empty(0, dtype=torch.long), *(torch.arange(*each) for each in runs)])
        for size, runs in zip(pieces.shape, pieces.held[rank], strict=True)
    ]


def selected(tensor: Tensor, index: list[Tensor]) -> Tensor:
    for dim, each in enumerate(index):
        tensor = tensor.index_select(dim, each)
    return tensor


def add_part(into: Tensor, index: list[Tensor], part: Tensor) -> None:
    if index:
        into[torch.meshgrid(*index, indexing="ij")] += part
    else:
        into += part


def _error(mine: Tensor, theirs: Tensor, floor: float) -> float:
    if mine.shape != theirs.shape:
        return float("inf")
    if not theirs.is_floating_point() and not theirs.is_complex():
        return 0.0 if torch.equal(mine, theirs) else float("inf")
    same = (mine == theirs) | (mine.isnan() & theirs.isnan())
    difference = torch.where(same, torch.zeros_like(mine), mine - theirs)
    size = max(float(torch.where(theirs.isfinite(), theirs, torch.zeros_like(theirs)).norm()), floor)
    return float(difference.norm()) / size if size else float(difference.norm())


class _Lifted(TorchDispatchMode):
    """Casts to a lower precision keep float64: comparing to 1e-10 asks for it, and a program is run so,
    too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        lift: Callable[[Any], Any] = lambda each: (  # noqa: E731
            torch.float64 if isinstance(each, torch.dtype) and each.is_floating_point else each
        )
        return func(*map(lift, args), **{key: lift(each) for key, each in (kwargs or {}).items()})


def _cloned(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _cloned(each) for key, each in value.items()}
    return type(value)(map(_cloned, value)) if isinstance(value, list | tuple) else value


def at_random(seed: int) -> Decide:
    """Any division at all: every value is placed, and every node computed, in a way drawn among all that are
    possible."""

    def decide(layout: Layout, num_ranks: int) -> DivisionChoice:
        for attempt in range(20):
            choice = _drawn(layout, num_ranks, random.Random(f"{seed} {attempt}"), spread=attempt < 19)
            if choice is not None:
                return choice
        raise AssertionError("no division was found at random")

    return decide


def _drawn(layout: Layout, num_ranks: int, chance: random.Random, *, spread: bool) -> DivisionChoice | None:
    """None: a node cannot be computed from what was drawn before. spread: whether buffers that are updated in
    place are divided too."""
    program = layout.program
    numbers = numbers_of(layout)
    cuts: dict[int, list[Cut]] = {}
    for cut in candidates(layout, numbers, num_ranks):
        for number in cut.parts:
            cuts.setdefault(number, []).append(cut)
    in_place = {program.buffers[name].value for name in program.in_place}
    variables: dict[str, Placement] = {}
    for each in (*program.buffers.values(), *program.inputs):
        variables[each.value] = INVARIANT
    variables.update(dict.fromkeys(program.constants, INVARIANT))
    for value in [
        *(each.value for each in program.parameters.values()),
        *(sorted(in_place) if spread else []),
    ]:
        graded = layout.metas[value][0].requires_grad
        found = [
            cut
            for axis in layout.values[value][0]
            for number in sorted(numbers.leaves(axis))
            for cut in cuts.get(number, [])
        ]
        found = [cut for cut in found if covers(layout.values[value][0], cut, numbers)]
        parts: list[Placement] = [
            Part(cut)
            for cut in found
            if graded or not pieces_of(layout.values[value][0], cut, numbers, num_ranks).is_shared
        ]
        variables[value] = chance.choice(
            [INVARIANT, *([REPLICATED] if graded else []), *([chance.choice(parts)] * 3 if parts else [])]
        )
    strategies: dict[str, Strategy] = {}

    def reachable(value: str, wanted: Placement) -> bool:
        source = variables[value] if value in variables else strategies[value].output
        if source == wanted:
            return True
        metas = layout.metas[value]
        if value in layout.lists or value in in_place:
            return False
        return metas[0].dtype.is_floating_point or PARTIAL not in (source, wanted)

    for node in program.nodes:
        ways = [
            each
            for each in strategies_of(node, layout, numbers, cuts)
            if all(
                reachable(ref.name, wanted)
                for ref, wanted in zip(node.operands(), each.operands, strict=True)
            )
            # A partial sum of whole numbers cannot be changed, so that whoever wants it otherwise has no way.
            and (each.output != PARTIAL or all(output.dtype.is_floating_point for output in node.outputs))
        ]
        if not ways:
            return None
        kinds: dict[str, list[Strategy]] = {}
        for each in ways:
            kinds.setdefault("cut" if each.cut else str(each.output), []).append(each)
        kind = "cut" if "cut" in kinds and chance.random() < 0.6 else chance.choice(sorted(kinds))
        strategies[node.name] = chance.choice(kinds[kind])
    return DivisionChoice(
        num_ranks=num_ranks,
        layout=layout,
        numbers=numbers,
        strategies=strategies,
        input_placements=variables,
        seconds=0.0,
        chosen=(),
    )
