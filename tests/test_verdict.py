"""The verdict is the first line, and does not say what is not so."""

from __future__ import annotations

import pytest

from meshloom.core.job import Evaluate
from meshloom.core.plan import Plan
from meshloom.telemetry.best_metric import BestMetric
from meshloom.verify.run import verify
from tests.jobs import make_job, vectors
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
