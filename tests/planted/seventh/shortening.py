"""Bugs in lower precisions."""

from __future__ import annotations

from tests.planted.seventh import SEVENTH

SEVENTH.edit(
    "slices_round_from_zero",
    "optimizer/bfloat16/stochastic.py",
    old="        index = torch.arange(slice_.start, slice_.stop, device=value.device)\n",
    new="        index = torch.arange(slice_.stop - slice_.start, device=value.device)\n",
    job="mlp:plain",
    plan="dp=2,zero=1,precision=bf16-stochastic",
    truth=(
        "A slice's draws are numbered from its own first element, so the second rank's part of mid.weight, the one parameter on the border,"
        " is rounded by other draws than the whole."
    ),
    says="they are rounded by other draws",
    module="mid",
)
SEVENTH.edit(
    "skipped_steps_in_averages",
    "optimizer/optimizer_state.py",
    old="        if self.averages and not skipped:\n",
    new="        if self.averages:\n",
    job="mlp:overflowing",
    plan="dp=2,precision=fp16-mixed",
    truth=(
        "Averages of parameters are moved after a step that was skipped as well: they start at the initial parameters in step 0, whose "
        "gradients overflow, and not with those after the first update."
    ),
    says="they have begun as the parameters of before this update, in a step that made no update",
    module=None,
)
SEVENTH.edit(
    "first_loss_under_autocast",
    "core/losses/in_precision.py",
    old="    losses = {name: replace(each, loss=partial(_under_autocast, each.loss, dtype)) for name, each in job.losses.items()}",
    new="    losses = {name: replace(each, loss=partial(_under_autocast, job.loss, dtype)) for name, each in job.losses.items()}",
    job="gan:actor",
    plan="dp=2,precision=bf16-mixed",
    truth="Under autocast every objective computes the first one's loss: the critic is trained by the actor's loss.",
    says="it is another loss, or goes another way",
    module="critic.last",
)
