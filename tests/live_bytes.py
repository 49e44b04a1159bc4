"""The bytes of all tensors that each simulated rank has at one time, from the operators that made them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from meshloom.comm.simulated import SimulatedGroup
from meshloom.comm.simulated_calls import Run
from meshloom.comm.turns import in_turns
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.core.random import preserved_draws
from meshloom.data.job_data import open_reader
from meshloom.data.team_data import open_team_reader
from meshloom.exchange.zero_three import ZeroThree
from meshloom.planner.memory.measured import LiveBytes
from meshloom.planner.rehearsal.rehearse import RehearsedRank, rehearsed_ranks
from meshloom.replica.prepare import prepare
from meshloom.replica.replica import Replica


def live_bytes(
    job: Job, plan: Plan, *, steps: int = 3, beside: Sequence[AbstractContextManager[Any]] = ()
) -> list[Mapping[str, int]]:
    """[rank]: phase -> most bytes at one time, of start-up, of the last step and between it and another. Every rank has its own copies, and nothing is
    sent: what simulated groups allocate is no rank's.

    What a rank has before it is followed counts as start-up's. beside: [rank]: a mode of its own, in which it takes the last step."""
    ranks = rehearsed_ranks(plan.mesh, False)
    found: list[dict[str, int]] = [{} for _ in ranks]
    with preserved_draws(), _unseen_sums():
        modes = beside or [nullcontext()] * len(ranks)
        in_turns(
            [
                partial(_follow, job, plan, each, found[each.context.rank], steps, modes[each.context.rank])
                for each in ranks
            ]
        )
    return list(found)


def is_followed_from_the_start(plan: Plan) -> bool:
    """Whether start-up is followed too: captures have modes of their own, and parameters that are
    described have memory behind their backs."""
    return not plan.divides_loss and plan.zero < 3


def _follow(
    job: Job,
    plan: Plan,
    rank: RehearsedRank,
    found: dict[str, int],
    steps: int,
    beside: AbstractContextManager[Any],
) -> None:
    context = rank.context
    rank.clock.begin()
    if not is_followed_from_the_start(plan):
        replica = Replica(job, plan, context)
        prepare(replica)
        watch = LiveBytes(_standing(replica))
        watch.phase = "start-up"
    else:
        watch = LiveBytes(())
        watch.phase = "start-up"
        with watch:
            replica = Replica(job, plan, context)
            prepare(replica)
    if context.team is None:
        reader = open_reader(job, plan, context.readers, 0, steps)
    else:
        reader = open_team_reader(job, plan, context.readers, context.team, 0, steps)
    try:
        with watch:
            for step in range(steps):
                chunks = reader.read(step)
                watch.phase = "step" if step == steps - 1 else "earlier"
                with beside if step == steps - 1 else nullcontext():
                    replica.step(step, chunks)
            watch.phase = "between"
            torch.zeros(())  # what is alive is looked at in operators
    finally:
        reader.close()
        replica.close()
    found |= watch.peaks


@contextmanager
def _unseen_sums() -> Iterator[None]:
    """Simulated groups compute the results of all ranks in one of their threads: not in what is followed there."""
    join = SimulatedGroup._join

    def unseen(
        self: SimulatedGroup, name: str, arguments: Any, tensors: Any, run: Run, *outputs: Tensor
    ) -> Any:
        def apart(given: list[Any]) -> Callable[[int], None]:
            with _disable_current_modes():
                deliver = run(given)

            def delivered(rank: int) -> None:
                with _disable_current_modes():
                    deliver(rank)

            return delivered

        with _disable_current_modes():
            return join(self, name, arguments, tensors, apart, *outputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimulatedGroup, "_join", unseen)
        yield


def _standing(replica: Replica) -> Iterator[Tensor]:
    for each in (*replica.model.parameters(), *replica.model.buffers()):
        if not each.is_meta:
            yield each
    for unit in replica.exchange.units if isinstance(replica.exchange, ZeroThree) else ():
        yield from (part.kept for part in unit.parts)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Blocks(nn.Module):
    """Blocks that repeat between an embedding and a head."""

    def __init__(self, width: int = 48, depth: int = 6, vocabulary: int = 101) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Residual(width) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    (tokens,) = batch
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def blocks_job(*, batch_size: int = 8, length: int = 13) -> Job:
    """A job whose parameters, state and activations are of one size."""

    def data() -> torch.utils.data.TensorDataset:
        generator = torch.Generator().manual_seed(1)
        return torch.utils.data.TensorDataset(
            torch.randint(101, (3 * batch_size, length + 1), generator=generator)
        )

    return Job(
        model=Blocks, loss=loss, optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3), data=data, batch_size=batch_size, steps=3
    )  # fmt: skip
