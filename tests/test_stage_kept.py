"""What a rank keeps from forward to backward is found from its own program, which is not the first rank's where shards are uneven."""

from __future__ import annotations

import pytest

from meshloom.pipeline.stages.stages import cut_into_stages
from meshloom.planner.memory.stage_kept import kept_bytes_of
from meshloom.tensor_parallel.layout.layout import layout_of
from meshloom.tensor_parallel.partition import partition
from meshloom.tensor_parallel.rules.table import BUILT_IN
from tests.division import at_random
from tests.jobs import make_job
from tests.test_apart import read


@pytest.mark.long
@pytest.mark.covering("cnn-3")
@pytest.mark.parametrize(("name", "num_ranks"), [("gpt", 4), ("cnn", 3)])
def test_every_rank_of_an_uneven_division_is_measured(name: str, num_ranks: int) -> None:
    """GPT-2 at 1,024 tokens under tp=7 on a host of 24 GB ended before its first step: "shape '[292, 768]' is invalid", as
    every rank's program was run as the first rank's."""
    program = read(make_job(name, "sgd"))
    whole = kept_bytes_of(cut_into_stages(program, {node.name: 0 for node in program.nodes}, 1)[0], 1)
    for seed in range(2):
        divided = partition(at_random(seed)(layout_of(program, BUILT_IN), num_ranks)).programs
        kept = [
            kept_bytes_of(cut_into_stages(each, {node.name: 0 for node in each.nodes}, 1)[0], num_ranks, rank)
            for rank, each in enumerate(divided)
        ]
        assert len(set(kept)) > 1, f"seed {seed} is even"
        assert sum(kept) >= whole, f"seed {seed}: what one device keeps is kept by some rank"
