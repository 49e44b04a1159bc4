"""Bugs in updates, schedules and averages."""

from __future__ import annotations

from tests.planted.ninth import NINTH

NINTH.edit(
    "norm_over_owners_or_holders",
    "optimizer/clipping.py",
    old="for group in (*([owners] if owners is not None else []), *holders):",
    new="for group in [owners] if owners is not None else holders:",
    job="plain:clipped",
    plan="dp=2,pp=2,zero=1,cuts=2",
    truth=(
        "With owners along dp (zero=1) the norm that is clipped is not added up over pipeline stages: each stage clips "
        "by the norm of its own parameters, so it clips less than one device."
    ),
    says="but their norm, by which they are clipped, is 0.207704 instead of 0.635461: a part of the model is left out",
)

NINTH.edit(
    "schedulers_of_all_losses",
    "optimizer/updater.py",
    old="        for scheduler in turn.schedulers if not skip else ():",
    new="        for scheduler in self.schedulers if not skip else ():",
    job="plain:two_losses",
    plan="dp=2",
    truth=(
        "In a job of several losses every turn steps the schedulers of all losses instead of those of its own, so "
        "learning rates fall three times as fast."
    ),
    says="what schedulers keep does not: last_epoch of scheduler 1 is 1 after step 0, and 0 on one device",
)

NINTH.edit(
    "window_forgets_its_first",
    "optimizer/offload/windows.py",
    old="range(before.start if before else index, index + 1)",
    new="range(before.start or index, index + 1)",
    job="plain:large",
    plan="dp=2,offload=optimizer",
    truth=(
        "With offload=optimizer and several windows, a window that begins with the first parameter of a group forgets "
        "it when the second is added: that parameter (0.weight) is never updated."
    ),
    says="the updates of 0.weight are 0 times one device's: these parameters are not updated",
    module="0",
)

NINTH.edit(
    "initial_state_cut_to_zeros",
    "optimizer/assignment.py",
    old="    return piece.cut(value)",
    new="    return torch.zeros_like(piece.tensor)",
    job="plain:adagrad",
    plan="dp=2,zero=1",
    truth=(
        "State that an optimizer's constructor made (Adagrad's initial accumulator, 0.2) is replaced by zeros where an "
        "optimizer updates slices, so steps are too large from the first one on."
    ),
    says="with zeros for its state, such as what its constructor had made",
)

NINTH.edit(
    "keepers_give_zero_gradients",
    "optimizer/full_from_slices.py",
    old="parameter.grad = whole[part.parameter] if used[part.parameter] else None",
    new="parameter.grad = whole[part.parameter]",
    job="routed:muon",
    plan="dp=2,zero=1",
    truth=(
        "Where a full parameter is updated by a keeper (Muon under zero=1), one that no rank has used gets a gradient "
        "of zeros instead of none: weight decay and momentum move it."
    ),
    says="experts.0.weight: changed under the plan differently than on one device, without a gradient",
    module="experts.0",
)

NINTH.edit(
    "closures_evaluate_old_shards",
    "optimizer/updater.py",
    old="        if self._assignment.from_shards:\n            yield from self._assignment.from_shards.give_back()\n        gradients, loss = yield from evaluate()",
    new="        gradients, loss = yield from evaluate()",
    job="divided:searched",
    plan="tp=2,tp_placements=a:column+b:row",
    truth=(
        "An optimizer with a closure (LBFGS) under tp evaluates the loss again without its moved parameters being "
        "written to the shards: divided parameters are evaluated at the values of the step's beginning."
    ),
    module="a",
)

NINTH.edit(
    "frozen_by_first_name",
    "core/losses/frozen.py",
    old="return {name for name, ranges in self._ranges.items() if any(step in steps for steps in ranges)}",
    new="return {name for name, ranges in self._ranges.items() if step in next(iter(ranges), ())}",
    job="plain:thawing",
    plan="dp=2,zero=1",
    truth=(
        "Of a parameter that Job(frozen=...) names twice (2.weight: range(2), 2: range(4, 7)) only the first range "
        "counts, so 2.weight is trained in steps 4 to 6, in which its module is frozen."
    ),
    says="2.weight: a gradient under the plan and none on one device, as the job freezes it in this step",
    module="2",
)

NINTH.edit(
    "averages_stay_where_not_owned",
    "replica/metrics.py",
    old="        yield from averages.publish()\n        yield from replica.engine.refresh_borrowed()",
    new="        yield from replica.engine.refresh_borrowed()",
    job="plain:averaged",
    plan="dp=2,zero=1",
    truth=(
        "After an evaluation of averaged parameters under zero=1 owners put their own values back but do not publish "
        "them: each rank keeps the averages of what other ranks own, and computes the next step's gradients with that "
        "mixture."
    ),
    says="averages stay in place of them, or what other ranks have put back does not come",
    module="0",
)
