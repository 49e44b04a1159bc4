"""zero=3 where captured programs run: with tp, pp and recomputation, under every schedule; and what ranks hold, there and elsewhere."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from meshloom.core.errors import TrainingError
from meshloom.exchange.units.unit_slices import UnitFlat
from meshloom.exchange.zero_three import ZeroThree
from meshloom.train.trainer import Trainer
from tests.covering import slow
from tests.processes import on_ranks
from tests.test_zero_three import on_gloo, runs, trained
from tests.verified import equals_one_device
from tests.zero_three_jobs import Blocks, unit_job

BLOCKS = "tp=2,tp_placements=blocks.*.up:column+blocks.*.down:row"


def holds(kind: str, plan: str, **job: Any) -> None:
    equals_one_device(unit_job(kind, **job), plan)


@pytest.mark.slow
def test_one_operator_uses_several_units() -> None:
    """Along tp the layers of all decoder blocks that read an encoder's output are one operator, which saves its weights when it
    has read the last of them: gradients of the encoder were not finite."""
    holds("read", f"dp=2,{BLOCKS}+first:column,zero=3")


@pytest.mark.long
@pytest.mark.parametrize(
    "plan",
    [
        "dp=2,zero=3,microbatches=2",
        slow(f"dp=2,{BLOCKS},zero=3,microbatches=2"),
        slow("dp=2,pp=2,zero=3,microbatches=4,recompute=full"),
        slow("dp=2,pp=2,zero=3,microbatches=4"),
        slow("dp=2,pp=2,zero=3,microbatches=4,schedule=gpipe"),
        slow("dp=2,zero=3,recompute=selective"),
    ],
)
def test_nobody_holds_more_than_slices_the_rest_and_two_units(
    plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every full tensor of a rank is counted, of values and of gradients, as long as anything refers to its
    memory."""
    made: dict[int, list[tuple[StorageWeakRef, int]]] = {}
    most: dict[int, int] = {}
    rank_of: dict[int, int] = {}  # of a flat tensor's layout
    plain = UnitFlat.full

    def counted(self: UnitFlat) -> Tensor:
        flat, rank = plain(self), rank_of[id(self)]
        alive = [each for each in made.get(rank, []) if not each[0].expired()]
        made[rank] = [*alive, (StorageWeakRef(flat.untyped_storage()), flat.nbytes)]
        most[rank] = max(most.get(rank, 0), sum(size for _, size in made[rank]))
        return flat

    job = replace(unit_job("blocks"), model=partial(Blocks, 6))
    with Trainer(job, plan, devices="simulated") as trainer:
        sizes: list[list[int]] = []
        for rank, replica in enumerate(trainer.replicas):
            exchange = replica.exchange
            assert isinstance(exchange, ZeroThree)
            rank_of |= {id(part): rank for unit in exchange.units for part in unit.parts}
            rest = [
                sum(part.num_bytes for part in unit.parts) for unit in exchange.units if unit.module is None
            ]
            blocks = [sum(part.num_bytes for part in unit.parts) for unit in exchange.units if unit.module]
            assert len(blocks) > 2
            sizes.append([sum(rest), max(blocks), sum(blocks)])
        monkeypatch.setattr(UnitFlat, "full", counted)
        for batch in trainer.batches():
            trainer.step(batch)
        for rank, (rest, block, _) in enumerate(sizes):
            # values and gradients of the rest and of two units each
            least = 2 * block + (0 if trainer.plan.divides_loss else rest)
            assert least < most[rank] <= 2 * (rest + 2 * block), (rank, most[rank], rest, block)
            assert all(each[0].expired() for each in made[rank])
        for replica, (rest, _, blocks) in zip(trainer.replicas, sizes, strict=True):
            exchange = replica.exchange
            assert isinstance(exchange, ZeroThree)
            kept = sum(part.kept.nbytes for unit in exchange.units for part in unit.parts)
            assert kept == (rest + blocks) / 2
            held = [each for each in replica.model.parameters() if not each.is_meta]
            assert sum(each.untyped_storage().nbytes() for each in held) == 4 * len(held)  # one number each


@pytest.mark.long
def test_the_first_step_of_a_program_gathers_what_later_ones_do() -> None:
    """Looking where values lie gathered units again in the first run of a segment that uses several: of ranks along tp whose segments
    end at different places one waited in a sum along tp while the other was in a round."""
    summary, _ = trained("dp=2,zero=3,recompute=selective", steps=2, units=[nn.Linear])
    assert summary.predicted == summary.counted


@pytest.mark.slow
def test_ranks_that_drift_apart_are_found() -> None:
    with Trainer(unit_job("tied", steps=1), "dp=2,pp=2,zero=3", devices="simulated") as trainer:
        exchange = trainer.replicas[3].exchange
        assert isinstance(exchange, ZeroThree)
        (borrowed,) = (
            each for each in exchange.each_slice(borrowed=True) if each.name == "blocks.0.up.weight"
        )
        assert not any(each.name == borrowed.name for each in exchange.ownership.owned)
        for replica in trainer.replicas:
            replica.engine.ownership.lend = lambda *held: iter(())  # type: ignore[attr-defined]
        with pytest.raises(TrainingError, match=".*weight differs between ranks pp=0 and pp=1"):
            trainer.fit()


@pytest.mark.long
@pytest.mark.parametrize("plan", ["dp=2,zero=3", slow(f"dp=2,{BLOCKS},zero=3,recompute=full")])
def test_units_are_the_users(plan: str) -> None:
    _, chosen = trained(plan, "again", units=["blocks.1", nn.LayerNorm])
    _, none = trained(plan, "again", units=())
    assert all(torch.allclose(chosen[name], none[name], rtol=1e-12) for name in none)


PROCESSES = ["dp=2,pp=2,zero=3,microbatches=3,recompute=full", f"dp=2,{BLOCKS},zero=3,microbatches=2"]


def on_one_copy(plans: list[str], kinds: list[str]) -> list[list[float]]:
    return runs(plans, kinds, devices="cpu", share=True)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("run", [on_gloo, on_one_copy])
def test_processes_compute_what_simulated_ranks_do(run: Any) -> None:
    kinds = ["tied"] * len(PROCESSES)
    found = on_ranks(run, 4, PROCESSES, kinds, timeout_seconds=120.0)
    for ours, theirs in zip(found[0], runs(PROCESSES, kinds, devices="simulated"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9)  # float64; sums over ranks have no order
