"""Bugs of tensor parallel: operators of divided values, what they send and draw."""

from __future__ import annotations

from tests.planted.fifth.listing import edit

edit(
    "smoothing_of_own_classes",
    "tensor_parallel/rules/losses.py",
    old='            num_classes=shard.full["v"],',
    new='            num_classes=shard.local["v"],',
    job="jobs/grouped_heads:job",
    plan="tp=2",
    truth=(
        "Label smoothing in the cross-entropy over a divided vocabulary is spread over the rank's "
        "own classes instead of all of them: loss and gradients of the loss are wrong."
    ),
    says=("the first operator whose shards differ is cross_entropy_loss of the model or loss (invariant)"),
)

edit(
    "class_weight_not_in_backward",
    "program/operators/partial.py",
    old="                of_target = of_target * ctx.weight_of_rows\n",
    new="                of_target = of_target * 1.0\n",
    job="jobs/grouped_heads:job",
    plan="tp=2",
    truth=(
        "The backward of the divided cross-entropy leaves out the class weight of the target: the "
        "loss is right, the gradient of the logits is not."
    ),
    says=(
        "In lockstep all values agree; backward, the first gradient that differs is that of "
        "transpose.int of the model or loss"
    ),
    module="head",
)

edit(
    "padding_row_of_other_shard",
    "program/operators/partial.py",
    old="inside = padding - start if start <= padding < start + weight.shape[0] else -1",
    new="inside = padding - start if start <= padding < start + weight.shape[0] else padding",
    job="jobs/grouped_heads:job",
    plan="tp=2",
    truth=(
        "On the rank that does not hold the padding row of the divided embedding, its own row of "
        "that local number (row 16) is taken for padding and gets no gradient."
    ),
    module="embed",
)

edit(
    "reverse_direction_not_turned_back",
    "program/operators/recurrent_shards.py",
    old="torch.stack(each[::-1] if backwards else each)",
    new="torch.stack(each)",
    job="jobs/both_directions:job",
    plan="tp=2",
    truth=(
        "The outputs of the backward direction of a divided bidirectional LSTM stay in reversed "
        "order of time."
    ),
    says="whose shards differ is lstm.input of inner",
    module="inner",
)

edit(
    "draws_do_not_go_on_after_a_part",
    "program/operators/sliced_draws.py",
    old="        seed_torch(seed_of_draw(before, self.count))",
    new="        seed_torch(before)",
    job="jobs/grouped_heads:job",
    plan="tp=2",
    truth=(
        "After a draw of which each rank has a part, the chain of random seeds is put back "
        "instead of advanced, so the next dropout draws the same numbers again: its mask is "
        "wrong."
    ),
    says="draws with another seed than draw 1 of the chunk has",
    module="blocks.0.drop",
)

edit(
    "slice_from_the_beginning",
    "tensor_parallel/rules/slices.py",
    old='        begin = shard.local["before"]\n',
    new="        begin = 0\n",
    job="jobs/divided_shapes:job",
    plan="tp=2",
    truth=(
        "A slice of a divided dim (right[:, 2:]) starts at the beginning of the rank's part "
        "instead of after what lies before it."
    ),
    says="the first operator whose shards differ is slice.Tensor of the model or loss",
    module="",
)

edit(
    "rows_of_logits_without_moving",
    "program/operators/partial.py",
    old="return logits if logits.ndim == 2 else logits.movedim(1, -1).flatten(0, -2)",
    new="return logits if logits.ndim == 2 else logits.reshape(-1, logits.shape[1])",
    job="jobs/grouped_heads:job",
    plan="tp=2",
    truth=(
        "The divided cross-entropy flattens logits [n, v, t] without moving the classes last: "
        "logits of wrong positions are compared with targets."
    ),
    says=("the first operator whose shards differ is cross_entropy_loss of the model or loss (invariant)"),
)

edit(
    "reduce_scatter_along_first_dim",
    "program/operators/collectives.py",
    old="return torch.stack(value.chunk(size, after.equal_dim))",
    new="return torch.stack(value.chunk(size, 0))",
    job="jobs/balanced_experts:job",
    plan="tp=2",
    truth="A reduce-scatter cuts the value along its first dim instead of the divided one.",
    module="moe",
)

edit(
    "bias_of_convolution_by_every_rank",
    "tensor_parallel/rules/products.py",
    old="        added=bias,\n",
    new="        added=frozenset(),\n",
    job="jobs/noisy_signals:job",
    plan="tp=2",
    truth=(
        "The bias of a convolution whose input channels are divided (up) is added by every rank, so twice."
    ),
    says="the first operator whose shards differ is conv_transpose1d of up (partial)",
    module="up",
)
