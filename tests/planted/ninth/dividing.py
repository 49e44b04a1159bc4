"""Bugs in operators that are divided."""

from __future__ import annotations

from tests.planted.ninth import NINTH

NINTH.edit(
    "padding_row_of_a_later_part",
    "program/operators/partial.py",
    old="inside = padding - start if start <= padding < start + weight.shape[0] else -1",
    new="inside = padding if 0 <= padding < weight.shape[0] else -1",
    job="tables:padded",
    plan="tp=2,tp_placements=embed:vocabulary",
    truth=(
        "Where an embedding with padding_idx is divided by vocabulary, every rank takes padding_idx as a row of its own "
        "part: the row start + padding_idx of later parts gets no gradient either."
    ),
    says="It is what the backward of embedding of embed",
    module="embed",
)

NINTH.edit(
    "weights_of_classes_left_out_of_smoothing",
    "program/operators/partial.py",
    old="of_classes = smoothing if ctx.weights is None else smoothing * ctx.weights[number]",
    new="of_classes = smoothing",
    job="tables:smoothed",
    plan="tp=2,tp_placements=head:vocabulary",
    truth=(
        "The backward of cross entropy over a divided vocabulary with label smoothing and class weights subtracts the "
        "smoothing without the class's weight; the loss itself is right."
    ),
    says="It is what the backward of cross_entropy_loss of the model or loss",
)

NINTH.edit(
    "beta_of_a_divided_loss_dropped",
    "tensor_parallel/rules/dim_reductions.py",
    old='name != "reduction" and value is not None',
    new='name in ("weight", "pos_weight") and value is not None',
    job="divided:huber",
    plan="tp=2,tp_placements=b:column",
    truth=(
        "smooth_l1_loss (huber_loss) on a divided prediction is computed with the default beta, not the job's 0.3."
    ),
    says="the first operator whose shards differ is smooth_l1_loss",
)

NINTH.edit(
    "layout_of_a_whole_draw",
    "program/operators/sliced_draws.py",
    old="if stride is None or len(stride) != part.ndim:",
    new="if stride is None or part.is_contiguous() or len(stride) == part.ndim:",
    job="tables:turned",
    plan="tp=2,tp_placements=up:column+down:row,keyed_draws=true",
    truth=(
        "Dropout on a divided tensor that is transposed in memory draws its mask in the order of dims, not of memory, "
        "so that it drops other elements than one device."
    ),
    says="the first operator whose shards differ is dropout",
    module="",
)

NINTH.edit(
    "means_with_one_whole_dim",
    "tensor_parallel/rules/dim_reductions.py",
    old='if all(shard.local[f"d{dim}"] == shard.full[f"d{dim}"] for dim in dims):',
    new='if any(shard.local[f"d{dim}"] == shard.full[f"d{dim}"] for dim in dims):',
    job="divided:means",
    plan="tp=2,tp_placements=up:column",
    truth=(
        "A mean over several dims of which one is divided and another is not is the sum of the ranks' own means: twice "
        "what it is."
    ),
    says="the first operator whose shards differ is mean.dim",
)

NINTH.edit(
    "ones_padded_on_every_rank",
    "tensor_parallel/rules/expansion.py",
    old='linear=FIRST_LINEAR if not call.arguments.get("value") else (),',
    new="linear=FIRST_LINEAR,",
    job="divided:cropped",
    plan="tp=2,tp_placements=a:column+b:row",
    truth=(
        "A value that is still to be summed over tp is padded with ones on every rank before the sum, so that the "
        "padding is 2."
    ),
    says="the first operator whose shards differ is pad",
    module="",
)
