"""Bugs in operators that are divided."""

from __future__ import annotations

from tests.planted.eighth import EIGHTH

EIGHTH.edit(
    "number_added_by_every_rank",
    "tensor_parallel/rules/elementwise.py",
    old="return elementwise(call, (both,) if both else ())",
    new="return elementwise(call, (both,) if both else FIRST_LINEAR)",
    job="shapes:shifted",
    plan="tp=2,tp_placements=up:column+down:row",
    truth=(
        "A number that is added to a partial sum is added by every rank before the sum over ranks, so it counts as often as "
        "there are ranks."
    ),
    says="the first operator whose shards differ is add.Tensor of shift",
    module="shift",
)
EIGHTH.edit(
    "strided_slice_in_other_order",
    "tensor_parallel/rules/slices.py",
    old='return factors(Product(("kept", "step")), "step")',
    new='return factors(Product(("step", "kept")), "step")',
    job="shapes:strided",
    plan="tp=2,tp_placements=up:column",
    truth=(
        "Features of which every other one is taken (h[:, ::2]) are thought to lie with all even ones first, so ranks take "
        "the wrong features of their part."
    ),
    says="the first operator whose shards differ is slice.Tensor of gate",
    module="gate",
)
EIGHTH.edit(
    "shuffled_channels_last",
    "tensor_parallel/rules/spatial.py",
    old='packed: Dims = (*lead, Product(("c", "r", "s")), "h", "w")',
    new='packed: Dims = (*lead, Product(("r", "s", "c")), "h", "w")',
    job="convs:finer",
    plan="tp=2,tp_placements=up:channels",
    truth=(
        "pixel_shuffle's channels are thought to be the innermost part of the packed dim, so a rank has channels of the "
        "convolution before it that do not belong to the pictures' channels it makes of them."
    ),
    says="the first operator whose shards differ is pixel_shuffle of finer",
    module="finer",
)
EIGHTH.edit(
    "channel_mask_of_own_part",
    "tensor_parallel/rules/spatial.py",
    old="drawn = (*names[:2], *(None,) * (len(names) - 2))",
    new="drawn = (*names[:1], *(None,) * (len(names) - 1))",
    job="convs:finer",
    plan="tp=2,tp_placements=stem:channels+up:row",
    truth=(
        "Which channels Dropout2d drops is drawn for the rank's own channels alone instead of being its part of the draw for "
        "all: other channels are dropped than on one device."
    ),
    says="the first operator whose shards differ is feature_dropout of drop",
    module="drop",
)
EIGHTH.edit(
    "log_softmax_gradient_of_own_part",
    "program/operators/log_softmax.py",
    old=(
        "        sums = ctx.total([each.sum(ctx.dim, keepdim=True) for each in gradients])\n        pairs = zip(gradients, "
        "ctx.saved_tensors, strict=True)\n        return None, None, None, *(gradient - result.exp() * sums for gradient, "
        "result in pairs)"
    ),
    new=(
        "        pairs = zip(gradients, ctx.saved_tensors, strict=True)\n        sums = [each.sum(ctx.dim, keepdim=True) for "
        "each in gradients]\n        return None, None, None, *(gradient - result.exp() * own for (gradient, result), own in "
        "zip(pairs, sums, strict=True))"
    ),
    job="words:job",
    plan="tp=2,tp_placements=head:vocabulary",
    truth=(
        "In the backward of log_softmax over divided classes the sum of gradients is over the rank's own classes and not "
        "over all."
    ),
    says="It is what the backward of log_softmax.int",
    module="head",
)
EIGHTH.edit(
    "ignored_likelihood_counts",
    "program/operators/partial.py",
    old="here = (target >= start) & (target < start + x.shape[1]) & (target != ignored)",
    new="here = (target >= start) & (target < start + x.shape[1])",
    job="words:job",
    plan="tp=2,tp_placements=head:vocabulary",
    truth=(
        "nll_loss over divided classes counts targets that equal ignore_index (class 0) on the rank that has that class, in "
        "loss and gradients."
    ),
    says="the first operator whose shards differ is nll_loss_nd of the model or loss",
    module="",
)
