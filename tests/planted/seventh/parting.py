"""Bugs in operators that are divided."""

from __future__ import annotations

from tests.planted.seventh import SEVENTH

SEVENTH.edit(
    "ignored_targets_in_backward",
    "program/operators/partial.py",
    old="            arriving = gradient * ctx.counted\n",
    new="            arriving = gradient\n",
    job="gpt:padded",
    plan="tp=2,tp_placements=head:vocabulary",
    truth="In the backward of the cross-entropy of divided classes, ignored targets get the gradient of the softmax; the loss is right.",
    says="It is what the backward of cross_entropy_loss of the model or loss",
    module="head",
)
SEVENTH.edit(
    "repeats_before_heads",
    "tensor_parallel/rules/expansion.py",
    old='        out[dim] = Product((f"d{dim}", "repeats"))\n',
    new='        out[dim] = Product(("repeats", f"d{dim}"))\n',
    job="gpt:grouped",
    plan="tp=2,tp_placements=blocks.*.k:heads",
    truth=(
        "The repeated key heads are taken to lie one set after another and not each one's repeats together, so ranks pair half of the query"
        " heads with keys and values of the other key head."
    ),
    says="the first operator whose shards differ is repeat_interleave.self_int of blocks.0.core",
    module="blocks.0.core",
)
SEVENTH.edit(
    "roll_keeps_order",
    "tensor_parallel/rules/permutations.py",
    old='    "roll": _unsharded_dims("dims"),\n',
    new='    "roll": _permuted(lambda call, ndim: range(ndim)),\n',
    job="shapes:shifting",
    plan="tp=2,tp_placements=up:column+down:row",
    truth=(
        "A dim along which values are rolled is divided, and each rank rolls its own part around: the three features at each border are "
        "those of the wrong rank."
    ),
    says="the first operator whose shards differ is roll of shift",
    module="shift",
)
SEVENTH.edit(
    "recurrent_weights_by_time",
    "program/operators/recurrent_shards.py",
    old="                recurrent = F.linear(h, w_h.detach(), bias) + later[place][number]\n",
    new="                recurrent = F.linear(h, w_h.detach(), bias) + later[place][time]\n",
    job="rnn:both",
    plan="tp=2,tp_placements=rnn:dim0",
    truth=(
        "In the backward direction of a recurrent layer divided by hidden units, gradients of time steps are paired with the hidden states "
        "of the mirrored ones: the gradient of weight_hh_l0_reverse is wrong."
    ),
    says="the first parameter whose gradient differs is rnn.weight_hh_l0_reverse",
    module="rnn",
)
SEVENTH.edit(
    "bag_mean_of_local_entries",
    "program/operators/embedding_bag.py",
    old="            sizes = torch.zeros(len(offsets), **of_entries).index_add(0, bag, counted.to(weight.dtype))\n",
    new="            sizes = torch.zeros(len(offsets), **of_entries).index_add(0, bag, here.to(weight.dtype))\n",
    job="sparse:bags",
    plan="tp=2,tp_placements=bag:vocabulary",
    truth="Means of bags are divided by the number of entries whose rows this rank has and not by all that count, so ranks' results add up to too much.",
    says="the first operator whose shards differ is embedding_bag.padding_idx of bag",
    module="bag",
)
