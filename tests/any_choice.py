"""Divisions and cuts that any machine could choose: a model of the equality matrix, a plan, and a way to choose, all
drawn from one seed.

    rates     the cheapest at rates drawn over several orders of magnitude
    prices    the cheapest where every way of computing, and every change of placement, has a price drawn by itself
    ways      any division at all, cheap or not (`division.at_random`)

Cuts are those of the rates, or any that are possible. What the plan trains is held against one device as
`meshloom verify` does.
A model is read once, and divided and cut as often as is asked for.
"""

from __future__ import annotations

import math
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

import meshloom.pipeline.stages.choose_cuts
import meshloom.pipeline.stages.program_store
import meshloom.pipeline.stages.stage_cutter
import meshloom.tensor_parallel.division
import meshloom.tensor_parallel.search.choose
import meshloom.tensor_parallel.search.problem
from meshloom.core.errors import CaptureError, PlanError
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.core.schedules import SCHEDULES as KNOWN
from meshloom.pipeline.stages.dynamic_program import Limits, best_cuts
from meshloom.pipeline.stages.intervals import Intervals
from meshloom.program.cost.rates import Rates
from meshloom.program.ir.leaves import leaves_of
from meshloom.program.ir.program import Program
from meshloom.program.store.checked_capture import CheckedCapture
from meshloom.tensor_parallel.layout.layout import Layout, layout_of
from meshloom.tensor_parallel.partition import Partition, partition
from meshloom.tensor_parallel.rules.table import Rules
from meshloom.tensor_parallel.search.bucket_elimination import Floats
from meshloom.tensor_parallel.search.cheapest import Combination, cheapest
from meshloom.tensor_parallel.search.choose import DivisionChoice, choose
from meshloom.tensor_parallel.search.repeats import Repeats
from meshloom.tensor_parallel.search.reshards import Reshard
from meshloom.verify.run import verify
from tests.division import at_random
from tests.equality.models.table import MODELS
from tests.equality.settings import adamw, momentum

PLANS = [
    "tp=2",
    "tp=3",
    "tp=4",
    "pp=2",
    "pp=3",
    "pp=2,tp=2",
    "pp=3,tp=2",
    "pp=2,tp=3",
    "dp=2,tp=2",
    "dp=2,pp=2,tp=2",
]
NAMES = [
    "mlp", "square_gpt", "llama", "relative", "cnn", "unet", "bags", "top_two", "lstm", "translator", "flow", "distilled", "graph", "scan", "vae", "mixer",
    "towers",
]  # fmt: skip
# What a choice may come to that leaves nothing to compare: places that are too few, and a second shape of
# batch that does not go with the first one's division.
REFUSALS = re.compile(
    "can be cut at|cannot be divided like the first one|since the first program was cut|the last has nothing to compute"
)
SCHEDULES = ["gpipe", "1f1b", "1f1b", "interleaved", "zb-h1", "zb-v", "found"]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A job and a choice. seed: of the choice. way: rates, prices or ways."""

    name: str
    job: Job
    plan: Plan
    way: str
    any_cuts: bool
    seed: int

    def __str__(self) -> str:
        return f"{self.name} under {self.plan}, by {self.way}{' and any cuts' if self.any_cuts and self.plan.pp > 1 else ''} (seed {self.seed})"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a pair. error: the largest, relative. refused: the sentence, if the plan was. divided:
    share of the parameters' elements that tp divides.

    parts: share of the operators that ranks compute in part.
    """

    error: float = 0.0
    what: str = ""
    refused: str = ""
    divided: float = 0.0
    parts: float = 0.0


def name_of(seed: int) -> str:
    """Of the model of a seed's pair."""
    return NAMES[seed % len(NAMES)]


def pair_of(seed: int) -> Pair:
    """The pair of a seed."""
    chance = random.Random(f"pair {seed}")
    name = name_of(seed)
    model = MODELS[name]
    plan = chance.choice([each for each in map(Plan.parse, PLANS) if each.pp <= model.stages])
    if plan.pp > 1:
        schedule = chance.choice(
            [each for each in SCHEDULES if KNOWN[each].stages_per_rank * plan.pp <= model.stages]
        )
        plan = replace(
            plan,
            schedule=schedule,
            microbatches=chance.choice([1, 2, 2, 3]) if plan.dp == 1 else chance.choice([1, 2]),
        )
        if schedule == "interleaved":
            plan = replace(plan, virtual_stages=2)
    elif chance.random() < 0.3:
        plan = replace(plan, microbatches=2)
    if chance.random() < 0.15:
        plan = replace(plan, recompute=chance.choice(["full", "selective"]))
    if plan.dp > 1 and chance.random() < 0.5:
        plan = replace(plan, zero=1)
    way = chance.choice(["rates", "prices", "prices", "ways"])
    # Chunks of 2 samples, so that few shapes have to be read; one of 3 beside them, unless a second shape
    # knows nothing of what was drawn for the first.
    uneven = way != "ways" and plan.num_chunks > 1 and chance.random() < 0.35
    job = Job(
        model=model.build,
        loss=model.loss,
        optimizer=momentum if chance.random() < 0.5 else adamw,
        data=lambda: model.samples(12),
        batch_size=2 * plan.num_chunks + uneven,
        steps=2,
    )
    return Pair(name=name, job=job, plan=plan, way=way, any_cuts=chance.random() < 0.7, seed=seed)


class Readings:
    """Programs, each read once per model and shape of its batches."""

    def __init__(self) -> None:
        self._programs: dict[tuple[Any, ...], Program] = {}
        self._layouts: dict[str, Layout] = {}

    @contextmanager
    def kept(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """While it is open, a job's loss is read once, and once for all ranks it is found which dims belong
        together."""
        with monkeypatch.context() as patch:
            capture = CheckedCapture.program

            def once(
                checked: Any, batches: Sequence[Any], known: Any, *, training: bool, model: Any
            ) -> Program:
                key = checked._job.model, training, leaves_of(batches[0]).shapes
                if key not in self._programs:
                    self._programs[key] = capture(checked, batches, known, training=training, model=model)
                return self._programs[key]

            def layout(program: Program, rules: Rules) -> Layout:
                digest = program.digest()
                if digest not in self._layouts:
                    self._layouts[digest] = layout_of(program, rules)
                return self._layouts[digest]

            patch.setattr(CheckedCapture, "program", once)
            patch.setattr(meshloom.tensor_parallel.division, "layout_of", layout)
            yield


def random_rates(chance: random.Random) -> Rates:
    """Of a machine and its links, each over several orders of magnitude."""
    return Rates(
        flops_per_second=10 ** chance.uniform(6, 14), bytes_per_second=10 ** chance.uniform(6, 13), start_seconds=10 ** chance.uniform(-8, -3),
        latency_seconds=10 ** chance.uniform(-8, -3), link_bytes_per_second=10 ** chance.uniform(5, 12),
        memory_price=chance.choice([0.0, 10 ** chance.uniform(-2, 4)]),
    )  # fmt: skip


@contextmanager
def chosen(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, Partition]]:
    """While it is open, divisions and cuts are chosen as the pair has it. Gives the divisions that were
    made."""
    rates = random_rates(random.Random(f"rates {pair.seed}"))
    decide = _in_any_way(pair.seed) if pair.way == "ways" else choose
    choices: dict[tuple[int, ...], DivisionChoice] = {}
    made: dict[int, Partition] = {}

    def decided(layout: Layout, *rest: Any, **settings: Any) -> DivisionChoice:
        choice = decide(layout, *rest, **settings)
        choices[id(layout), *choice.chosen] = choice
        return choice

    def divided(choice: DivisionChoice) -> Partition:  # once for all ranks, which would find the same
        if id(choice) not in made:
            made[id(choice)] = partition(choice)
        return made[id(choice)]

    with monkeypatch.context() as patch:
        patch.setattr(meshloom.tensor_parallel.division, "rates_for", lambda *_: rates)
        patch.setattr(meshloom.pipeline.stages.stage_cutter, "rates_here", lambda *_: rates)
        patch.setattr(meshloom.tensor_parallel.division, "choose", decided)
        patch.setattr(
            meshloom.tensor_parallel.division,
            "choice_of_numbers",
            lambda layout, _, numbers, **settings: choices[id(layout), *numbers],
        )
        patch.setattr(meshloom.tensor_parallel.division, "partition", divided)
        # no choice here goes by what training would choose
        patch.setattr(meshloom.pipeline.stages.program_store, "unlifted", lambda *_: None)
        if pair.way == "prices":
            patch.setattr(meshloom.tensor_parallel.search.problem, "cheapest", _at_prices(pair.seed))
            if pair.seed % 2:
                patch.setattr(meshloom.tensor_parallel.search.problem, "repeats_of", lambda *_: Repeats())
        if pair.any_cuts:
            patch.setattr(
                meshloom.pipeline.stages.choose_cuts,
                "best_cuts",
                _anywhere(random.Random(f"cuts {pair.seed}")),
            )
            patch.setattr(
                meshloom.pipeline.stages.choose_cuts, "refined", lambda line, limits, cuts, price, told: cuts
            )
        yield made


def _at_prices(seed: int) -> Callable[[Sequence[Floats], Sequence[Reshard], object], Combination | None]:
    def at_prices(own: Sequence[Floats], changes: Sequence[Reshard], _: object) -> Combination | None:
        chance = np.random.default_rng(seed)
        level = 10 ** chance.uniform(-1.5, 1.0)  # what changes cost beside ways of computing
        priced = [np.where(np.isfinite(each), chance.exponential(size=each.shape), np.inf) for each in own]
        moved = [
            replace(
                each,
                costs=np.where(
                    np.isfinite(each.costs), level * chance.exponential(size=each.costs.shape), np.inf
                ),
            )
            for each in changes
        ]
        return cheapest(priced, moved)

    return at_prices


def _in_any_way(seed: int) -> Callable[..., DivisionChoice]:
    """The first program's division is drawn; later ones are chosen so that what is held stays."""
    draw = at_random(seed)

    def drawn(
        layout: Layout, num_ranks: int, *rest: Any, held: Any = None, **settings: Any
    ) -> DivisionChoice:
        return (
            draw(layout, num_ranks)
            if held is None
            else choose(layout, num_ranks, *rest, held=held, **settings)
        )

    return drawn


def _anywhere(chance: random.Random) -> Callable[[Intervals, Limits, object], list[int] | None]:
    def anywhere(line: Intervals, limits: Limits, _: object) -> list[int] | None:
        count = limits.num_stages - 1
        for _ in range(200):
            cuts = sorted(chance.sample(list(line.places), count))
            bounds = [0, *cuts, line.num_nodes]
            if not any(
                bounds[stage] <= use < bounds[stage + 1]
                for stage, uses in limits.forbidden.items()
                for use in uses
            ):
                return cuts
        return best_cuts(line, limits)

    return anywhere


def outcome_of(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Outcome:
    """Train the pair's job under its plan and on one device, a step in float64."""
    with chosen(pair, monkeypatch) as made:
        try:
            report = verify(pair.job, pair.plan, devices="simulated", steps=1, dtype=torch.float64)
        except (PlanError, CaptureError) as error:
            if not REFUSALS.search(str(error)):
                raise
            return Outcome(refused=str(error))
    assert report is not None
    divided, parts = _shares(next(iter(made.values()))) if made else (0.0, 0.0)
    if report.passed:
        return Outcome(divided=divided, parts=parts)
    errors = [each for step in report.steps for each in step.errors]
    worst = max(
        errors, key=lambda each: each.error / each.tolerance if each.error == each.error else math.inf
    )
    said = [
        *(fact for step in report.steps for fact in step.facts),
        report.explained,
        report.operator,
    ]
    return Outcome(
        error=max(worst.error, worst.tolerance),
        what=f"{worst.kind} of {worst.name}; {' '.join(said)}",
        divided=divided,
        parts=parts,
    )


def _shares(made: Partition) -> tuple[float, float]:
    """Of the elements of parameters those in divided ones, and of the operators those that ranks compute in
    part."""
    whole = {name: math.prod(each.shape) for name, each in made.parameters.items()}
    held = {
        name: sum(map(each.num_elements, range(each.num_ranks))) / each.num_ranks
        for name, each in made.parameters.items()
    }
    divided = sum(size for name, size in whole.items() if held[name] < size)
    strategies = made.choice.strategies.values()
    return divided / max(sum(whole.values()), 1), sum(each.cut is not None for each in strategies) / len(
        strategies
    )


def main(seeds: Sequence[str]) -> None:
    """`python -m tests.any_choice SEED...` repeats pairs."""
    readings = Readings()
    with pytest.MonkeyPatch.context() as patch, readings.kept(patch):
        for seed in map(int, seeds):
            pair = pair_of(seed)
            print(pair, outcome_of(pair, patch), sep="\n    ")


if __name__ == "__main__":
    main(sys.argv[1:])
