"""Writes docs/divided_families.md: every family divided over ranks, against one device.

`python -m tests.families.divided` measures all of them; `--missing` those without a row, `--only NAME ...`
those named. Other rows stay.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import time
import warnings
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import torch

from meshloom.program.cost.cost import costs
from meshloom.tensor_parallel.explain import DivisionAccount, Undivided, account_of
from meshloom.tensor_parallel.partition import Partition
from meshloom.tensor_parallel.search.choose import reshards_of
from tests.division import Subject, compare, subject_of
from tests.families import FAMILIES
from tests.families.limits import NOT_READ

FILE = Path(__file__).parents[2] / "docs" / "divided_families.md"
COUNTS = (2, 3)  # ranks
HALF = 0.5  # of the parameters or of the FLOPs; below it the table says what stays whole
HEADER = """# Families sharded over ranks

Tiny jobs of the test bed ([families.md](families.md)), dropout on, in float64, their losses sharded as under a plan and run in lockstep.

- *error*: the largest of the loss on any rank, of any parameter's gradient and of any buffer, against the job's own module, run eagerly
  on one device.
- *parameters*: the share of the parameters' elements that are sharded.
- *FLOPs*: the share of those of matrix products, convolutions and attention, forward and backward, that are sharded.
- *changes*: the number of values that are resharded, each by a collective or a local copy.
- If a share is below one half: what is replicated, why, and its share of all parameters or of all FLOPs, if at least 5 %.

Models this small are sharded at rates that make it worthwhile: with the latencies of a real network nothing would be. torch {torch},
transformers {transformers}.

This file is generated: `python -m tests.families.divided`.

| family | tp | error | parameters | FLOPs | changes | what is replicated, if a share is below one half |
|---|---:|---:|---:|---:|---:|---|
"""


def main(names: Sequence[str]) -> None:
    """Measure families and write the file after each: all of them take a while."""
    torch.set_num_threads(1)
    rows = _rows_of_before()
    for name in names:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            rows[name] = _rows(name)
        _write(rows)


def _rows_of_before() -> dict[str, list[str]]:
    rows: dict[str, list[str]] = {}
    for line in FILE.read_text().splitlines() if FILE.exists() else []:
        rows.setdefault(line.split(" | ")[0].removeprefix("| "), []).append(line)
    return {name: lines for name, lines in rows.items() if name in FAMILIES}


def _write(rows: Mapping[str, Sequence[str]]) -> None:
    text = HEADER.format(transformers=version("transformers"), torch=torch.__version__.partition("+")[0])
    FILE.write_text(text + "".join(f"{line}\n" for name in FAMILIES for line in rows.get(name, [])))


def _rows(name: str) -> list[str]:
    if name in NOT_READ:
        return [f"| {name} | | | | | | no program: {NOT_READ[name][0]} |"]
    started = time.process_time()
    subject = subject_of(FAMILIES[name].make_job(True))
    print(f"{name}: read in {time.process_time() - started:.1f} s", flush=True)
    return [_row(name, subject, num_ranks) for num_ranks in COUNTS]


def _row(name: str, subject: Subject, num_ranks: int) -> str:
    started = time.process_time()
    compared = compare(subject, num_ranks)
    part = compared.partition
    account = account_of(part, costs(subject.program))
    shares = f"{account.parameters_divided:.0%} | {account.flops_divided:.0%}"
    row = f"| {name} | {num_ranks} | {compared.error:.0e} | {shares} | {len(list(reshards_of(part.choice)))} | {_whole(part, account)} |"
    print(f"{row} {compared.what}, {time.process_time() - started:.1f} s", flush=True)
    return row


def _whole(part: Partition, account: DivisionAccount) -> str:
    """In words, what stays whole of the parameters, or of the FLOPs, if it is more than half: by reason, the
    largest share first."""
    operators = {node.operator for node in part.choice.layout.program.nodes}
    computed = [each for each in account.whole if each.what.split(" ")[0] in operators]
    held = [each for each in account.whole if each not in computed]
    sentences: list[str] = []
    if account.parameters_divided < HALF:
        sentences += _reasons("parameters", {each: _reason(each) for each in held})
    if account.flops_divided < HALF:
        sentences += _reasons(
            "FLOPs", {each: f"{each.what.split(' ')[0]}: {_reason(each)}" for each in computed}
        )
    return "; ".join(sentences)


def _reasons(of: str, reasons: Mapping[Undivided, str]) -> list[str]:
    shares: dict[str, float] = {}
    for each, reason in reasons.items():
        shares[reason] = shares.get(reason, 0.0) + each.share
    return [
        f"{share:.0%} of the {of}: {reason}"
        for reason, share in sorted(shares.items(), key=lambda each: -each[1])
        if share >= 0.05
    ]


def _reason(whole: Undivided) -> str:
    return whole.why.partition(" (at ")[0]  # the line belongs to the user's machine


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=FAMILIES, metavar="NAME", help="measure these")
    parser.add_argument("--missing", action="store_true", help="measure those without a row")
    given = parser.parse_args()
    known = _rows_of_before() if given.missing else {}
    main([name for name in given.only or FAMILIES if name not in known])
