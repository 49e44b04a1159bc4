"""Runs a cell: verification says EQUAL in float64, every rank sends the bytes that were predicted, and the plan did something."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import pytest
import torch

from meshloom.core.plan import Plan
from meshloom.replica.expected_bytes import expected_bytes
from meshloom.replica.replica import Gradients, Replica
from meshloom.telemetry.step_result import StepResult
from meshloom.telemetry.traffic import Traffic
from meshloom.train.trainer import Trainer
from meshloom.verify import verified_run
from meshloom.verify.run import verify
from meshloom.verify.step_observer import StepObserver
from tests.equality.model import Model
from tests.equality.settings import Case, is_skipped, job_of, plan_of, steps_of
from tests.reports import text_of

TRANSPORTS = "auto", "gloo"  # whether replicas may have one copy of the parameters: half of the plans


@dataclass(frozen=True)
class Rank:
    """What one rank did in a run, without what comparing it took. counted, predicted: bytes along each axis larger than 1. held,
    trained: elements of the parameters that it computes with, and of the trained ones. divided: whether it has a part of one of
    these along tp."""

    counted: Traffic
    predicted: Traffic
    held: int
    trained: int
    divided: bool


def wrong_in(model: Model, cell: Case, patch: pytest.MonkeyPatch) -> str:
    """What is wrong in a cell, as text; "" if nothing is."""
    plan, ranks = plan_of(model, cell), list[Rank]()
    with patch.context() as within:
        _watch(within, ranks)
        try:
            report = verify(
                job_of(model, cell),
                plan,
                devices="simulated",
                transport=TRANSPORTS[crc32(str(plan).encode()) % 2],
                steps=steps_of(cell),
                dtype=torch.float64,
            )
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    assert report is not None
    if not report.passed:
        return text_of(report)
    return "\n".join([*([] if is_skipped(model, cell) else _unforeseen(ranks)), *_idle(model, plan, ranks)])


def _unforeseen(ranks: Sequence[Rank]) -> Iterator[str]:
    """What ranks sent besides what was predicted."""
    for number, each in enumerate(ranks):
        if each.counted != each.predicted:
            yield f"rank {number} sent {each.counted.bytes}, and {each.predicted.bytes} was predicted"


def _idle(model: Model, plan: Plan, ranks: Sequence[Rank]) -> Iterator[str]:
    """What the plan did not do."""
    assert len(ranks) == plan.mesh.size
    for number, each in enumerate(ranks):
        if not each.held:
            yield f"rank {number} has no parameters"
    if plan.dp > 1:
        # a gradient once, in bfloat16 at least; of tables the rows in use
        least = 1 if model.sparse else 2 * sum(each.trained for each in ranks)
        if (found := sum(each.counted.total("dp") for each in ranks)) < least:
            yield f"{found} bytes were sent along dp, fewer than {least}"
    if plan.pp > 1 and not any(each.counted.bytes["pp"].get("send") for each in ranks):
        yield "no value was sent along pp"
    if plan.tp > 1 and not any(each.counted.total("tp") for each in ranks):
        yield "nothing was sent along tp"
    if plan.tp > 1 and not any(each.divided for each in ranks):
        yield "no parameter is divided along tp"


def _watch(patch: pytest.MonkeyPatch, ranks: list[Rank]) -> None:
    """Notes what ranks did in the runs of verifications."""
    compared: dict[
        int, tuple[Traffic, Traffic]
    ] = {}  # by rank: what comparing sent, and what of that was predicted

    class Apart(StepObserver):
        """Notes what comparing sends."""

        def __init__(self, replica: Replica, *rest: Any, **options: Any) -> None:
            super().__init__(replica, *rest, **options)
            self._of = replica

        def computed(self, gradients: Gradients) -> None:
            with self._counted():
                super().computed(gradients)

        def updated(self, result: StepResult) -> None:
            with self._counted():
                super().updated(result)

        @contextmanager
        def _counted(self) -> Iterator[None]:
            before = _sent(self._of), expected_bytes(self._of).after()
            yield
            after = _sent(self._of), expected_bytes(self._of).after()
            one, other = compared.get(self._of.context.rank, (Traffic(), Traffic()))
            compared[self._of.context.rank] = (
                one + after[0] + before[0] * -1,
                other + after[1] + before[1] * -1,
            )

    class Watched(Trainer):
        def close(self) -> None:
            ranks[:] = [_rank(each, self.next_step, *compared[each.context.rank]) for each in self.replicas]
            super().close()

    patch.setattr(verified_run, "StepObserver", Apart)
    patch.setattr(verified_run, "Trainer", Watched)


def _rank(replica: Replica, steps: int, compared: Traffic, predicted: Traffic) -> Rank:
    axes = [axis for axis in ("dp", "tp", "pp") if getattr(replica.plan, axis) > 1]
    return Rank(
        counted=(_sent(replica) + compared * -1).over(axes),
        predicted=(expected_bytes(replica).after(steps=steps) + predicted * -1).over(axes),
        trained=sum(each.numel() for _, each in replica.named),
        held=sum(each.numel() for each in replica.model.parameters() if not each.is_meta),
        divided=any(name in replica.shards.pieces for name, _ in replica.named),
    )


def _sent(replica: Replica) -> Traffic:
    """All that a rank has handed over, along each axis."""
    context = replica.context
    slices = (context.slices.copy, context.slices.equals) if context.slices else ()
    groups = [*context.groups.values(), context.statistics, *slices]
    return sum((Traffic.of({group.axis: group.counts}) for group in groups), Traffic())
