"""What one steady step enters, counted: the files of the package, their functions, and the lines of code of these.

A three-layer MLP trains as `meshloom train` does it, on two processes on CPUs; all ranks and their threads count together. A step is what is entered
in steps 8 to 12, without what happens in the first steps alone or every hundredth; setting up is what is entered from making the `Trainer` to the first
step. Lines are those that hold code: neither comments nor docstrings count. Code that was made from a string, like a dataclass's `__init__`, counts as
a file of its own.

    python -m tests.traced                        # the numbers, beside those of traced.json
    python -m tests.traced --write                # writes them there
    python -m tests.traced --list dp=2            # the functions of a step, by file
    python -m tests.traced --draw 12 --seed 1     # so many of the functions that a step enters under any of the plans, by a seed
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import meshloom as ml
from meshloom.telemetry.progress import QUIET
from tests.processes import on_ranks

FILE = Path(__file__).with_suffix(".json")
ROOT = Path(ml.__file__).parent
PLANS = ("dp=2", "tp=2", "pp=2")
FIRST, LAST, STEPS = 7, 11, 13  # steps as `Batch.step` counts them, from 0
# As Python and torch decide what code is made from strings, and what is a function of its own.
VERSIONS = (
    f"Python {sys.version_info[0]}.{sys.version_info[1]}, torch {'.'.join(torch.__version__.split('.')[:2])}"
)


@dataclass(frozen=True, order=True)
class Function:
    """A function that was entered. file: in the package, or the module in which it was made from a string. line: its first. lines: those
    that hold its code."""

    file: str
    line: int
    name: str
    lines: frozenset[int]

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.name}"


@dataclass(frozen=True, kw_only=True)
class Counts:
    """files, functions, lines: of a step. setup_files: of setting up."""

    files: int
    functions: int
    lines: int
    setup_files: int


Entered = Mapping[str, frozenset[Function]]  # "setting up", "step"


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def job() -> ml.Job:
    def data() -> torch.utils.data.TensorDataset:
        drawn = torch.Generator().manual_seed(0)
        return torch.utils.data.TensorDataset(
            torch.randn(640, 32, generator=drawn), torch.randint(10, (640,), generator=drawn)
        )

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    return ml.Job(
        model=mlp, loss=loss, optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3), data=data, batch_size=32, steps=STEPS
    )  # fmt: skip


def entered(plan: str) -> list[Entered]:
    """On each rank, on a machine of which nothing is measured or kept."""
    with tempfile.TemporaryDirectory() as home:
        return on_ranks(_followed, 2, plan, home, timeout_seconds=120.0)


def counts_of(ranks: list[Entered]) -> Counts:
    """Of all ranks together."""
    step = frozenset[Function]().union(*(each["step"] for each in ranks))
    setup = frozenset[Function]().union(*(each["setting up"] for each in ranks))
    return Counts(
        files=len({each.file for each in step}), functions=len(step),
        lines=len({(each.file, line) for each in step for line in each.lines}), setup_files=len({each.file for each in setup}),
    )  # fmt: skip


def written() -> dict[str, Any]:
    return json.loads(FILE.read_text())


def _followed(plan: str, home: str) -> Entered:
    os.environ["HOME"] = home
    found: dict[str, set[Any]] = {name: set() for name in ("setting up", "step", "other steps")}
    seen = found["setting up"]

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            seen.add((frame.f_code, frame.f_globals.get("__name__")))

    threading.setprofile(note)
    sys.setprofile(note)
    with ml.Trainer(job(), plan, devices="cpu", share=True, cache="off", listener=QUIET) as trainer:
        run = trainer.synchronous
        assert run is not None
        step = run.step

        def stepped(batch: Any) -> float:
            nonlocal seen
            seen = found["step" if FIRST <= batch.step <= LAST else "other steps"]
            return step(batch)

        run.step = stepped  # type: ignore[method-assign]
        trainer.fit()
        sys.setprofile(None)
        threading.setprofile(None)
    return {
        name: frozenset(each for code in codes if (each := _function(*code))) for name, codes in found.items()
    }


def _function(code: Any, module: str | None) -> Function | None:
    """None: of another package, the body of a module or of a class, or a comprehension, which is part of the function around it."""
    own = Path(code.co_filename).is_relative_to(ROOT)
    made = code.co_filename.startswith("<") and (module is None or module.split(".")[0] == "meshloom")
    if (
        not (own or made)
        or not code.co_flags & 1
        or code.co_name in ("<listcomp>", "<setcomp>", "<dictcomp>")
    ):
        return None
    lines = frozenset(line for *_, line in code.co_lines() if line)
    if own:
        file, name = str(Path(code.co_filename).relative_to(ROOT.parent)), code.co_qualname
    else:  # classes of one module have methods of the same name
        name = f"{code.co_name}({', '.join(code.co_varnames[: code.co_argcount])})"
        file = f"text in {module or 'a program'}: {name}"
    return Function(file, code.co_firstlineno, name, lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"write the numbers to {FILE.name}")
    parser.add_argument("--list", metavar="PLAN", help="print the functions of a step under this plan")
    parser.add_argument(
        "--draw", type=int, metavar="N", help="print N functions that a step enters, drawn by --seed"
    )
    parser.add_argument("--seed", type=int, default=0)
    said = parser.parse_args()
    ranks = {plan: entered(plan) for plan in ([said.list] if said.list else PLANS)}
    if said.list or said.draw:
        functions = sorted({each for found in ranks.values() for rank in found for each in rank["step"]})
        own = [
            each for each in functions if not each.file.startswith("text")
        ]  # a mistake has a line to be made in
        for each in random.Random(said.seed).sample(own, said.draw) if said.draw else functions:
            print(each)
        return 0
    counts = {plan: asdict(counts_of(found)) for plan, found in ranks.items()}
    for plan, found in counts.items():
        first = asdict(counts_of(ranks[plan][:1]))
        print(
            f"{plan}: {found}, of the first rank {first}, written {written()[plan] if FILE.exists() else None}"
        )
    if said.write:
        FILE.write_text(json.dumps({"counted with": VERSIONS, **counts}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
