"""Bugs in evaluations."""

from __future__ import annotations

from tests.planted.seventh import SEVENTH

SEVENTH.edit(
    "averages_left_in_place",
    "replica/metrics.py",
    old=("        put_back()\n        yield from averages.publish()\n"),
    new="        put_back()\n",
    job="mlp:averaged",
    plan="dp=2,zero=1",
    truth=(
        "After an evaluation of averages each rank puts back its own slices and nobody sends them, so the next step computes with averages "
        "in the slices of the other rank."
    ),
    says="averages stay in place of them, or what other ranks have put back does not come",
    module="inp",
)
SEVENTH.edit(
    "second_metric_goes_on_drawing",
    "replica/metrics.py",
    old=("            for name, metric in metrics.items():\n                replica.scope.seed(moment)\n"),
    new=("            replica.scope.seed(moment)\n            for name, metric in metrics.items():\n"),
    job="metrics:noisy",
    plan="dp=2",
    devices="cpu",
    truth="torch is seeded once for all metrics of a chunk, so the second metric draws what follows the first one's draws.",
    says="whose draws go on after those of the metric before",
    module=None,
)
SEVENTH.edit(
    "newest_of_equal_is_best",
    "telemetry/best_metric.py",
    old="        better = value > self.value if self.largest else value < self.value\n",
    new="        better = value >= self.value if self.largest else value <= self.value\n",
    job="metrics:best",
    plan="dp=2",
    truth="Of equal values of the metric the newest counts as best and not the first: the best checkpoint is of a later step.",
    says="the one after step 4 is kept as the best by accuracy:max",
    module=None,
)
