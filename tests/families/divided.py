"""Writes docs/divided_families.md: every family divided over ranks, against one device. Run as `python -m tests.families.divided [tp ...]`."""

from __future__ import annotations

import contextlib
import io
import math
import sys
import time
import warnings
from importlib.metadata import version
from pathlib import Path

import torch

from meshloom.errors import MeshloomError
from meshloom.graph.choose import changes_of
from meshloom.graph.cost import costs
from meshloom.graph.partition import Partition
from tests.division import Compared, Subject, compare, subject_of
from tests.families import FAMILIES
from tests.families.limits import NOT_READ

FILE = Path(__file__).parents[2] / "docs" / "divided_families.md"
HEADER = """# Families divided over ranks

Tiny jobs of the test bed (docs/families.md), dropout on, in float64, their losses divided over {tp} and run in lockstep. *error* is the
largest of the loss on any rank, of any parameter's gradient and of any buffer, against the job's own module, run eagerly on one device.
*parameters* is the share of the parameters' elements that no rank holds all of; *FLOPs* that of the matrix products, convolutions and
attention (forward and backward) that are divided; *changes* how many values change their placement, each a collective or a local
copy. Models this small are divided at rates that make it worth their while: next to their latencies nothing would be. torch {torch},
transformers {transformers}.

This file is generated: `python -m tests.families.divided {arguments}`.

| family | tp | error | parameters | FLOPs | changes | what stays whole, where a share is below one half |
|---|---:|---:|---:|---:|---:|---|
"""


def main() -> None:
    """Measure all families and write the file."""
    torch.set_num_threads(1)
    counts = [int(each) for each in sys.argv[1:]] or [2, 3]
    rows: list[str] = []
    for name, family in FAMILIES.items():
        if name in NOT_READ:
            rows.append(f"| {name} | | | | | | no program: {NOT_READ[name][0]} |")
            continue
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            rows += _rows(name, subject_of(family.make_job(True)), counts)
        print("\n".join(rows[-len(counts) :]), flush=True)
        _write(rows, counts)  # as far as it is: all of them take a while


def _write(rows: list[str], counts: list[int]) -> None:
    versions = {"transformers": version("transformers"), "torch": torch.__version__.partition("+")[0]}
    text = HEADER.format(tp=" and ".join(f"tp={each}" for each in counts), arguments=" ".join(map(str, counts)), **versions)
    FILE.write_text(text + "\n".join(rows) + "\n")


def _rows(name: str, subject: Subject, counts: list[int]) -> list[str]:
    rows: list[str] = []
    for num_ranks in counts:
        started = time.monotonic()
        try:
            compared = compare(subject, num_ranks)
        except MeshloomError as error:
            rows.append(f"| {name} | {num_ranks} | | | | | {error} |")
            continue
        print(f"{name} tp={num_ranks}: {compared.what}, {time.monotonic() - started:.0f} s", file=sys.stdout)
        rows.append(_row(name, num_ranks, compared))
    return rows


def _row(name: str, num_ranks: int, compared: Compared) -> str:
    part = compared.partition
    parameters, work = divided_parameters(part), divided_flops(part)
    why = _whole_operators(part) if min(parameters, work) < 0.5 else ""
    return f"| {name} | {num_ranks} | {compared.error:.0e} | {parameters:.0%} | {work:.0%} | {len(list(changes_of(part.choice)))} | {why} |"


def divided_parameters(part: Partition) -> float:
    """Share of the parameters' elements that no rank holds all of."""
    sizes = {name: math.prod(each.shape) for name, each in part.parameters.items()}
    return sum(size for name, size in sizes.items() if not part.parameters[name].is_whole) / max(sum(sizes.values()), 1)


def divided_flops(part: Partition) -> float:
    """Share of the products' operations, forward and backward, in nodes that are divided."""
    found = costs(part.choice.layout.program)
    total = {name: each.flops + each.backward_flops for name, each in found.items()}
    return sum(each for name, each in total.items() if part.choice.strategies[name].cut is not None) / max(sum(total.values()), 1)


def _whole_operators(part: Partition) -> str:
    """What uses the parameters that every rank holds all of: most elements first."""
    choice = part.choice
    held = {
        each.value: math.prod(each.meta.shape) for name, each in choice.layout.program.parameters.items() if part.parameters[name].is_whole
    }  # fmt: skip
    found: dict[str, int] = {}
    for node in choice.layout.program.nodes:
        used = sum(held.get(ref.name, 0) for ref in node.operands())
        if used:
            how = "divided by its rows" if choice.strategies[node.name].cut else "computed by every rank"
            how = how if node.name in choice.layout.mapped else "has no rule"
            found[f"{node.operator} {how}"] = found.get(f"{node.operator} {how}", 0) + used
    return "; ".join(sorted(found, key=lambda each: -found[each])[:3])


if __name__ == "__main__":
    main()
