"""Bugs in how replicas agree on gradients."""

from __future__ import annotations

from tests.planted.sixth import SIXTH

SIXTH.edit(
    "all_reduce_last_undivided",
    "exchange/buckets/reduction.py",
    old="bucket.flat[: bucket.length].div_(divisor)",
    new="bucket.flat[: bucket.entries[-1].start].div_(divisor)",
    job="letters:job",
    plan="dp=2",
    truth="The last parameter of a bucket is not divided by the weight of the batch, so its gradient is that of the sum.",
    says="59 times one device's, the weight of the whole batch: the sum is never divided",
    module="",
)
SIXTH.edit(
    "zero1_flags_of_others",
    "exchange/slices.py",
    old="                    self._positions.append((index, start - first, stop - first, number))\n                number += 1",
    new="                    self._positions.append((index, start - first, stop - first, number))\n                    number += 1",
    job="tickers:job",
    plan="dp=3,zero=1",
    truth="Whether a slice's parameter was used is looked up by the number of the rank's slice instead of that of the parameter, so that in steps with frozen "
    "parameters slices of others get no gradient.",
    says="out.weight: a gradient on one device and none under the plan, as if frozen, which the job does not do in this step",
    module="out",
)
SIXTH.edit(
    "zero2_memory_counts_as_filled",
    "exchange/buckets/scattered.py",
    old="                view.zero_()\n            place.filled = False",
    new="                view.zero_()",
    job="letters:averaged",
    plan="dp=2,microbatches=2,zero=2",
    truth="After a bucket was sent its places still count as filled, so the next chunk's gradients are added to what its memory holds.",
    says="have chunk 0 2 times, chunk 2 2 times",
    module=None,
)
SIXTH.edit(
    "zero3_last_chunk_only",
    "exchange/units/unit_gathering.py",
    old="part.summed = output if part.summed is None else part.summed.add_(output)",
    new="part.summed = output",
    job="ladder:job",
    plan="dp=2,microbatches=2,zero=3",
    truth="With slices of parameters the sum of gradients is that of the last chunk, as each chunk's replaces that of the one before.",
    says="those of each replica's last microbatch alone",
    module=None,
)
SIXTH.edit(
    "server_adds_workers_only",
    "exchange/server.py",
    old="for theirs in pushed[1:]:",
    new="for theirs in pushed[self._num_owners :]:",
    job="letters:job",
    plan="dp=3,exchange=server,servers=2",
    truth="Servers add up what workers push and leave out the gradients of the second server's own share of the batch.",
    says="All gradients are without the share of replica 1",
    module=None,
)
SIXTH.edit(
    "buckets_take_the_last_chunk",
    "exchange/buckets/buckets.py",
    old="if entry.arrived or gradient is view or gradient.layout is not torch.strided:",
    new="if gradient is view or gradient.layout is not torch.strided:",
    job="tiles:plain",
    plan="dp=2,microbatches=2",
    devices="cpu",
    truth="A chunk's gradient is copied over that of the chunk before it in the bucket, so a replica sends its last chunk's alone.",
    says="those of each replica's last microbatch alone",
    module=None,
)
