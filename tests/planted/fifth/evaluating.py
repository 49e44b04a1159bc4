"""Bugs of evaluations, of the best value, and of what is logged."""

from __future__ import annotations

from tests.planted.fifth.listing import edit

edit(
    "log_of_chunks",
    "replica/loss_sums.py",
    old=("        pair[0].add_(value * weight)\n        pair[1].add_(weight)"),
    new=("        pair[0].add_(value)\n        pair[1].add_(1)"),
    job="small_jobs/wide_rows:logged",
    plan="dp=3",
    truth=(
        "A logged value is the mean over chunks, not weighted by their samples: uneven shares (3, "
        "3, 2) count alike."
    ),
    says="not what is logged acc: it is averaged in another way",
)

edit(
    "metric_weighed_by_batch",
    "replica/metrics.py",
    old="as_sum(_as_tensor(returned), chunk.samples,",
    new="as_sum(_as_tensor(returned), chunk.batch,",
    job="jobs/noisy_pictures:job",
    plan="dp=2,microbatches=2",
    truth=(
        "A metric that is a mean is weighed by the samples of the whole batch instead of those of "
        "its chunk, which is wrong where chunks are uneven."
    ),
    says=(
        "accuracy of chunk 0 of batch 0 counts with weight 12, and with 3 on one device: the mean "
        "is weighted wrongly"
    ),
)

edit(
    "evaluation_drops_last_batch",
    "data/map_data.py",
    old="    starts = range(0, len(dataset), size)[:num_batches]",
    new="    starts = range(0, len(dataset) - size + 1, size)[:num_batches]",
    job="jobs/growing_batches:job",
    plan="dp=2",
    truth="The short last batch of the evaluation data is not evaluated.",
    says="Chunk 0 of batch 2 of the evaluation is not evaluated under the plan",
)

edit(
    "patience_forgotten_on_resume",
    "telemetry/best_metric.py",
    old='        return replace(self, value=value, step=int(saved["step"]), waited=int(saved["waited"]))',
    new='        return replace(self, value=value, step=int(saved["step"]))',
    job="jobs/growing_batches:impatient",
    plan="dp=2",
    truth=(
        "After resuming, the evaluations without a better value so far are forgotten: patience "
        "begins anew, and training stops later."
    ),
    says="ce:min has waited for 1 since step 3, not for 2 since 3",
)

edit(
    "equal_value_is_better",
    "telemetry/best_metric.py",
    old="        better = value > self.value if self.largest else value < self.value",
    new="        better = value >= self.value if self.largest else value <= self.value",
    job="jobs/noisy_pictures:job",
    plan="dp=2,microbatches=2",
    truth=(
        "An evaluation that equals the best one takes its place (and starts patience anew): of "
        "equal values the first should be best."
    ),
    says=(
        "Of evaluations of [0.5, 0.25, 0.75, 0.75, 0.5] the one after step 4 is kept as the best "
        "by accuracy:max"
    ),
)

edit(
    "parameters_stay_averages",
    "optimizer/averages.py",
    old="        own = [each.read().clone() for each in slices]",
    new="        own = [each.read() for each in slices]",
    job="jobs/growing_batches:job",
    plan="dp=2,microbatches=2",
    truth=(
        "After an evaluation the parameters stay replaced by their averages, because their own "
        "values were not copied: training goes on from the averages."
    ),
    says="averages stay in place of parameters",
)

edit(
    "metrics_in_float32",
    "core/losses/in_precision.py",
    old=("    if job.evaluate:\n        metrics"),
    new=("    if job.evaluate and job.losses:\n        metrics"),
    job="jobs/tied_halves:job",
    plan="dp=2,precision=bf16-mixed",
    truth="Metrics are evaluated in float32 instead of under autocast to bfloat16.",
    says=("the output of one is the first that differs: its output is float32, and bfloat16 on one device"),
)

edit(
    "logged_without_weights",
    "replica/loss_sums.py",
    old=("        pair[0].add_(value * weight)\n        pair[1].add_(weight)"),
    new=("        pair[0].add_(value)\n        pair[1].add_(1.0)"),
    job="jobs/flowing:job",
    plan="dp=2",
    truth="Logged values are averaged over chunks without their weights (samples).",
    says="not what is logged size: it is averaged in another way",
)
