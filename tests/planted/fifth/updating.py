"""Bugs of updates: clipping, optimizers, schedules, frozen parameters, turns of losses."""

from __future__ import annotations

from tests.planted.fifth.listing import edit

edit(
    "norm_of_stage",
    "optimizer/updater.py",
    old="for group in (over_tp, self._stages) if group is not None],",
    new="for group in (over_tp,) if group is not None],",
    job="small_jobs/tied_texts:untied",
    plan="pp=2",
    truth=(
        "Under pp each stage clips by the norm of its own gradients; the squares are not added up "
        "over stages."
    ),
    says="a part of the model is left out, such as parameters that other ranks own",
)

edit(
    "tail_not_counted",
    "optimizer/clipping.py",
    old="        if blocks < flat.numel()\n",
    new="        if not blocks\n",
    job="small_jobs/frozen_pairs:job",
    plan="dp=2",
    truth=(
        "The gradient norm leaves out what lies behind the last whole block of 1,024 elements of "
        "a longer gradient, so clipping is by too small a norm."
    ),
    says="by what is added to it by the last 65 elements of c.weight, the last 197 elements of proj.weight, behind whole blocks of 1,024",
)

edit(
    "limit_of_first",
    "optimizer/updater.py",
    old="found.append(_OfOneLoss(optimizers, schedulers, limit, whole,",
    new="found.append(_OfOneLoss(optimizers, schedulers, limits[0], whole,",
    job="small_jobs/two_turns:job",
    plan="dp=2",
    truth="The second loss's gradients are clipped by the first loss's clip_grad_norm.",
    says="makes of gradients that are clipped to 0.1, the limit of loss d, and not to 0.01",
    module="gen.0",
)

edit(
    "first_scheduler_loaded",
    "optimizer/optimizer_state.py",
    old='zip(self._schedulers, values["schedulers"], strict=True)',
    new='zip(self._schedulers[:1], values["schedulers"], strict=False)',
    job="small_jobs/wide_rows:two_optimizers",
    plan="dp=2",
    truth=(
        "On resuming only the first scheduler's state is restored; the second one begins its "
        "schedule anew, with other learning rates."
    ),
    says="updater.schedulers[1].last_epoch is 0 instead of 1",
)

edit(
    "thawed_early",
    "core/losses/frozen.py",
    old="        if not (frozen := self.at(step)):",
    new="        if not (frozen := self.at(step + 1)):",
    job="small_jobs/wide_rows:frozen",
    plan="pp=2",
    truth=(
        "In programs (pp) a parameter that is frozen for the first steps is trained one step too "
        "early: what is dropped is that which is frozen in the next step."
    ),
    says=(
        "mid.weight, mid.bias: a gradient under the plan and none on one device, as the job "
        "freezes it in this step"
    ),
    module="mid",
)

edit(
    "all_whole",
    "optimizer/updater.py",
    old='whole = any(reach != "element" for reach in reaches)',
    new='whole = all(reach != "element" for reach in reaches)',
    job="small_jobs/whole_matrices:job",
    plan="dp=2,zero=1",
    truth=(
        "With one elementwise optimizer and one that needs whole parameters, gradients are not "
        "fetched for the latter: its parameters (the matrices) are not updated."
    ),
    says="these parameters are not updated, and they are all that optimizer 0 updates: it makes no step, or is given no gradients",
    module="enc",
)

edit(
    "flag_in_gradient",
    "optimizer/full_from_slices.py",
    old="[part.start : part.stop] = flagged[1:]",
    new="[part.start : part.stop] = flagged[:-1]",
    job="small_jobs/whole_matrices:whole",
    plan="dp=2",
    devices="cpu",
    truth=(
        "Gradients that are gathered for an optimizer of whole parameters are shifted by one: the "
        "used-flag becomes the first element of each slice, the last is lost."
    ),
    says="times those one place before them: the optimizer is given gradients whose elements are one place off",
    module="enc",
)

edit(
    "schedule_of_skipped",
    "optimizer/updater.py",
    old="for scheduler in turn.schedulers if not skip else ():",
    new="for scheduler in turn.schedulers:",
    job="small_jobs/wide_rows:overflowing",
    plan="dp=2,precision=fp16-mixed",
    truth=(
        "The scheduler is stepped in steps whose update was skipped because gradients overflowed: "
        "learning rates fall too early."
    ),
    says="last_epoch of scheduler 0 is 1 after step 0, and 0 on one device",
)

edit(
    "norm_of_real_part",
    "optimizer/clipping.py",
    old="flat = torch.view_as_real(gradient).reshape(-1) if gradient.is_complex() else gradient.reshape(-1)",
    new="flat = gradient.real.reshape(-1) if gradient.is_complex() else gradient.reshape(-1)",
    job="small_jobs/filters:clipped",
    plan="dp=2",
    truth=(
        "The gradient norm counts only the real parts of complex gradients, so clipping is by too "
        "small a norm."
    ),
    says="Its square has less, by what is added to it by the imaginary parts of f1.w, f2.w",
)

edit(
    "frozen_trained_under_tp",
    "replica/replica.py",
    old="        gradients = replica.freezing.dropped(step, (each.name for each in replica.exchange.owned), gradients)\n",
    new="",
    job="jobs/growing_batches:job",
    plan="tp=2",
    truth=(
        "Gradients of frozen parameters, which programs compute, are not dropped, so the frozen "
        "trunk is trained."
    ),
    says=(
        "trunk.2.weight and 1 more: a gradient under the plan and none on one device, as the job "
        "freezes it in this step"
    ),
    module="trunk.0",
)

edit(
    "frozen_by_first_entry_only",
    "core/losses/frozen.py",
    old="any(step in steps for steps in ranges)}",
    new="any(step in steps for steps in ranges[:1])}",
    job="jobs/growing_batches:job",
    plan="dp=2,microbatches=2",
    truth=(
        "Of a parameter that several entries of frozen= name, only the first entry counts: "
        "trunk.0.bias is trained from step 2 instead of step 6."
    ),
    says=(
        "trunk.0.bias: a gradient under the plan and none on one device, as the job freezes it in this step"
    ),
    module="trunk.0",
)

edit(
    "schedule_steps_when_skipped",
    "optimizer/updater.py",
    old="        for scheduler in turn.schedulers if not skip else ():",
    new="        for scheduler in turn.schedulers:",
    job="jobs/tied_halves:overflowing",
    plan="dp=2,precision=fp16-mixed",
    truth=(
        "The schedule is stepped also after a step that was skipped because gradients overflowed float16."
    ),
    says="T_cur of scheduler 0 is 1 after step 0, and 0 on one device",
)

edit(
    "every_counted_from_zero",
    "core/losses/turns.py",
    old="        if (step + 1) % each.every == 0:",
    new="        if step % each.every == 0:",
    job="jobs/repeated_turns:job",
    plan="dp=2",
    truth="A loss with every=2 takes its turn in steps 0, 2, ... instead of 1, 3, ...",
    says="The plan is in step 0, loss generator, and one device in step 1, loss critic",
    module="generator.0",
)
