"""Causes of what lies around gradients: keys of draws, schedules, averages, buffers, owners of slices, and the order in which they are told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import meshloom.core.random as draws
from meshloom.core.plan import Plan
from meshloom.verify.between_steps.averages import AverageErrors
from meshloom.verify.between_steps.checks import DifferingTensor
from meshloom.verify.causes.of_buffers import cause_of_buffer
from meshloom.verify.causes.of_reruns import of_owners
from meshloom.verify.causes.of_updates import KeptUpdate
from meshloom.verify.program_causes import InPrograms, in_order
from meshloom.verify.reference.between_steps.positions import mistakes_on_both_sides
from meshloom.verify.reference.mistakes import Cause, ChunkGradients, Evidence
from meshloom.verify.reference.reference import Reference
from meshloom.verify.reference.step_records import StepRecord, settings_of, with_equal_losses
from tests.jobs import make_job

KEYED = Plan.parse("dp=2,keyed_draws=true")


def test_draws_of_one_key_are_a_mistake_on_both_sides(monkeypatch: pytest.MonkeyPatch):
    job = make_job("mlp", "sgd")
    assert not [*mistakes_on_both_sides(job, KEYED)]
    right = draws.KeyedDraws.__torch_dispatch__

    def without_advance(
        self: Any, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = torch.default_generator.initial_seed()
        drawn = right(self, func, types, args, kwargs)
        draws.seed_torch(before)
        return drawn

    monkeypatch.setattr(draws.KeyedDraws, "__torch_dispatch__", without_advance)
    assert "have one key" in next(mistakes_on_both_sides(job, KEYED))


def record(**given: Any) -> StepRecord:
    return StepRecord(step=1, loss=1.0, weight=1.0, gradient_norm=None, gradients={}, chunks=[], **given)


def test_what_schedulers_keep_is_a_setting_and_their_losses_may_be_rounded():
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=3)
    plateau.step(2.0)
    found = settings_of([optimizer], [plateau])
    assert (found["lr of group 0 of optimizer 0"], found["best of scheduler 0"]) == (0.5, 2.0)
    right = record(settings=[found])
    near, far = ({**found, "best of scheduler 0": each} for each in (2.000001, 2.1))
    settled = with_equal_losses(record(settings=[near, far]), right, 1e-5)
    assert [each["best of scheduler 0"] for each in settled.settings] == [2.0, 2.1]


@pytest.mark.parametrize(
    ("way", "says"),
    [
        ("late", "towards the parameters of before the update."),
        ("missed", "they miss this update, and are as they were before it."),
        ("again", "they have moved once more than there were updates."),
    ],
)
def test_averages_that_move_otherwise_are_named(way: str, says: str):
    errors, parameter = AverageErrors(0.7), nn.Parameter(torch.arange(4.0))
    values: list[torch.Tensor] = []
    for step in range(3):
        values.append(parameter.detach().clone())
        with torch.no_grad():
            parameter.add_(torch.tensor([1.0, -2.0, 0.5, 3.0]) * (step + 1))
        errors.begin({"w": parameter}, {"w": values[-1]})
    right = errors.values["w"]
    before = 0.7 * values[1] + 0.3 * values[2]
    now = parameter.detach()
    ours = {"late": 0.7 * before + 0.3 * values[2], "missed": before, "again": 0.7 * right + 0.3 * now}
    errors.compare("w", ours[way], 2, 1e-6)
    cause = errors.cause()
    assert cause is not None and cause.sentence.endswith(says)


def test_averages_that_begin_in_a_step_without_an_update_are_named():
    errors, before = AverageErrors(0.7), torch.arange(4.0)
    parameter = nn.Parameter(before + torch.tensor([1.0, -2.0, 0.5, 3.0]))
    errors.begin({"w": parameter}, {"w": before})
    errors.compare("w", 0.7 * before + 0.3 * parameter.detach(), 0, 1e-6)
    cause = errors.cause()
    assert cause is not None and "in a step that made no update" in cause.sentence


@pytest.mark.parametrize(
    ("times", "says"),
    [(0.9, "a variance of 10 values that is divided by 10"), (0.0, "it is lost"), (2.0, "another momentum")],
)
def test_a_running_variance_that_moves_otherwise(times: float, says: str):
    start, batch = torch.rand(7, dtype=torch.float64), torch.rand(7, dtype=torch.float64) + 0.5
    right, ours = (0.8 * start + 0.2 * k * batch for k in (1.0, times))
    found = cause_of_buffer(
        DifferingTensor(name="norm.running_var", kind="buffer", step=0, plan=ours, one_device=right),
        SimpleNamespace(_initial={"norm.running_var": start}),  # pyright: ignore[reportArgumentType]
    )
    assert found is not None and says in found.sentence


def test_slices_that_are_each_owners_own_are_named():
    plan = Plan.parse("dp=2,zero=1")
    parts = [
        torch.randn(40, dtype=torch.float64, generator=torch.Generator().manual_seed(each)) for each in (1, 2)
    ]
    chunks = [
        ChunkGradients(chunks=[number], weight=3.0, gradients={"w": each})
        for number, each in enumerate(parts)
    ]
    right = (parts[0] + parts[1]) / 6
    ours = torch.cat([parts[0][:20] / 6, parts[1][20:] / 6])
    found = of_owners(Evidence(plan=plan, norms={}, chunks=chunks, tied={}), {"w": ours}, {"w": right})
    assert found is not None and "50% of replica 0, 50% of replica 1" in found.sentence
    assert (
        of_owners(Evidence(plan=plan, norms={}, chunks=chunks, tied={}), {"w": right + 0.1}, {"w": right})
        is None
    )


def test_an_update_of_gradients_that_are_not_clipped_is_named():
    job = make_job("mlp", "adamw", clip_grad_norm=0.01)
    reference = Reference(job, Plan.parse("dp=2"))
    reference.run()
    kept = KeptUpdate.of(reference, None)
    assert kept is not None
    other = Reference(make_job("mlp", "adamw", clip_grad_norm=1e9), Plan.parse("dp=2"))
    for each in (reference, other):
        if each is other:
            each.run()
        result = each.update()
        if each is reference:
            of_step = result
    name = next(iter(reference.parameters))
    differing = DifferingTensor(
        name=name,
        kind="update",
        step=0,
        plan=other.parameters[name].detach(),
        one_device=reference.parameters[name].detach(),
    )
    cause = kept.cause(differing, of_step)
    assert cause is not None and "of gradients that are not clipped" in cause.sentence


def test_what_explains_the_numbers_comes_before_where_a_step_is_in_the_run():
    special = Cause("resuming", "After resuming.")
    vague, forward = Cause("optimizer", "Settings differ."), Cause("forward", "A layer differs.")
    explained = Cause("optimizer", "Twice the rate.", explains=True)
    assert in_order([vague], special, [], resumed=False)[0] is special
    assert in_order([explained], special, [], resumed=True)[0] is explained
    assert in_order([forward], special, [], resumed=False)[0] is forward
    assert in_order([forward], special, [], resumed=True)[0] is special
    right = InPrograms(causes=[Cause("division", "All agree.")], are_right=True)
    assert right.before([explained])[0] is explained and right.before([vague])[0] is right.causes[0]
