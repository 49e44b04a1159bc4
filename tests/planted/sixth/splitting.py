"""Bugs in how tensors are divided over ranks."""

from __future__ import annotations

from tests.planted.sixth import SIXTH

SIXTH.edit(
    "grouped_heads_interleaved",
    "tensor_parallel/rules/attention.py",
    old='heads, sizes["r"] = Product(("h", "r")), q.shape[-3] // k.shape[-3]',
    new='heads, sizes["r"] = Product(("r", "h")), q.shape[-3] // k.shape[-3]',
    job="letters:job",
    plan="tp=2",
    truth="Heads of queries are taken to be interleaved over those of keys, so ranks attend with heads of queries that belong to other heads of keys.",
    says="the first operator whose shards differ is scaled_dot_product_attention of layers.0",
    module="layers.0",
)
SIXTH.edit(
    "smoothing_over_own_classes",
    "tensor_parallel/rules/losses.py",
    old='num_classes=shard.full["v"],',
    new='num_classes=shard.local["v"],',
    job="letters:job",
    plan="tp=2",
    truth="Label smoothing of a cross-entropy over a divided vocabulary divides by the number of classes of this rank instead of all.",
    says="the first operator whose shards differ is cross_entropy_loss of the model or loss",
    module="",
)
SIXTH.edit(
    "recurrent_backwards_order",
    "program/operators/recurrent_shards.py",
    old="recurrent = F.linear(h, w_h.detach(), bias) + later[place][number]",
    new="recurrent = F.linear(h, w_h.detach(), bias) + later[place][time]",
    job="rhythms:job",
    plan="tp=2",
    truth="In the backwards direction of a divided recurrent layer the gradients of steps are paired with hidden states in the other order of time, so the "
    "gradient of its recurrent weight is wrong.",
    says="the first parameter whose gradient differs is hear.weight_hh_l0_reverse",
    module="hear",
)
SIXTH.edit(
    "norm_counts_replicated_twice",
    "parameters/shards.py",
    old="            return self.rank == 0\n        pieces = self.pieces[name]",
    new="            return True\n        pieces = self.pieces[name]",
    job="letters:job",
    plan="tp=2",
    truth="Every rank along tp counts parameters that all of them hold in the norm by which gradients are clipped, so they count twice.",
    says="a part of the model is counted more than once",
    module=None,
)
SIXTH.edit(
    "bags_mean_over_own_rows",
    "program/operators/embedding_bag.py",
    old="index_add(0, bag, counted.to(weight.dtype))",
    new="index_add(0, bag, here.to(weight.dtype))",
    job="shopping:dense",
    plan="tp=2",
    truth="A bag's mean is divided by its entries in this rank's rows instead of all of its entries.",
    says="the first operator whose shards differ is embedding_bag.padding_idx of goods",
    module="goods",
)
SIXTH.edit(
    "shortcut_gradient_left_out",
    "program/operators/convolutions.py",
    old="for other in others:",
    new="for other in others[1:]:",
    job="tiles:plain",
    plan="tp=2",
    truth="Where two divided convolutions read the same input, the gradient of that input lacks the second one's part.",
    says="the first gradient that differs is that of relu of the model or loss",
    module="stem",
)
SIXTH.edit(
    "row_bias_added_by_each",
    "tensor_parallel/rules/products.py",
    old='"linear": text("b* k, o k, o -> b* o; sum k; add 2; linear 0+2 1+2"),',
    new='"linear": text("b* k, o k, o -> b* o; sum k; linear 0+2 1+2"),',
    job="letters:job",
    plan="dp=2,tp=2",
    devices="cpu",
    truth="A linear layer that is divided along its inputs adds its bias on every rank, so the sum over ranks has it as often as there are ranks.",
    says="the first operator whose shards differ is linear of layers.0.out",
    module="layers.0.out",
)
SIXTH.edit(
    "limits_by_part_of_a_row",
    "replica/buffers/row_limits.py",
    old='{"tp": self._shards.group if name in self._shards.pieces else None}',
    new='{"tp": None}',
    job="shopping:dense",
    plan="tp=2,tp_placements=goods:dim1",
    truth="Rows of a divided table with max_norm are scaled in the weight by the norm of this rank's part of them instead of the whole row's.",
    says="rows are limited to the norm of 1.5 by other norms than their own, such as those of the parts that ranks hold",
    module="goods",
)
SIXTH.edit(
    "mean_over_own_losses",
    "tensor_parallel/rules/dim_reductions.py",
    old="return loss_of_part, (target, *args[:2], math.prod(one), settings), {}",
    new="return loss_of_part, (target, *args[:2], math.prod(shard.operands[0]), settings), {}",
    job="desks:job",
    plan="tp=2,tp_placements=floors.*:experts",
    truth="The mean of losses that are divided over ranks is taken over each rank's own elements, and the means are added.",
    says="the first operator whose shards differ is smooth_l1_loss of the model or loss",
    module="",
)
SIXTH.edit(
    "experts_rows_in_place_of_numbers",
    "program/operators/experts.py",
    old="return part.new_zeros((*part.shape[:dim], size, *part.shape[dim + 1 :])).index_copy(dim, rows, part)",
    new="return part.new_zeros((*part.shape[:dim], size, *part.shape[dim + 1 :])).index_copy(dim, rows.flip(0), part)",
    job="desks:job",
    plan="tp=2,tp_placements=floors.*:experts",
    truth="Rows that a rank's experts computed are put back in the other order.",
    says="the first operator whose shards differ is squeeze.dim of floors.0",
    module="floors.0",
)
