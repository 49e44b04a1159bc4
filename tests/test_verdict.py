"""The verdict is the first line, the first cause the second, and neither says what is not so."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from meshloom.core.job import Evaluate, Job
from meshloom.core.plan import Plan
from meshloom.telemetry.best_metric import BestMetric
from meshloom.verify.findings import cause_lines
from meshloom.verify.reference.mistakes import Cause
from meshloom.verify.reference.reference import Reference
from meshloom.verify.reference.reruns import full_evidence, initial_evidence
from meshloom.verify.run import verify
from tests.jobs import Samples, make_job, vectors
from tests.reports import text_of


@pytest.mark.long
def test_what_is_wrong_on_both_sides_is_not_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was EQUAL, with exit code 1."""
    right = BestMetric.of
    monkeypatch.setattr(BestMetric, "of", lambda text, patience: right(text.replace("min", "max"), patience))
    metric = lambda model, batch: model(batch["x"]).square().mean()  # noqa: E731
    job = make_job(
        "mlp", "sgd", evaluate=Evaluate(vectors, {"size": metric}, every=2, best="size:min", patience=3)
    )
    report = verify(job, Plan.parse("dp=2"), devices="simulated", steps=1)
    assert report is not None and not report.passed
    first = text_of(report).splitlines()[0]
    assert (
        first.startswith("Plan and one device agree, but both are wrong: ")
        and "; on the whole batch: equal" in first
    )
    assert "EQUAL" not in text_of(report)


def test_what_a_place_in_the_run_says_behind_a_cause_is_called_a_consequence() -> None:
    place, cause = (
        Cause("resuming", "All steps before the checkpoint agree."),
        Cause("forward", "A layer differs."),
    )
    assert cause_lines([cause, place]) == [
        "  likely cause: A layer differs.", "  a consequence: All steps before the checkpoint agree."
    ]  # fmt: skip
    assert cause_lines([place, cause])[0] == "  likely cause: All steps before the checkpoint agree."


class Tied(nn.Module):
    """A frozen head that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle, self.head = nn.Embedding(7, 5), nn.Linear(5, 5), nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.embed.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.middle(self.embed(tokens)))


def test_a_tied_head_that_is_frozen_has_no_uses_to_tell_apart() -> None:
    """Evidence ended in a KeyError wherever something differed."""
    job = Job(
        model=Tied, loss=lambda model, batch: model(batch["x"]).square().mean(), batch_size=4, steps=1,
        optimizer=lambda named: torch.optim.SGD([each for _, each in named], lr=0.1), data=lambda: Samples(x=torch.randint(0, 7, (8, 3))),
    )  # fmt: skip
    reference = Reference(job, Plan(dp=2))
    reference.run()
    evidence = full_evidence(reference, initial_evidence(reference, {}))
    assert not evidence.tied and not evidence.uses
