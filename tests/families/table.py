"""Writes docs/families.md: what was measured of every family. Run as `python -m tests.families.table`, with
names to measure only those again."""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch

from meshloom.core.plan import Plan
from tests.families import FAMILIES, REFUSED, Family
from tests.families.limits import FLOAT32_ONLY, NOT_EXPORTED, NOT_READ, OTHER_KERNEL
from tests.families.measure import operators, start, verified
from tests.families.programs import WAYS, Way, differs_by, limit_of, read
from tests.reports import largest_error

FILE = Path(__file__).parents[2] / "docs" / "families.md"
PLAN = Plan(dp=2, microbatches=2)
BATCH_SIZE = 6
HEADER = """# Model families

Tiny jobs of {count} architectures, randomly initialized, that the tests train, verify, export and capture as programs (`tests/families/`). The classes
are those of `transformers` {transformers} and `torch.nn` {torch}, and some written in the tests. All have two layers or more, and odd sizes if the
architecture allows them.

*dp* is the largest error of any loss, gradient, buffer, parameter or update in two steps of `{plan}` against one device, in
float64 unless it says otherwise: batches of six samples, split into chunks of 2, 2, 1 and 1, whose gradients are added up in two orders. If a family's
own code casts to float32, the error is that rounding. *ATen* counts the kinds of operators in the graph that `torch.export` returns for the loss, or gives the reason
if it fails.

*Nodes* counts the operators of the program that `meshloom.program` captures from the training loss, or gives the reason if it refuses. The next columns
are the largest error of that program against eager, of any output, gradient or buffer, on two batches that it was not captured from; "0" is
bitwise equality.

- *float32*, *float64*: captured and run in that precision. The same operators run in the same order, so most are bitwise equal; where
  gradients of one tensor add up, or `transformers` builds another mask while it is traced (and attention runs another kernel), sums have another order.
- *lifted*: captured in float32, run in float64 with inner casts converted, against eager in which every call is converted. After the slash, against
  eager with a float64 model: the error of its own casts to float32, if any.
- *dropout*: with random masks; draws are keyed by their number, in eager and in the program.
- *bfloat16*: under autocast, with random masks. In the {kernels} families where attention runs another kernel, rounding to bfloat16 happens in other places;
  the error may be twice that of eager's own rounding, and is measured against at least 0.1 of the largest gradient (elsewhere 0.001).

{num_read} families are captured, {num_refused} refused. A test asserts each number's limit, and each refusal's sentence.

This file is generated: `python -m tests.families.table`.

| family | kind | parameters | dp | ATen | nodes | float32 | float64 | lifted | dropout | bfloat16 | what is particular |
|---|---|---:|---:|---|---|---:|---:|---:|---:|---:|---|
"""
SHOWN = ("float32", "float64", "lifted", "dropout", "bfloat16, dropout")


def row(family: Family) -> str:
    """One line of the table."""
    module, batch = start(family.make_job(False))
    parameters = sum(parameter.numel() for parameter in module.parameters())
    report = verified(family, PLAN, batch_size=BATCH_SIZE)
    error = f"{largest_error(report):.0e}" if report.passed else "differs"
    error += " (float32)" if family.name in FLOAT32_ONLY else ""
    kinds = (
        f"no: {NOT_EXPORTED[family.name][0]}"
        if family.name in NOT_EXPORTED
        else str(len(operators(module, batch)))
    )
    cells = [family.name, family.kind, f"{parameters:,}", error, kinds, *_program(family), family.notes]
    return f"| {' | '.join(cells)} |".replace("  ", " ")


def _program(family: Family) -> list[str]:
    """Its number of nodes and its errors, or why there is none."""
    if family.name in NOT_READ:
        return [f"no: {NOT_READ[family.name][0]}", *("" for _ in SHOWN)]
    cells: list[str] = []
    for name in SHOWN:
        way = WAYS[name]
        program = read(family, way)
        if not cells:
            cells.append(str(len(program.nodes)))
        differs = partial(differs_by, program, family, way)
        cells.append(_error(family, way, differs))
    return cells


def _error(family: Family, way: Way, measure: Callable[..., float]) -> str:
    error = measure()
    text = _shown(error) if error <= limit_of(family, way) else f"differs: {_shown(error)}"
    if way.lifted and (casts := measure(casts_stay=True)) > 1e-12:
        text += f" / {_shown(casts)}"
    return text


def _shown(error: float) -> str:
    return f"{error:.0e}" if error else "0"


def _rows_of_before() -> dict[str, str]:
    lines = FILE.read_text().splitlines() if FILE.exists() else []
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines if line.startswith("| ")}


def main(names: list[str]) -> None:
    """Measure the families of these names, or all, and write the file; the other rows stay."""
    torch.set_num_threads(1)
    rows = _rows_of_before()
    for name in names or FAMILIES:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            rows[name] = row(FAMILIES[name])
        print(rows[name], flush=True)
        _write(rows)


def _write(rows: dict[str, str]) -> None:
    rows |= {
        family.name: f"| {family.name} | {family.kind} |{' |' * 9} {family.notes} |"
        for family in REFUSED.values()
    }
    head = HEADER.format(
        count=len(FAMILIES),
        plan=PLAN,
        transformers=version("transformers"),
        torch=torch.__version__.partition("+")[0],
        kernels=len(OTHER_KERNEL),
        num_read=len(FAMILIES) - len(NOT_READ),
        num_refused=len(NOT_READ),
    )
    FILE.write_text(head + "".join(f"{rows[name]}\n" for name in (*FAMILIES, *REFUSED) if name in rows))


if __name__ == "__main__":
    main(sys.argv[1:])
