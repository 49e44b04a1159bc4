"""zero=2 trains what one device trains, sends what it says that it sends, and holds slices of the gradients and
a few buckets."""

from __future__ import annotations

import pytest

from meshloom.core.job import Job
from meshloom.exchange.buckets import rounds
from meshloom.exchange.buckets.gradient_bytes import held_gradients
from meshloom.exchange.buckets.scattered import ScatteredBuckets
from meshloom.exchange.shared import OneForAll
from meshloom.exchange.zero_two import ZeroTwo
from meshloom.train.trainer import Trainer
from meshloom.verify.findings import Report
from tests.jobs import make_job
from tests.reports import largest_error
from tests.verified import equals_one_device

pytestmark = pytest.mark.usefixtures("silent_export", "dear_memory")


def run(job: Job, plan: str, steps: int = 3) -> Report:
    report = equals_one_device(job, plan, steps=steps)
    assert largest_error(report) < 1e-10
    return report


class Held:
    """What a rank's buckets hold at most: bytes of its slices of gradients, of the pool and beside it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.beside = 0
        separate = rounds.separate

        def counted(extents):
            self.beside += sum(each.num_elements * each.dtype.itemsize for each in extents)
            return separate(extents)

        self._counted = counted
        self._patch = monkeypatch

    def watch(self) -> None:
        self._patch.setattr(rounds, "separate", self._counted)


def buckets_of(trainer: Trainer) -> list[ScatteredBuckets]:
    made: list[ScatteredBuckets] = []
    for replica in trainer.replicas:
        assert isinstance(replica.exchange, ZeroTwo)
        made.append(replica.exchange._scattered)
    return made


@pytest.mark.long
@pytest.mark.covering("dp=2,microbatches=3", "dp=3")
@pytest.mark.parametrize("plan", ["dp=2,microbatches=3", "dp=2,pp=2,microbatches=4", "dp=3"])
def test_a_rank_holds_its_slices_and_a_few_buckets(plan: str, monkeypatch: pytest.MonkeyPatch):
    held, text = Held(monkeypatch), f"{plan},zero=2,bucket_bytes=3000"
    with Trainer(make_job("gpt", "sgd", steps=4), text, devices="simulated") as trainer:
        for number, batch in enumerate(trainer.batches()):
            if number == 1:  # in the first step the order in which buckets are complete is not known
                held.watch()
            trainer.step(batch)
        for replica, buckets in zip(trainer.replicas, buckets_of(trainer), strict=True):
            whole = sum(each.nbytes for _, each in replica.named)
            slices = sum(each.sum.nbytes for each in buckets.buckets)
            padding = 4 * trainer.plan.dp * len(buckets.buckets)
            assert whole <= slices * trainer.plan.dp <= whole + padding
            (pool,) = (each._memory.numel() for each in buckets._rounds.pools.values())
            largest = max(each.extent.num_elements * each.extent.dtype.itemsize for each in buckets.buckets)
            assert pool <= max(4 * 3000, largest + 64)
            sizes = {name: each.nbytes for name, each in replica.named}
            predicted = sum(held_gradients(trainer.plan, sizes, sizes, replica.engine.late))
            aligned = 64 * (len(buckets.buckets) + 1)
            late = sum(sizes.get(name, 0) for name in replica.engine.late)  # a tied head's, in `.grad`
            assert predicted == pytest.approx(late + slices + pool, abs=padding + aligned)
            assert all(parameter.grad is None for _, parameter in replica.named)
    assert held.beside == 0


@pytest.mark.slow
def test_one_copy_for_all_replicas_of_a_host():
    job = make_job("gpt", "adamw")
    with Trainer(job, "dp=3,zero=2,bucket_bytes=3000", devices="simulated", share=True) as trainer:
        exchange = trainer.replicas[0].exchange
        assert isinstance(exchange, ZeroTwo) and isinstance(exchange._copies, OneForAll)
    run(job, "dp=2,microbatches=2,zero=2,bucket_bytes=300", steps=2)
