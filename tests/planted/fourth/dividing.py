"""Bugs of operators that are divided, and of losses and attention over parts."""

from __future__ import annotations

from tests.planted.fourth.editing import edit

edit(
    "padding_not_shifted",
    "program/operators/partial.py",
    old="    inside = padding - start if start",
    new="    inside = padding if start",
    job="padded_texts:hungry",
    plan="tp=2,tp_placements=embed:vocabulary",
    truth=(
        "In the second part of a divided vocabulary the padding row is not counted from the part's "
        "start: the padding row is trained as any other."
    ),
    module="embed",
)
edit(
    "smoothing_by_part",
    "tensor_parallel/rules/losses.py",
    old='            num_classes=shard.full["v"],',
    new='            num_classes=shard.local["v"],',
    job="language:smoothed",
    plan="tp=2,tp_placements=head:vocabulary",
    truth=(
        "Label smoothing of the vocabulary-parallel cross-entropy divides by the number of classes of "
        "the rank's part instead of all."
    ),
    says="the first operator whose shards differ is cross_entropy_loss",
)
edit(
    "class_weight_in_backward",
    "program/operators/partial.py",
    old="                of_target = of_target * ctx.weight_of_rows\n",
    new="                pass\n",
    job="language:weighted",
    plan="tp=2,tp_placements=head:vocabulary",
    truth=(
        "The backward of the vocabulary-parallel cross-entropy forgets the class weight of the "
        "target; the loss itself is right."
    ),
    says="It is what the backward of cross_entropy_loss of the model or loss",
)
edit(
    "ignored_counted",
    "program/operators/partial.py",
    old="        return total / ((target != self.ignored).sum() if weight_of_rows is None else weight_of_rows.sum())",
    new="        return total / (target.numel() if weight_of_rows is None else weight_of_rows.sum())",
    job="language:skipping",
    plan="tp=2,tp_placements=head:vocabulary",
    truth="The mean of the vocabulary-parallel cross-entropy is taken over all targets, ignored ones too.",
    says="the first operator whose shards differ is cross_entropy_loss",
)
edit(
    "loss_setting_lost",
    "tensor_parallel/rules/dim_reductions.py",
    old='and name != "reduction" and value is not None',
    new='and name not in ("reduction", "beta") and value is not None',
    job="moving_buffers:denoiser",
    plan="tp=2,tp_placements=out:column",
    truth=(
        "On a sharded prediction smooth_l1_loss is computed with the default beta of 1, not the job's 0.4."
    ),
    says="the first operator whose shards differ is smooth_l1_loss",
)
edit(
    "query_heads_order",
    "tensor_parallel/rules/attention.py",
    old='heads, sizes["r"] = Product(("h", "r"))',
    new='heads, sizes["r"] = Product(("r", "h"))',
    job="language:two_groups",
    plan="tp=2,tp_placements=blocks.*.attn.k:heads",
    truth=(
        "With grouped heads a rank's query heads are not those that belong to its key/value heads "
        "(order of the product of axes)."
    ),
    says="the first operator whose shards differ is scaled_dot_product_attention",
    module="blocks.0.attn",
)
edit(
    "attention_mask_of_part",
    "tensor_parallel/rules/attention.py",
    old='        drawn=(*batch, heads, "sq", None) if rate else (),',
    new="        drawn=(),",
    job="language:untied",
    plan="tp=2,tp_placements=blocks.*.attn.k:heads",
    truth=(
        "Attention dropout under tp is drawn for the rank's own heads from the start of the stream, "
        "instead of being its part of the full draw."
    ),
    says="the first operator whose shards differ is scaled_dot_product_attention",
    module="blocks.0.attn",
)
edit(
    "shared_heads_not_summed",
    "tensor_parallel/partition.py",
    old="!= INVARIANT and parameters[name].is_shared",
    new="!= INVARIANT and parameters[name].is_whole",
    job="language:two_groups",
    plan="tp=3,tp_placements=blocks.*.attn.k:heads",
    truth=(
        "Gradients of key/value heads that two ranks share are not summed over them: each uses those "
        "of its own query heads."
    ),
    says="what all ranks add is one device's: it is not summed over them",
    module="blocks.0.attn.k",
)
edit(
    "draws_in_other_layout",
    "tensor_parallel/partition.py",
    old="                stride = node.outputs[0].stride if factors.drawn is None else None\n",
    new="                stride = None\n",
    job="padded_texts:dropped",
    plan="tp=2,tp_placements=conv:channels",
    truth=(
        "Dropout of a transposed value under tp draws its mask in the order of a contiguous tensor, "
        "not in that of one device's memory."
    ),
    says="the first operator whose shards differ is dropout",
    module="drop",
)
edit(
    "norm_counts_copies",
    "parameters/shards.py",
    old="        if name not in self.pieces:\n            return self.rank == 0",
    new="        if name not in self.pieces:\n            return True",
    job="language:untied",
    plan="tp=2",
    devices="cpu",
    truth="The gradient norm that clips counts what all ranks hold (norms, biases) once for each rank.",
    says="a part of the model is counted more than once",
)
edit(
    "flip_second_dim",
    "tensor_parallel/rules/permutations.py",
    old='unsharded=frozenset(f"d{dim}" for dim in dims)',
    new='unsharded=frozenset(f"d{dim}" for dim in dims[:1])',
    job="convolutions:flipped",
    plan="tp=2,tp_placements=two.conv2:channels+two.short:channels",
    truth=(
        "Of a flip along two dims only the first is kept whole: along the second each rank flips its "
        "own part."
    ),
    says="the first operator whose shards differ is flip",
    module="mirror",
)
