"""Bugs in buffers and what forwards leave in attributes."""

from __future__ import annotations

from tests.planted.seventh import SEVENTH

SEVENTH.edit(
    "joined_variance_is_biased",
    "replica/buffers/batch_norm.py",
    old="        for running, batch in ((module.running_mean, mean), (module.running_var, unbiased)):\n",
    new="        for running, batch in ((module.running_mean, mean), (module.running_var, variance)):\n",
    job="conv:rows",
    plan="dp=2,sync_batch_norm=true,microbatches=2",
    truth="With synchronised batch norm running_var follows the biased variance of a batch; losses and gradients are right.",
    says="as a variance of 6 values that is divided by 6 and not by 5 (biased)",
    module="norm1",
)
SEVENTH.edit(
    "chunk_maps_in_reverse",
    "replica/buffers/chunk_writes.py",
    old="                decay, added = a * decay, torch.where(a == 0, c, a * added + c)\n",
    new="                decay, added = a * decay, torch.where(a == 0, c, added + decay * c)\n",
    job="states:centred",
    plan="dp=2,microbatches=2",
    truth=(
        "A replica's microbatches are put together as if the later one had written a moving average first: the buffer `shift` is wrong "
        "after the first step."
    ),
    says="with each replica's chunks in reverse order",
    module="centre",
)
SEVENTH.edit(
    "numbers_of_first_step",
    "replica/attributes/plain_numbers.py",
    old="        self._start, self._latest = None, {}\n",
    new="        self._latest = {}\n",
    job="states:warming",
    plan="dp=2",
    truth="What numbers in attributes were before a step is noted in the first step alone, so every chunk of later steps finds `calls` as 0.",
    says="its calls is 1, and 2 on one device",
    module="warm",
)
SEVENTH.edit(
    "initial_tensor_not_copied",
    "replica/attributes/carried_tensors.py",
    old="                vars(module)[name] = _copied(value) if number in self._written else value\n",
    new="                vars(module)[name] = value\n",
    job="rnn:memory",
    plan="microbatches=3",
    truth=(
        "A tensor in an attribute that forwards write to is given to chunks without a copy, so the third microbatch of the first step finds"
        " what the second has added to it."
    ),
    says="its seen is a tensor of norm",
    module="memory",
)
