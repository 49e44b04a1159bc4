"""Bugs in evaluations."""

from __future__ import annotations

from tests.planted.eighth import EIGHTH

EIGHTH.edit(
    "evaluation_data_told_epoch",
    "data/map_data.py",
    old='if request.epoch != EVALUATION and hasattr(self._dataset, "set_epoch"):',
    new='if hasattr(self._dataset, "set_epoch"):',
    job="reading:job",
    plan="dp=2",
    truth=(
        "The evaluation dataset's set_epoch is called with the internal number -1, so data that depends on its epoch is "
        "other data; metrics are wrong, training is right."
    ),
)
EIGHTH.edit(
    "root_evaluated_in_training_mode",
    "core/moments/modes.py",
    old="        self._model.eval()\n        try:",
    new="        for child in self._model.children():\n            child.eval()\n        try:",
    job="convs:rooted",
    plan="dp=2",
    truth=(
        "In evaluations only the children of the model are put into evaluation mode; the model itself says training=True, so "
        "what its own forward does in training alone (a factor, a counter) is done in evaluations."
    ),
    says="the model is in training mode in the evaluation",
)
EIGHTH.edit(
    "last_evaluation_steps_schedulers",
    "train/synchronous.py",
    old="self._evaluated = self.evaluate(due=self.next_step % given.every == 0)",
    new="self._evaluated = self.evaluate(due=True)",
    job="mlps:seldom_measured",
    plan="dp=2",
    truth=(
        "The evaluation after the last step steps schedulers that go by a metric also where it is not due, so the state in "
        "the last checkpoint is one evaluation ahead, and a run that goes on from it has other learning rates."
    ),
    says="schedulers that go by a metric are stepped all the same",
)
