"""Bugs of evaluations and of what is logged."""

from __future__ import annotations

from tests.planted.fourth.editing import edit

edit(
    "ema_not_published",
    "replica/metrics.py",
    old="        put_back()\n        yield from averages.publish()\n",
    new="        put_back()\n",
    job="tables:ema",
    plan="dp=2,zero=1",
    truth=(
        "After an evaluation of the averages the replicas do not get the others' parameters back: the "
        "next step is computed with averages where another rank owns the slice."
    ),
    says="averages stay in place of them, or what other ranks have put back does not come",
)
edit(
    "step_in_metrics",
    "replica/chunk_scope.py",
    old="evaluation_seed(self._job.seed, chunk.step, chunk.index), updates)",
    new="evaluation_seed(self._job.seed, chunk.step, chunk.index), chunk.step)",
    job="noise:job",
    plan="dp=2",
    truth=(
        "In a metric meshloom.step() is the number of the evaluation's batch and not of the updates done."
    ),
    says="All metrics are those in which meshloom.step() is the number of the batch",
)
edit(
    "carried_into_evaluation",
    "replica/chunk_scope.py",
    old=(
        "        self.carried.clear()\n"
        "        with self._numbers.kept():\n"
        "            yield\n"
        "        self.carried.clear()\n"
    ),
    new="        with self._numbers.kept():\n            yield\n",
    job="remembered:job",
    plan="dp=2",
    truth="Evaluation carries the hidden state from one batch to the next.",
    says="All metrics are those of forwards that find in attributes what the forward before on their replica has left there",
    module="rnn",
)
edit(
    "metric_weight",
    "replica/metrics.py",
    old="as_sum(_as_tensor(returned), chunk.samples, needs",
    new="as_sum(_as_tensor(returned), chunk.batch, needs",
    job="tables:job",
    plan="dp=2",
    truth=(
        "A metric's mean weighs every chunk by the samples of the batch and not by its own, wrong "
        "where chunks are of different sizes."
    ),
    says="counts with weight 8, and with 4 on one device: the mean is weighted wrongly",
)
edit(
    "best_is_worst",
    "telemetry/best_metric.py",
    old='largest=which == "max"',
    new='largest=which == "min"',
    job="tables:best",
    plan="dp=2",
    truth=(
        "The best evaluation is chosen the wrong way round: best/ keeps the worst, and patience stops "
        "while the metric improves."
    ),
    says="the one after step 2 is kept as the best by right:max",
)
edit(
    "metrics_in_float32",
    "core/losses/in_precision.py",
    old="    if job.evaluate:\n",
    new="    if job.evaluate and not job.losses:\n",
    job="taking_turns:job",
    plan="dp=2,precision=bf16-mixed",
    truth=(
        "In a job of several losses metrics are not computed in the plan's precision (autocast to "
        "bfloat16) but in float32."
    ),
    says="its output is float32, and bfloat16 on one device",
)
edit(
    "logs_overlap",
    "replica/loss_sums.py",
    old="start = _LOGGED_FROM + 2 * self.names.index(name)",
    new="start = _LOGGED_FROM + self.names.index(name)",
    job="tables:logged",
    plan="dp=2",
    devices="cpu",
    truth=(
        "Sums of a second logged name are added to the place of the first one's weight: both logged "
        "values are wrong from the second step on."
    ),
    says="but not what is logged accuracy, logged largest: it is averaged in another way",
)
