"""What a rank keeps from forward to backward is found from its own program, which is not the first rank's where shards are uneven."""

from __future__ import annotations

import math
from typing import Any

import pytest
from torch.utils.data import default_collate

from meshloom.core.losses.in_precision import in_precision
from meshloom.core.plan import Plan
from meshloom.pipeline.stages.stages import cut_into_stages
from meshloom.planner.memory.dry_run import DryStages
from meshloom.program.capture.capture import capture
from meshloom.tensor_parallel.layout.layout import layout_of
from meshloom.tensor_parallel.partition import partition
from meshloom.tensor_parallel.rules.table import BUILT_IN
from tests.division import at_random
from tests.jobs import make_job
from tests.test_apart import read
from tests.zero_three_jobs import unit_job


@pytest.mark.parametrize(("name", "num_ranks"), [("gpt", 4), ("cnn", 3)])
@pytest.mark.slow
def test_every_rank_of_an_uneven_division_is_measured(name: str, num_ranks: int) -> None:
    """GPT-2 at 1,024 tokens under tp=7 on a host of 24 GB ended before its first step: "shape '[292, 768]' is invalid", as
    every rank's program was run as the first rank's."""
    program = read(make_job(name, "sgd"))
    whole = DryStages().kept(cut_into_stages(program, {node.name: 0 for node in program.nodes}, 1)[0])
    for seed in range(2):
        divided = partition(at_random(seed)(layout_of(program, BUILT_IN), num_ranks)).programs
        kept = [
            DryStages(num_ranks, rank).kept(
                cut_into_stages(each, {node.name: 0 for node in each.nodes}, 1)[0]
            )
            for rank, each in enumerate(divided)
        ]
        assert len(set(kept)) > 1, f"seed {seed} is even"
        assert sum(kept) >= whole, f"seed {seed}: what one device keeps is kept by some rank"


@pytest.mark.parametrize("kind", ["blocks", "adapted"])
@pytest.mark.long
def test_casts_of_parameters_are_not_kept_where_parameters_are_there_for_a_unit_at_a_time(kind: str) -> None:
    """Under autocast every linear layer keeps its weight once more, in bfloat16; zero=3 makes that anew in backward."""
    job = in_precision(unit_job(kind), Plan(precision="bf16-mixed"))
    rows: Any = [job.data()[at] for at in range(6)]
    program = capture(job, (default_collate(rows[:3]), default_collate(rows[3:])))
    (stage,) = cut_into_stages(program, {node.name: 0 for node in program.nodes}, 1)
    # what the first layer is given needs no gradient, so backward does not need its weight; with a frozen base that goes for the
    # first block's first layer, too, and the first of its adapter's two
    unsaved = ("first.weight", "blocks.0.up.base.weight", "blocks.0.up.down.weight")
    casts = 2 * sum(
        math.prod(each.meta.shape)
        for name, each in program.parameters.items()
        if name.endswith("weight") and "norm" not in name and name not in unsaved
    )
    assert DryStages().kept(stage) - DryStages(in_units=True).kept(stage) == casts > 0
