"""An account of a division for people: the placements and communication of every module, what is not
divided, and why."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from meshloom.core.units import format_bytes
from meshloom.program.cost.cost import Cost
from meshloom.program.ir.nodes import Node, Variable
from meshloom.program.opaque.operator import is_opaque
from meshloom.program.operators.collectives import Collective
from meshloom.tensor_parallel.layout.cuts import cuts_by_axis
from meshloom.tensor_parallel.layout.placement import Part
from meshloom.tensor_parallel.partition import Partition
from meshloom.tensor_parallel.search.choose import DivisionChoice
from meshloom.tensor_parallel.search.pins import is_meant
from meshloom.tensor_parallel.search.strategies import strategies_of
from meshloom.tensor_parallel.search.uses import Uses
from meshloom.tensor_parallel.sent_bytes import (
    SentCollective,
    bytes_per_step,
    sent_at_step_end,
    sent_in_chunk,
)


@dataclass(frozen=True, kw_only=True)
class ModuleRow:
    """A module, or several equal ones. path: like `blocks.0-5.up`; '' is the model itself or the loss.

    placements: its parameters' own names -> `column`, `row`, `vocabulary`, `experts`, `dim2`, or `whole`.
    sent: (collective, backward) -> calls and bytes that rank 0 sends for one module and chunk.
    """

    path: str
    times: int = 1
    placements: tuple[tuple[str, str], ...] = ()
    sent: tuple[tuple[tuple[Collective, bool], tuple[int, int]], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Undivided:
    """A parameter or operator that is not divided, with its module. share: of all parameters, or of all
    FLOPs."""

    what: str
    why: str
    times: int = 1
    share: float = 0.0


@dataclass(frozen=True, kw_only=True)
class DivisionAccount:
    """parameters_divided, flops_divided: shares of all elements, and of all FLOPs forward and backward.
    work: the busiest rank's share of the FLOPs.

    num_bytes: kind of collective -> bytes that rank 0 sends in a step. rates: the source of the rates used.
    """

    num_ranks: int
    rows: tuple[ModuleRow, ...]
    whole: tuple[Undivided, ...]
    parameters_divided: float
    flops_divided: float
    work: float
    num_bytes: Mapping[str, int]
    rates: str = ""


def account_of(
    part: Partition, costs: Mapping[str, Cost], *, num_chunks: int = 1, placements: Mapping[str, str] | None = None, rates: str = ""
) -> DivisionAccount:  # fmt: skip
    """The account of a division. num_chunks: in a step. placements: the plan's pins."""
    choice = part.choice
    program = choice.layout.program
    namer = _Namer(choice, placements or {})
    sizes = {name: math.prod(each.meta.shape) for name, each in program.parameters.items()}
    divided = {name for name in sizes if not part.parameters[name].is_whole}
    flops = {node.name: costs[node.name].flops + costs[node.name].backward_flops for node in program.nodes}
    all_flops = sum(flops.values()) or 1
    work = {name: strategy.work for name, strategy in choice.strategies.items()}
    return DivisionAccount(
        num_ranks=choice.num_ranks,
        rows=_merged(list(_rows(part, namer))),
        whole=_grouped([*namer.whole_parameters(sizes, divided), *namer.whole_operators(flops, all_flops)]),
        parameters_divided=sum(sizes[name] for name in divided) / (sum(sizes.values()) or 1),
        flops_divided=sum(count for name, count in flops.items() if work[name] < 1) / all_flops,
        work=sum(count * work[name] for name, count in flops.items()) / all_flops,
        num_bytes=bytes_per_step(part, num_chunks=num_chunks),
        rates=rates,
    )


def text_of(account: DivisionAccount) -> str:
    """The account as a table and a few lines."""
    table = [("module", "parameters", "forward", "backward")]
    table += [
        (
            f"{row.path or '(model and loss)'}{f'  x{row.times}' if row.times > 1 else ''}",
            ", ".join(f"{name} {how}" for name, how in row.placements),
            _calls(row, backward=False),
            _calls(row, backward=True),
        )
        for row in account.rows
    ]
    widths = [max(len(line[column]) for line in table) for column in range(4)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in table
    ]
    lines += [
        f"tp={account.num_ranks} divides {account.parameters_divided:.1%} of the parameters and {account.flops_divided:.1%} of the FLOPs; "
        f"a rank computes {account.work:.1%} of all FLOPs."
    ]
    sent = ", ".join(f"{name} {format_bytes(size)}" for name, size in account.num_bytes.items())
    lines += [f"Sent by a rank per step: {sent}." if sent else "Nothing is sent."]
    lines += [f"Rates: {account.rates}."] if account.rates else []
    lines += [
        f"Whole: {each.what}{f' x{each.times}' if each.times > 1 else ''} ({each.share:.1%}): {each.why}."
        for each in account.whole
    ]
    return "\n".join(lines)


class _Namer:
    """Names placements, and explains why something is not divided."""

    def __init__(self, choice: DivisionChoice, placements: Mapping[str, str]) -> None:
        self._choice = choice
        self._placements = placements
        self._cuts = cuts_by_axis(choice.layout, choice.numbers, choice.num_ranks)
        self._uses = Uses(choice.layout, choice.numbers, self._cuts)

    def placement(self, variable: Variable) -> str:
        """How a parameter is divided."""
        placement = self._choice.input_placements[variable.value]
        if not isinstance(placement, Part) or placement.cut is None:
            return "whole"
        inner, outer, looked_up = self._uses.sides(variable.value)
        sharded = placement.cut.parts.keys()
        if sharded & self._uses.experts:
            return "experts"
        for name, axes in (("vocabulary", looked_up), ("row", inner), ("column", outer)):
            if axes & sharded:
                return f"{name} by heads" if self._uses.heads & sharded & axes else name
        return next(
            f"dim{place}"
            for place, axis in enumerate(self._choice.layout.values[variable.value][0])
            if self._choice.numbers.leaves(axis) & sharded
        )  # fmt: skip

    def whole_parameters(self, sizes: Mapping[str, int], divided: set[str]) -> Iterator[Undivided]:
        """Parameters that every rank holds in full."""
        total = sum(sizes.values()) or 1
        for name, each in self._choice.layout.program.parameters.items():
            if name not in divided:
                yield Undivided(what=name, why=self._why_held(each), share=sizes[name] / total)

    def whole_operators(self, flops: Mapping[str, int], total: int) -> Iterator[Undivided]:
        """Operators with FLOPs that every rank computes in full."""
        for node in self._choice.layout.program.nodes:
            if flops[node.name] and self._choice.strategies[node.name].work == 1:
                what = f"{node.operator} in {node.path}" if node.path else node.operator
                why = f"{self._why_computed(node)} ({_line(node)})"
                yield Undivided(what=what, why=why, share=flops[node.name] / total)

    def _why_held(self, variable: Variable) -> str:
        axes = self._choice.layout.values[variable.value][0]
        numbers = [number for axis in axes for number in sorted(self._choice.numbers.leaves(axis))]
        options = dict.fromkeys(cut for number in numbers for cut in self._cuts.get(number, []))
        for pattern, pin in self._placements.items():
            if any(is_meant(name, pattern) for name in (variable.name, *variable.aliases)):
                return f"the plan wants it so (tp_placements={pattern}:{pin})"
        if variable.value not in self._uses.users:
            return "the loss does not use it"
        if not options:
            return f"no dimension has {self._choice.num_ranks} indices to divide"
        blocking = [self._uses.blocking(variable.value, Part(cut)) for cut in options]
        stuck = next((node for node in blocking if node is not None), None)
        if stuck is not None and None not in blocking:
            return f"{stuck.operator} needs all of it ({_line(stuck)})"
        if not variable.meta.requires_grad:
            return "it is not trained, so that dividing it saves no update"
        return self._why_not_taken()

    def _why_computed(self, node: Node) -> str:
        if node.name not in self._choice.layout.mapped:
            return "it runs as written" if is_opaque(node) else "there is no rule for it"
        ways = strategies_of(node, self._choice.layout, self._choice.numbers, self._cuts)
        if not any(each.work < 1 for each in ways):
            return "it needs all of its operands"
        return self._why_not_taken()

    def _why_not_taken(self) -> str:
        if self._choice.is_proved:
            return "dividing it would cost more than it saves"
        return "no division was found in which dividing it saves more than it costs, and there are too many to compare all"


def _rows(part: Partition, namer: _Namer) -> Iterator[ModuleRow]:
    program = part.choice.layout.program
    mine = part.of(0).program
    paths = {node.name: node.path for node in mine.nodes}
    found: dict[str, tuple[list[tuple[str, str]], list[SentCollective]]] = {}
    for node in program.nodes:
        found.setdefault(node.path, ([], []))
    for name, each in program.parameters.items():
        path, _, own = name.rpartition(".")
        found.setdefault(path, ([], []))[0].append((own, namer.placement(each)))
    for sent in (*sent_in_chunk(mine, 0), *sent_at_step_end(part)):
        found.setdefault(paths.get(sent.node, ""), ([], []))[1].append(sent)
    for path, (placements, all_sent) in found.items():
        if placements or all_sent:
            yield ModuleRow(path=path, placements=tuple(placements), sent=_sums(all_sent))


def _sums(all_sent: Sequence[SentCollective]) -> tuple[tuple[tuple[Collective, bool], tuple[int, int]], ...]:
    sums: dict[tuple[Collective, bool], tuple[int, int]] = {}
    for each in all_sent:
        calls, num_bytes = sums.get((each.collective, each.backward), (0, 0))
        sums[each.collective, each.backward] = calls + 1, num_bytes + each.num_bytes
    return tuple(sorted(sums.items()))


def _merged(rows: Sequence[ModuleRow]) -> tuple[ModuleRow, ...]:
    """Rows with rows that differ only in the number of a block merged into the first of them."""
    groups: dict[object, list[ModuleRow]] = {}
    for row in rows:
        before, number, after = _block(row.path)
        groups.setdefault((before, after, row.placements, row.sent, number is None), []).append(row)
    return tuple(
        replace(group[0], path=_path_of([row.path for row in group]), times=len(group))
        for group in groups.values()
    )


def _grouped(all_whole: Sequence[Undivided]) -> tuple[Undivided, ...]:
    """Entries with those of equal modules and reasons merged, largest share first."""
    groups: dict[tuple[str, str, str], list[Undivided]] = {}
    for each in all_whole:
        before, _, after = _block(each.what)
        groups.setdefault((before, after, each.why), []).append(each)
    found: list[Undivided] = []
    for group in groups.values():
        what, share = _path_of([each.what for each in group]), sum(each.share for each in group)
        found.append(replace(group[0], what=what, times=len(group), share=share))
    return tuple(sorted(found, key=lambda each: -each.share))


def _path_of(paths: Sequence[str]) -> str:
    """One path for several that differ in their first number.

    >>> _path_of(["blocks.0.up", "blocks.1.up", "blocks.3.up"])
    'blocks.0-1,3.up'
    """
    before, _, after = _block(paths[0])
    numbers = [number for path in paths if (number := _block(path)[1]) is not None]
    if not numbers:
        return paths[0]
    return ".".join(part for part in (before, _ranges(numbers), after) if part)


def _block(path: str) -> tuple[str, int | None, str]:
    """A path split at its first number.

    >>> _block("blocks.3.up"), _block("head")
    (('blocks', 3, 'up'), ('head', None, ''))
    """
    parts = path.split(".")
    for place, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[:place]), int(part), ".".join(parts[place + 1 :])
    return path, None, ""


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers as ranges.

    >>> _ranges([0, 1, 2, 5])
    '0-2,5'
    """
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _calls(row: ModuleRow, *, backward: bool) -> str:
    return ", ".join(
        f"{calls} {name} {format_bytes(num_bytes)}"
        for (name, way), (calls, num_bytes) in row.sent
        if way == backward
    )


def _line(node: Node) -> str:
    if not node.line:
        return "at no line of user code"
    return f"at {node.line}: {node.line.text}" if node.line.text else f"at {node.line}"
