"""Bugs in evaluations."""

from __future__ import annotations

from tests.planted.sixth import SIXTH

SIXTH.edit(
    "metrics_weight_chunks_equally",
    "replica/metrics.py",
    old='as_sum(_as_tensor(returned), chunk.samples, needs_gradient=False, who="The metric")',
    new='as_sum(_as_tensor(returned), 1, needs_gradient=False, who="The metric")',
    job="tiles:job",
    plan="dp=2,microbatches=2",
    truth="A metric that is a mean counts every chunk alike, however many samples it has.",
    says="counts with weight 1, and with 3 on one device",
    module=None,
)
SIXTH.edit(
    "trial_evaluation_steps_schedulers",
    "train/evaluation.py",
    old="self.evaluate(next_step, num_batches=1)",
    new="self.evaluate(next_step, num_batches=1, due=True)",
    job="shopping:job",
    plan="dp=2,zero=1",
    truth="The evaluation of one batch by which metrics are tried before the first step steps the schedulers that go by a metric.",
    says="last_epoch of scheduler 1 is 1 after step 0, and 0 on one device",
    module=None,
)
SIXTH.edit(
    "borrowers_evaluate_without_averages",
    "replica/metrics.py",
    old=(
        "        replica.updating = replica.plan.dp > 1  # until what this rank does not own is back, too\n        try:\n"
        "            yield from replica.engine.refresh_borrowed()\n"
    ),
    new="        replica.updating = replica.plan.dp > 1\n        try:\n",
    job="letters:averaged",
    plan="pp=2,microbatches=2",
    truth="While averages are evaluated, a stage that borrows a tied parameter still has its trained value instead of the average.",
    says="averages are not lent",
    module=None,
)
