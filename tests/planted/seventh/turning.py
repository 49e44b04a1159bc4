"""Bugs in clipping, optimizers of several losses and frozen parameters."""

from __future__ import annotations

from tests.planted.seventh import SEVENTH

SEVENTH.edit(
    "norm_without_last_block",
    "optimizer/clipping.py",
    old="        if blocks < flat.numel()\n",
    new="        if not blocks\n",
    job="mlp:clipped",
    plan="dp=2,microbatches=2",
    truth=(
        "Of a gradient of more than 1024 elements what is left after the last whole block (379 elements of mid.weight) is not counted in "
        "the norm by which all are clipped."
    ),
    says="the last 379 elements of mid.weight, behind whole blocks of 1,024",
    module=None,
)
SEVENTH.edit(
    "one_optimizer_per_loss",
    "optimizer/updater.py",
    old="        start = sum(len(each.optimizers) for each in found)\n",
    new="        start = len(found)\n",
    job="gan:pair",
    plan="dp=2",
    truth=(
        "The second loss is given the second optimizer, which is also one of the first loss's two, in place of its own: the generator is "
        "never updated."
    ),
    says="they are all that loss generator trains: its optimizer makes no step, or another loss's does",
    module="generator.first",
)
SEVENTH.edit(
    "last_range_of_a_name",
    "core/losses/frozen.py",
    old="            name: [steps for text, steps in job.frozen.items() if names_parameter(text, name)]\n",
    new="            name: [steps for text, steps in job.frozen.items() if names_parameter(text, name)][-1:]\n",
    job="mlp:unfrozen",
    plan="dp=2",
    truth=(
        "Of a parameter that two entries of `frozen` name only the last entry counts: inp.bias is trained in steps 0 and 1, in which all of"
        " `inp` is frozen."
    ),
    says="inp.bias: a gradient under the plan and none on one device, as the job freezes it in this step",
    module="inp",
)
SEVENTH.edit(
    "draws_of_losses_that_are_due",
    "core/losses/turns.py",
    old=(
        "            found += [LossTurn(name, number, draws + repeated) for repeated in range(each.updates)]\n"
        "        draws += each.updates\n"
    ),
    new=(
        "            found += [LossTurn(name, number, draws + repeated) for repeated in range(each.updates)]\n"
        "            draws += each.updates\n"
    ),
    job="gan:seldom",
    plan="dp=2",
    truth=(
        "A turn's draws are numbered among the turns that are due, so in a step without the critic's the generator's dropout has the seed "
        "that the critic's turn would have."
    ),
    says="of step 0, loss critic",
    module="generator.drop",
)
