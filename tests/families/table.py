"""Writes docs/families.md: what was measured of every family. Run as `python -m tests.families.table`."""

from __future__ import annotations

import contextlib
import io
import warnings
from importlib.metadata import version
from pathlib import Path

import torch

from meshloom.plan import Plan
from tests.families import FAMILIES, REFUSED, Family
from tests.families.limits import FLOAT32_ONLY, NOT_EXPORTED
from tests.families.measure import largest_error, operators, start, verified

FILE = Path(__file__).parents[2] / "docs" / "families.md"
PLAN = Plan(dp=2, microbatches=2)
BATCH_SIZE = 6
HEADER = """# Model families

Tiny jobs of {count} architectures, from random starts, that the tests train, verify and export (`tests/families/`). The classes are those of
`transformers` {transformers} and `torch.nn` {torch}, and some written in the tests. All have two layers or more, odd sizes where the architecture
allows them.

*dp* is the largest error of any loss, gradient, buffer, parameter or update in two steps of `{plan}` against one device, in
float64 unless it says otherwise: batches of six samples, cut into chunks of 2, 2, 1 and 1, whose gradients are added up in two orders. *ATen* counts
the kinds of operators in what `torch.export` gives for the loss; where it gives nothing, the reason stands there.

This file is generated: `python -m tests.families.table`.

| family | kind | parameters | dp | ATen | what is particular |
|---|---|---:|---:|---|---|
"""


def row(family: Family) -> str:
    """One line of the table."""
    module, batch = start(family.make_job(False))
    parameters = sum(parameter.numel() for parameter in module.parameters())
    report = verified(family, PLAN, batch_size=BATCH_SIZE)
    error = f"{largest_error(report):.0e}" if report.passed else "differs"
    error += " (float32)" if family.name in FLOAT32_ONLY else ""
    kinds = f"no: {NOT_EXPORTED[family.name][0]}" if family.name in NOT_EXPORTED else str(len(operators(module, batch)))
    return f"| {family.name} | {family.kind} | {parameters:,} | {error} | {kinds} | {family.notes} |"


def main() -> None:
    """Measure all families and write the file."""
    torch.set_num_threads(1)
    rows: list[str] = []
    for family in FAMILIES.values():
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            rows.append(row(family))
        print(rows[-1], flush=True)
    refused = "\n".join(f"| {family.name} | {family.kind} | | | | {family.notes} |" for family in REFUSED.values())
    versions = {"transformers": version("transformers"), "torch": torch.__version__.partition("+")[0]}
    FILE.write_text(HEADER.format(count=len(FAMILIES), plan=PLAN, **versions) + "\n".join(rows) + f"\n{refused}\n")


if __name__ == "__main__":
    main()
