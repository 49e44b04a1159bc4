"""Bugs in updates, averages and schedules."""

from __future__ import annotations

from tests.planted.eighth import EIGHTH

EIGHTH.edit(
    "values_not_sent_back_beside_joint_optimizer",
    "optimizer/full_from_slices.py",
    old="any(len(ranks) < group.size for ranks in self._keepers)",
    new="all(len(ranks) < group.size for ranks in self._keepers)",
    job="mlps:pair",
    plan="dp=2,zero=1",
    truth=(
        "Where one optimizer keeps its parameters on every rank, updated values of parameters that only one rank keeps "
        "(Adafactor's) are not sent back to the owners of their slices: those slices never change."
    ),
    says="leaves 373 elements of mid.weight",
    module="mid",
)
EIGHTH.edit(
    "average_rate_swapped",
    "optimizer/averages.py",
    old="[each.tensor.data for each in self.held], owned, 1 - self._decay)",
    new="[each.tensor.data for each in self.held], owned, self._decay)",
    job="mlps:averaged",
    plan="dp=2",
    truth=(
        "The moving averages of parameters move by decay instead of 1 - decay towards the parameters, so they follow far too "
        "fast; evaluations of the averages are wrong, training is right."
    ),
    says="they move with another decay",
    module="inp",
)
EIGHTH.edit(
    "clipping_scales_up",
    "optimizer/clipping.py",
    old="(largest / (norm + 1e-6)).clamp(max=1.0)",
    new="largest / (norm + 1e-6)",
    job="gpt:gentle",
    plan="dp=2",
    truth="The clipping factor is not limited to 1: gradients whose norm is below clip_grad_norm are scaled up to it.",
    says="gradients whose norm is scaled up to the limit of 50",
    module="blocks.0.attn.q",
)
EIGHTH.edit(
    "trial_of_one_step",
    "optimizer/elementwise.py",
    old="for step in range(len(_SCALES)):",
    new="for step in range(1):",
    job="mlps:late",
    plan="dp=2,zero=1",
    truth=(
        "The trial whether an optimizer updates each element by itself takes one step, so an optimizer that looks at whole "
        "parameters only from its third step on counts as elementwise and is given slices, whose norms it then takes."
    ),
    module="mid",
)
EIGHTH.edit(
    "closure_fetches_old_shards",
    "optimizer/updater.py",
    old="            yield from self._assignment.from_shards.give_back()\n",
    new="            self._assignment.from_shards.invalidate()\n",
    job="mlps:lbfgs",
    plan="tp=2,tp_placements=inp:column+mid:row",
    truth=(
        "When LBFGS evaluates the loss again within a step, its moved values are not given back to the shards along tp; the "
        "keepers fetch the shards' old values instead, so all evaluations are at the same point."
    ),
    module="inp",
)
EIGHTH.edit(
    "by_metric_without_function",
    "core/moments/by_metric.py",
    old="self.scheduler.step(float(self.of(value)) if self.of else value)",
    new="self.scheduler.step(value)",
    job="mlps:by_metric",
    plan="dp=2",
    truth=(
        "A ByMetric scheduler is stepped with the metric itself and not with what its function `of` makes of it (exp), so it "
        "decides otherwise and the learning rate falls at other steps."
    ),
)
EIGHTH.edit(
    "state_mapped_privately",
    "optimizer/offload/state_file.py",
    old="length, mmap.MAP_SHARED, offset=self._size)",
    new="length, mmap.MAP_PRIVATE, offset=self._size)",
    job="mlps:job",
    plan="dp=2,offload=optimizer",
    truth=(
        "The file of offloaded optimizer state is mapped privately, so what an update wrote is lost when pages are given "
        "back: large state tensors (of mid.weight) are zeros again before every update."
    ),
    says="makes with zeros for its state",
    module="mid",
)
EIGHTH.edit(
    "every_turn_steps_all_schedulers",
    "optimizer/updater.py",
    old="for scheduler in turn.schedulers if not skip else ():",
    new="for scheduler in self.schedulers if not skip else ():",
    job="gan:job",
    plan="dp=2",
    truth=(
        "In a job of several losses each turn steps the schedulers of all losses and not those of its own, so learning rates "
        "fall three times as fast as they should."
    ),
    says="lr of group 0 of optimizer 1 is 0.0045 after step 0",
)
