"""Bugs in exchanges of gradients, and in what sums are divided by."""

from __future__ import annotations

from tests.planted.ninth import NINTH

NINTH.edit(
    "stale_pool_under_zero_2",
    "exchange/buckets/scattered.py",
    old="            if not place.filled:\n                view.zero_()",
    new="            if not place.filled and not place.entry.arrived:\n                view.zero_()",
    job="routed:runs_of_two",
    plan="dp=2,zero=2,microbatches=2,bucket_bytes=300",
    truth=(
        "With zero=2, the memory of a bucket is not zeroed for a parameter that a chunk does not use if an earlier "
        "chunk of the step has used it: what the pool's memory held before (the earlier chunk's gradient) is added up "
        "once more. The gradient of a layer that only some chunks use is too large."
    ),
    module="experts.0",
)

NINTH.edit(
    "used_flags_min",
    "exchange/slices.py",
    old='return self._group.all_reduce(self._flags, "max")',
    new='return self._group.all_reduce(self._flags, "min")',
    job="routed:routed",
    plan="dp=2,zero=1",
    truth=(
        "Replicas agree on which parameters were used by the least instead of the largest flag: a parameter that some "
        "replica did not use in a step counts as not used by any, so its owner drops the gradient and does not update "
        "it."
    ),
    module="experts.1",
)

NINTH.edit(
    "sparse_rows_by_value",
    "exchange/sparse_gradients.py",
    old="        rows = self._flat[:, -1].nonzero()[:, 0]",
    new="        rows = self._flat[:, :-1].any(1).nonzero()[:, 0]",
    job="words:words",
    plan="dp=2",
    truth=(
        "The rows that a sparse gradient has are found by values other than 0 instead of by the flags of use, so a row "
        "that was used with a gradient of exactly 0 is missing and SparseAdam does not move it with its momentum."
    ),
    says="rows that samples use are lost (row 4)",
    module="embed",
)

NINTH.edit(
    "halving_folds_late",
    "comm/collectives/halving.py",
    old='        *(moved("add", rank + 1, 0, num_elements) if folds else ()),\n        *_halve(place, power, folded, offsets),\n',
    new='        *_halve(place, power, folded, offsets),\n        *(moved("add", rank + 1, 0, num_elements) if folds else ()),\n',
    job="plain:momentum",
    plan="dp=3,zero=1,exchange=halving",
    truth=(
        "The reduce-scatter by halving with 3 ranks adds the folded rank's gradients after half of the elements have "
        "been sent on, so the owner of these elements lacks the gradient of replica 1."
    ),
    says="They are without the share of replica 1",
    module="4",
)

NINTH.edit(
    "server_takes_workers_only",
    "exchange/server.py",
    old="for theirs in pushed[1:]:",
    new="for theirs in pushed[self._num_owners :]:",
    job="plain:momentum",
    plan="dp=3,exchange=server,servers=2",
    truth=(
        "With two servers each adds up its first row and those of ranks that are not servers: the gradients of rank 1, "
        "a server too, are missing in every sum."
    ),
    says="All gradients are without the share of replica 1",
)

NINTH.edit(
    "short_batch_by_full_size",
    "replica/replica.py",
    old="gradients = yield from _exchanged(self, step, chunks[0].batch)",
    new="gradients = yield from _exchanged(self, step, self.job.batch_size_at(step))",
    job="plain:short",
    plan="dp=2",
    truth=(
        "The divisor of gradients is taken for a batch of full size; in the short last batch of an epoch (4 samples of "
        "12), whose loss was divided by its own size, gradients are three times too large."
    ),
    says="what it is divided by goes by the weight of the batch before, 12, and not by this one's, 4",
)

NINTH.edit(
    "small_weights_do_not_divide",
    "core/losses/loss_scale.py",
    old="return isinstance(divisor, Tensor) or divisor != 1.0",
    new="return isinstance(divisor, Tensor) or divisor > 1.0",
    job="plain:weighted",
    plan="dp=2",
    truth=(
        "Gradients are not divided by a total weight below 1, so for a loss of (sum, weight) with small weights they "
        "are those of the sum, not of the mean: too small."
    ),
    says="the weight of the whole batch: the sum is never divided",
)
