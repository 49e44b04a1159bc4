"""Bugs of updates: optimizers, clipping, schedules, averages, frozen parts, turns of losses."""

from __future__ import annotations

from tests.planted.fourth.editing import edit

edit(
    "adagrad_state",
    "optimizer/assignment.py",
    old="    return piece.cut(value)\n",
    new="    return torch.zeros_like(piece.tensor)\n",
    job="tables:adagrad",
    plan="dp=2",
    devices="cpu",
    truth=(
        "State that the optimizer's constructor made (Adagrad's initial accumulator, 0.3) is lost "
        "where ranks update slices: it starts at 0."
    ),
    says="is the one that one device makes with zeros for its state, such as what its constructor had made",
)
edit(
    "clip_replicated_tp",
    "parameters/shards.py",
    old="            return self.rank == 0\n",
    new="            return True\n",
    job="tables:clipped",
    plan="tp=2",
    truth=(
        "The norm for clipping counts parameters that are replicated over tp once per rank, so it is "
        "too large and gradients are clipped too much."
    ),
    says="a part of the model is counted more than once",
)
edit(
    "second_loss_reach",
    "optimizer/updater.py",
    old="reaches = user.reaches[start : start + count] if divided",
    new="reaches = user.reaches[:count] if divided",
    job="taking_turns:job",
    plan="dp=2,zero=1",
    truth=(
        "The second loss's optimizer (Adafactor, which looks at whole matrices) is taken for an "
        "elementwise one, gets no gradients, and the generator is not updated."
    ),
    says="and 1 more are 0 times one device's: these parameters are not updated",
    module="generator.0",
)
edit(
    "schedule_on_skip",
    "optimizer/updater.py",
    old="for scheduler in turn.schedulers if not skip else ():",
    new="for scheduler in turn.schedulers:",
    job="half_precision:job",
    plan="dp=2,precision=fp16-mixed",
    truth=(
        "Schedulers step also in steps that are skipped because gradients overflowed: the learning "
        "rate is ahead."
    ),
    says="last_epoch of scheduler 0 is 1 after step 0, and 0 on one device.",
)
edit(
    "by_metric_tried",
    "train/evaluation.py",
    old="self.evaluate(next_step, num_batches=1)\n",
    new="self.evaluate(next_step, num_batches=1, due=True)\n",
    job="tables:by_metric",
    plan="dp=2",
    truth=(
        "The trial evaluation before the first step steps the ByMetric scheduler, so it is one step "
        "ahead, with a value of one batch."
    ),
    says="seen of scheduler 0 is 1 after step 0, and 0 on one device.",
)
edit(
    "by_hand_late",
    "core/moments/by_hand.py",
    old="        self._steps += 1\n        self._set_rates(self._steps)\n\n    def state",
    new="        self._set_rates(self._steps)\n        self._steps += 1\n\n    def state",
    job="tables:hand",
    plan="dp=2",
    truth=(
        "A schedule by hand is one step late: it is called with the number of the step that has been done."
    ),
    says=(
        "the optimizer's settings do not: lr of group 0 of optimizer 0 is 0.02 after step 0, and "
        "0.014 on one device."
    ),
)
edit(
    "ema_on_skip",
    "optimizer/optimizer_state.py",
    old="if self.averages and not skipped:",
    new="if self.averages:",
    job="half_precision:average",
    plan="dp=2,precision=fp16-mixed",
    truth="The averages of the parameters move also in steps that are skipped because of overflow.",
    says="they have begun as the parameters of before this update, in a step that made no update or before the first",
)
edit(
    "unused_as_zero",
    "optimizer/full_from_slices.py",
    old="parameter.grad = whole[part.parameter] if used[part.parameter] else None",
    new="parameter.grad = whole[part.parameter]",
    job="tables:adafactor",
    plan="dp=2,zero=1",
    truth=(
        "A frozen (unused) parameter gets a gradient of zeros in place of none where an optimizer of "
        "whole matrices gets it from slices: it is decayed and gets state."
    ),
    says="changed under the plan differently than on one device, without a gradient",
    module="block1",
)
edit(
    "thaws_early",
    "core/losses/frozen.py",
    old="if not (frozen := self.at(step)):",
    new="if not (frozen := self.at(step + 1)):",
    job="tables:frozen_one",
    plan="tp=2",
    truth=(
        "Where a program runs, a parameter that is frozen until step 3 is trained in the last step in "
        "which it should be frozen (off by one)."
    ),
    says="a gradient under the plan and none on one device, as the job freezes it in this step",
    module="block1",
)
edit(
    "prefix_frozen",
    "core/objectives.py",
    old='name.startswith(f"{text}.")',
    new="name.startswith(text)",
    job="tables:frozen_one",
    plan="dp=2",
    devices="cpu",
    truth="Freezing block1 freezes block10, too: names are compared by prefix.",
    says="none under the plan, as if frozen, which the job does not do in this step",
    module="block10",
)
edit(
    "rounding_in_slices",
    "optimizer/bfloat16/stochastic.py",
    old="index = torch.arange(slice_.start, slice_.stop, device=value.device)",
    new="index = torch.arange(slice_.stop - slice_.start, device=value.device)",
    job="half_precision:masters",
    plan="dp=2,zero=1,precision=bf16-stochastic",
    truth=(
        "Stochastic rounding numbers elements from the start of the slice and not of the parameter: a "
        "slice that begins within a parameter is rounded with other draws."
    ),
    says="they are rounded by other draws",
    module="two",
)
edit(
    "every_off_by_one",
    "core/losses/turns.py",
    old="if (step + 1) % each.every == 0:",
    new="if step % each.every == 0:",
    job="taking_turns:job",
    plan="dp=2",
    truth=(
        "A loss with every=2 has its turn in the steps before the right ones (0, 2, ... in place of "
        "1, 3, ...)."
    ),
    says="The plan is in step 0, loss generator, and one device in step 1, loss critic.",
)
edit(
    "closure_draws",
    "replica/replica.py",
    old="yield from replica.gradients(found.step, found.chunks)",
    new="yield from replica.gradients(found.step + 1, found.chunks)",
    job="tables:lbfgs_frozen",
    plan="dp=2",
    truth=(
        "An optimizer's further evaluations of the loss within a step (LBFGS) are as of the next "
        "step: what is frozen until then gets gradients and is updated one step early."
    ),
    says="block1.weight, block1.bias change, which the job freezes in this step and which have no gradients: further evaluations of the loss",
    module="block1",
)
