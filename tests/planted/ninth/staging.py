"""Bugs in stages and recomputation."""

from __future__ import annotations

from tests.planted.ninth import NINTH

NINTH.edit(
    "gradient_of_the_newest_receiver_only",
    "pipeline/runtime/stage.py",
    old="known[name] = known[name] + gradient if name in known else gradient",
    new="known[name] = gradient",
    job="stages:skips",
    plan="pp=3,cuts=second+third,microbatches=2",
    truth=(
        "A value that several later stages receive gets the gradient of the one that answered last, instead of the sum "
        "over all of them."
    ),
    says="what stages send back is wrong",
    module="first",
)

NINTH.edit(
    "borrowers_keep_parameters_in_evaluations_of_averages",
    "replica/metrics.py",
    old=(
        "        replica.updating = replica.plan.dp > 1  # until what this rank does not own is back, too\n"
        "        try:\n            yield from replica.engine.refresh_borrowed()\n            values"
    ),
    new=(
        "        replica.updating = replica.plan.dp > 1  # until what this rank does not own is back, too\n"
        "        try:\n            values"
    ),
    job="stages:averaged",
    plan="pp=2,cuts=blocks.2,microbatches=2",
    truth=(
        "An evaluation of averages under pp computes the tied head with the newest parameter, not its average, where a "
        "rank borrows it: metrics are wrong, training is right."
    ),
    says="averages are not lent",
)

NINTH.edit(
    "gaps_of_one_draw",
    "program/recompute/saved_tensors.py",
    old="found.append(passing_over_draws(node, node.draw - at))",
    new="found.append(passing_over_draws(node, 1))",
    job="draws:noisy",
    plan="dp=2,recompute=full,keyed_draws=true",
    truth=(
        "Recomputation passes over one draw where several in a row are not made again: the dropout after them is "
        "recomputed with another mask than forward had, so its gradients are wrong while losses of the first step are "
        "right. The wrong gradients begin in blocks.2 and go on to all before it, down to first."
    ),
    module="blocks.2",
)

NINTH.edit(
    "owner_without_gradient_of_its_own",
    "parameters/pipeline_ownership.py",
    old="            if parameter.grad is None:\n                parameter.grad = gradient if received[0] else None  # reads it: waits for the device\n            elif",
    new="            if parameter.grad is None:\n                continue\n            if",
    job="stages:detached",
    plan="pp=2,cuts=b,microbatches=2",
    truth=(
        "A tied parameter that its owner's stage uses without a gradient gets none of the borrower's: the gradient that "
        "arrives from the last stage is thrown away, and the parameter is not trained."
    ),
    says="what one of these stages adds is lost",
    module="embed",
)

NINTH.edit(
    "stale_state_of_another_stage",
    "replica/attributes/saved_attributes.py",
    old="if known is None or (known[1] and not resumed):",
    new="if known is None:",
    job="carried:remembers",
    plan="pp=2,cuts=core,microbatches=2",
    truth=(
        "The second checkpoint of a resumed run under pp holds the hidden states that the first had: the first stage's "
        "rank, which has only resumed them, is believed instead of the one whose forwards have left new ones. Going on "
        "from it starts from stale states."
    ),
    says="the next checkpoint of the run that was resumed",
)
