"""Memory of comparing a program with eager: predicted for the rank that captures, and what tensors take there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from meshloom.data.samples import first_batches
from meshloom.parameters.unfilled_model import UnfilledModel, unfilled_model
from meshloom.parameters.values.building import described
from meshloom.planner.memory.comparison import compared_program, comparison_bytes
from meshloom.planner.memory.measured import LiveBytes
from meshloom.planner.readings import Readings
from meshloom.program.capture.capture import capture
from meshloom.program.capture.check import check_against_module
from meshloom.program.capture.shapes import capture_shapes
from meshloom.program.sizes import any_size as rules
from tests.live_bytes import Blocks, blocks_job

pytestmark = [pytest.mark.usefixtures("silent_export")]


@pytest.mark.parametrize("at_smaller_sizes", [False, True])
@pytest.mark.slow
def test_a_comparison_takes_what_is_predicted(at_smaller_sizes: bool, monkeypatch: pytest.MonkeyPatch):
    """Six blocks that are made alike take the memory of one. Before, start-up was predicted with the activations of the
    whole batch where a batch of 32 tokens is compared."""
    monkeypatch.setattr(rules, "MIN_ELEMENTS", 0 if at_smaller_sizes else 2**40)
    job, samples = blocks_job(length=160), 4
    predicted = Readings(job).comparison_bytes(samples)
    batches = first_batches(job, 2, samples)
    program = capture(job, (batches[0], batches[1]))
    compared = compared_program(program, job, batches[0], lambda small: capture(job, (small, small)))
    assert (compared is program) != at_smaller_sizes
    if at_smaller_sizes:
        shape = compared.inputs[0].meta.shape
        batches = [[each[0][:, : shape[1]]] for each in batches]
    unfilled = unfilled_model(lambda: described(job.model), torch.device("cpu"))
    assert isinstance(unfilled, UnfilledModel)
    with unfilled.standing_in():
        watch = LiveBytes([*unfilled.model.parameters(), *(each[0] for each in batches[:1])])
        with watch:
            check_against_module(compared, unfilled.model, job.loss, batches[:1])
    live = watch.peaks[watch.phase]
    assert 0.9 * live <= predicted <= 1.2 * live, (predicted, live)
    whole = sum(each.nbytes for each in unfilled.model.parameters())
    assert predicted - comparison_bytes(compared) == unfilled.stand_in_bytes < whole / 3


class WithConstant(Blocks):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + torch.tensor([0.5])


@pytest.mark.slow
def test_a_constant_of_a_program_by_shapes_has_no_values(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rules, "MIN_ELEMENTS", 0)
    job = replace(blocks_job(length=160), model=WithConstant)
    (batch,) = first_batches(job, 1, 4)
    program = capture_shapes(job, batch)
    assert program.constants
    compared = compared_program(program, job, batch, lambda small: capture_shapes(job, small))
    assert compared.inputs[0].meta.shape[1] < 50
