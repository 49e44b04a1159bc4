"""Writes docs/published.md: every published model of the set under every plan, by shapes alone.

`python -m tests.published` describes all of them; with names only those; other rows stay. `--missing`: those
without rows.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import io
import os
import tempfile
import traceback
import warnings
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import torch

from tests.published import PUBLISHED
from tests.published.model import Published
from tests.published.row import Row, Rows, plans_of

FILE = Path(__file__).parents[2] / "docs" / "published.md"
LEAST = 0.002  # of the parameters or of the FLOPs: what is whole and less is not spoken of
HEADER = """# Published models at the sizes that people train

Default configurations of `transformers` {transformers}, and some models of one's own code (`tests/published/`), read, divided and cut by shapes alone, as
`meshloom describe --plan` does: nothing is downloaded, and no value is computed. A chunk is one microbatch of one replica; a batch has as many as the plan.

- *parameters*, *FLOPs*: the shares that are divided over tp, of which no rank has all.
- *dp*, *pp*, *tp*: bytes that a rank hands over along the axis in a step; of the rank that hands over most.
- *memory*: parameters, gradients, AdamW's two averages and the activations in flight, all in float32, of the rank that holds most; without temporaries and the batch.
- *balance*: by how much the slowest stage is above the mean of all stages.
- *seconds*: of one core: to read the model and price its operators, which is done once for all its plans, and for the plan itself.

Rates are the defaults. Below the table stands what is not divided, with the reason that the account gives, where it is {least:.1%} of the parameters
or of the FLOPs or more.
torch {torch}. This file is generated: `python -m tests.published`; `--missing` adds the models of `tests/published/` that have no rows yet.

| model | chunk | operators | plan | parameters | FLOPs | dp | pp | tp | memory | balance | seconds |
|---|---|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|
"""
WHOLE = """
## What is not divided

| model | plan | what | share | why |
|---|---|---|---:|---|
"""


def main() -> None:
    """Describe models and write the file after each: all of them take an hour of one core."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", choices=[*PUBLISHED, []], help="models; default: all")
    parser.add_argument("--missing", action="store_true", help="only models without rows")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as home:
        os.environ["HOME"] = home  # where no machine was measured
        known, _ = _lines_of_before()
        failed: list[str] = []
        for name in arguments.names or [
            each for each in PUBLISHED if not (arguments.missing and each in known)
        ]:
            with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
                warnings.simplefilter("ignore")
                try:
                    rows, whole = _rows(PUBLISHED[name])
                except Exception:
                    print(f"{name}: {traceback.format_exc(limit=-3)}", flush=True)
                    failed.append(name)
                    continue
            _write(name, rows, whole)
    if failed:
        raise SystemExit(f"Without rows: {', '.join(failed)}.")


def lines_of(model: Published, num_operators: int, row: Row) -> tuple[str, list[str]]:
    """A row of the table without its seconds, and the rows of what is whole."""
    cells = [model.name, f"{model.chunk} x {model.size}", str(num_operators), *row.cells()]
    large = [each for each in row.whole if each.share >= LEAST]
    whole = [
        f"| {model.name} | {row.plan} | {each.what}{f' x{each.times}' if each.times > 1 else ''} | {each.share:.1%} | {_reason(each.why)} |"
        for each in large
    ]
    return f"| {' | '.join(cells)} |".replace("  ", " "), whole


def _reason(why: str) -> str:
    """Without the line: all of them are the loss's call of the model."""
    return why.partition(" (at ")[0]


def _rows(model: Published) -> tuple[list[str], list[str]]:
    found = Rows(model)
    rows: list[str] = []
    whole: list[str] = []
    for plan in plans_of(model):
        row = found.row(plan)
        line, more = lines_of(model, found.num_operators, row)
        rows.append(f"{line} {row.seconds[0]:.0f} + {row.seconds[1]:.0f} |")
        print(rows[-1], flush=True)
        whole += more
    return rows, whole


def _lines_of_before() -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    rows: dict[str, list[str]] = {}
    whole: dict[str, list[str]] = {}
    into = rows
    for line in FILE.read_text().splitlines() if FILE.exists() else []:
        into = whole if line.startswith("## What is not divided") else into
        name = line.split(" | ")[0].removeprefix("| ")
        if name in PUBLISHED:
            into.setdefault(name, []).append(line)
    return rows, whole


def _write(name: str, rows: Sequence[str], whole: Sequence[str]) -> None:
    """Models may be described by several processes at a time, so what others wrote stays."""
    with (Path(tempfile.gettempdir()) / "meshloom-published.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        all_rows, all_whole = _lines_of_before()
        all_rows[name], all_whole[name] = list(rows), list(whole)
        head = HEADER.format(
            transformers=version("transformers"), torch=torch.__version__.partition("+")[0], least=LEAST
        )
        FILE.write_text(head + _text(all_rows) + WHOLE + _text(all_whole))


def _text(lines: Mapping[str, Sequence[str]]) -> str:
    return "".join(f"{line}\n" for name in PUBLISHED for line in lines.get(name, ()))


if __name__ == "__main__":
    main()
