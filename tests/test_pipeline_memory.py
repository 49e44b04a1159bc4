"""What 1F1B keeps for backward does not grow with the number of microbatches; what GPipe keeps does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from meshloom.pipeline.runtime.run import ActionListener, PipelineRun
from meshloom.pipeline.schedules.builders import make_schedule
from meshloom.pipeline.schedules.check import most_in_flight
from tests.fitted import fitted
from tests.jobs import make_job, texts

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]
RANKS = 2
# the same for any number of microbatches; of schedules with two stages a rank
CUTS = dict.fromkeys(("interleaved", "zb-v"), "blocks.0+blocks.1+norm")


class Kept:
    """Bytes that a rank's forwards save for backward, each memory once: now, and most at a time."""

    def __init__(self) -> None:
        self.most = self.now = 0
        self.held: Counter[int] = Counter()
        self.hooks: Any = None

    def began(self, action: Any) -> None:
        if action.kind == "F":
            self.hooks = torch.autograd.graph.saved_tensors_hooks(
                lambda tensor: Saved(self, tensor), lambda saved: saved.tensor
            )
            self.hooks.__enter__()

    def ended(self, action: Any) -> None:
        if self.hooks:
            self.hooks.__exit__(None, None, None)
            self.hooks = None

    def add(self, memory: int, num_bytes: int, times: int) -> None:
        before = self.held[memory] > 0
        self.held[memory] += times
        self.now += num_bytes * ((self.held[memory] > 0) - before)
        self.most = max(self.most, self.now)


class Saved:
    def __init__(self, kept: Kept, tensor: Tensor) -> None:
        self.tensor, self.kept = tensor.detach(), kept
        self.memory = self.tensor.untyped_storage().data_ptr(), self.tensor.untyped_storage().nbytes()
        kept.add(*self.memory, 1)

    def __del__(self) -> None:
        self.kept.add(*self.memory, -1)


def kept(schedule: str, num_microbatches: int) -> list[int]:
    """[rank] most bytes at a time in a step. Parameters are in it: saved by every microbatch, counted once."""
    job = make_job("gpt", "sgd", batch_size=2 * num_microbatches, data=partial(texts, 2 * num_microbatches))
    watches = [Kept() for _ in range(RANKS)]
    run = PipelineRun.run

    def watched(self: PipelineRun, listeners: Sequence[ActionListener] = (), *meet: Any) -> None:
        run(self, [*listeners, watches[self._group.rank]], *meet)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PipelineRun, "run", watched)
        plan = f"pp={RANKS},microbatches={num_microbatches},schedule={schedule},cuts={CUTS.get(schedule, 'blocks.1')}"
        fitted(job, plan, steps=1)
    assert [watch.now for watch in watches] == [0] * RANKS
    return [watch.most for watch in watches]


@pytest.mark.slow
def test_1f1b_keeps_as_much_for_any_number_of_microbatches():
    found = {number: kept("1f1b", number) for number in (4, 16, 64)}
    assert found[4] == found[16] == found[64]


@pytest.mark.slow
def test_gpipe_keeps_every_microbatch():
    """Four times as many keep as much more as four times those between 4 and 8, to the byte."""
    four, eight, sixteen, many = (kept("gpipe", number) for number in (4, 8, 16, 64))
    for rank in range(RANKS):
        one = (eight[rank] - four[rank]) / 4
        assert one > 0
        assert sixteen[rank] == four[rank] + 12 * one and many[rank] == four[rank] + 60 * one


@pytest.mark.parametrize("schedule", ["interleaved", "zb-h1", "zb-v"])
@pytest.mark.slow
def test_others_keep_as_much_for_any_number_of_microbatches(schedule: str):
    """From as many on as their bound needs."""
    assert most_in_flight(make_schedule(schedule, RANKS, 8)) == most_in_flight(
        make_schedule(schedule, RANKS, 24)
    )
    assert kept(schedule, 8) == kept(schedule, 24)
