"""Bugs of recurrent and convolutional layers and of norms."""

from __future__ import annotations

from tests.planted.fourth.editing import edit

edit(
    "reverse_state_by_layer",
    "program/operators/recurrent_shards.py",
    old="                start = [tuple(state[number] for state in row) for row in firsts]",
    new="                start = [tuple(state[layer] for state in row) for row in firsts]",
    job="recurrent:job",
    plan="tp=2",
    truth=(
        "The divided LSTM takes its initial states by the number of the layer, not of layer and direction."
    ),
    says="the first operator whose shards differ is lstm.input",
    module="lstm",
)
edit(
    "cell_first_units",
    "program/operators/recurrent_shards.py",
    old="    mine = take(Pieces(tuple(h.shape), ((None, units),)), 0, h)",
    new="    mine = h[:, : w_h.shape[0] // NUM_GATES[kind]]",
    job="recurrent:cells",
    plan="tp=2,tp_placements=cell:column",
    truth=(
        "The divided GRU cell mixes its new state with the first hidden units of the old one on every "
        "rank instead of with the rank's own."
    ),
    says="the first operator whose shards differ is gru_cell",
    module="cell",
)
edit(
    "shortcut_gradient_lost",
    "program/operators/convolutions.py",
    old="        for other in others:\n            dx.add_(other)",
    new="        for other in others[1:]:\n            dx.add_(other)",
    job="convolutions:single",
    plan="tp=2,tp_placements=stem:channels+one.conv1:channels+one.short:channels",
    truth=(
        "Where two convolutions share a gathered input, the second one's (the shortcut's) gradient of "
        "that input is lost."
    ),
    says="the first gradient that differs is that of relu of the model or loss",
    module="stem",
)
edit(
    "row_bias_on_each_rank",
    "tensor_parallel/rules/products.py",
    old="    bias = frozenset({2} if added else ())",
    new="    bias = frozenset[int]()",
    job="convolutions:group_norm",
    plan="tp=2,tp_placements=one.conv1:channels+one.conv2:row",
    truth=(
        "The bias of a convolution divided by its input channels is added on every rank, so it counts twice."
    ),
    says="the first operator whose shards differ is conv2d",
    module="one.conv2",
)
edit(
    "uneven_groups",
    "tensor_parallel/rules/normalisation.py",
    old='"num_groups", shard.local["g"])',
    new='"num_groups", -(-groups // len(shard.starts["g"])))',
    job="convolutions:unet",
    plan="tp=2,tp_placements=mid:channels+gn:channels",
    truth=(
        "With three groups on two ranks the rank that has one group normalises its channels in two "
        "groups (the larger rank's number)."
    ),
    says="the first operator whose shards differ is group_norm",
    module="gn",
)
edit(
    "sync_norm_biased",
    "replica/buffers/batch_norm.py",
    old="(module.running_var, unbiased)",
    new="(module.running_var, variance)",
    job="convolutions:synced",
    plan="dp=2,sync_batch_norm=true",
    truth="Synchronised batch norm writes the biased variance into running_var.",
    says="as a variance of 96 values that is divided by 96 and not by 95 (biased)",
    module="one.norm1",
)
edit(
    "norm_maps_reversed",
    "replica/buffers/norm_statistics.py",
    old="zip(headers, parts[:, split:], strict=True)",
    new="zip(headers.flip(0), parts[:, split:].flip(0), strict=True)",
    job="convolutions:job",
    plan="dp=2,microbatches=2",
    truth="Replicas' running statistics are merged in the reverse order of the replicas.",
    says="one.norm1.running_mean is what one device has with the replicas in reverse order",
    module="one.norm1",
)
edit(
    "bn_cumulative",
    "replica/buffers/norm_statistics.py",
    old="scales = torch.where(self._cumulative, calls / total, 1.0)",
    new="scales = torch.where(self._cumulative, 1.0 / total, 1.0)",
    job="pictures:cumulative",
    plan="dp=2,microbatches=2",
    truth=(
        "Batch norm with momentum=None: a replica's mean over its two chunks counts as one chunk in "
        "the cumulative running statistics."
    ),
    says="What the step adds to bn.running_mean is 0.5 times one device's: another momentum, or a factor",
    module="bn",
)
edit(
    "bn_sync_biased",
    "replica/buffers/batch_norm.py",
    old="unbiased = variance * (count / (count - 1))",
    new="unbiased = variance",
    job="pictures:job",
    plan="dp=2,sync_batch_norm=true",
    truth="Under sync_batch_norm running_var gets the biased variance of the joint chunk.",
    says="as a variance of 441 values that is divided by 441 and not by 440 (biased)",
    module="bn",
)
