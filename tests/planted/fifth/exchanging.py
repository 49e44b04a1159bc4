"""Bugs of exchanges, their buckets and servers, of sparse gradients and of sums over replicas."""

from __future__ import annotations

from tests.planted.fifth.listing import edit

edit(
    "last_not_divided",
    "exchange/buckets/reduction.py",
    old="bucket.flat[: bucket.length].div_(divisor)",
    new="bucket.flat[: bucket.entries[-1].start].div_(divisor)",
    job="small_jobs/tied_texts:untied",
    plan="dp=2",
    truth=(
        "The gradient of the last parameter of a bucket (emb.weight) is not divided by the weight "
        "(number of tokens) of the batch: it is too large by that number."
    ),
    says=(
        "The gradients of emb.weight are 38 times one device's, the weight of the whole batch: "
        "the sum is never divided"
    ),
    module="emb",
)

edit(
    "stale_bucket",
    "exchange/buckets/buckets.py",
    old=("            if not entry.arrived:\n                view.zero_()"),
    new=("            if not entry.arrived and not self._order_shared:\n                view.zero_()"),
    job="small_jobs/chosen_experts:job",
    plan="dp=2",
    truth=(
        "After the first step a replica that does not use a parameter adds to the sum what its "
        "bucket still holds from an earlier step: a stale gradient."
    ),
    says="are one device's plus 1 times those of the step before: old gradients are not zeroed",
    module="experts.1",
)

edit(
    "flag_of_other",
    "exchange/slices.py",
    old=(
        "                    self._positions.append((index, start - first, stop - first, number))\n"
        "                number += 1"
    ),
    new=(
        "                    self._positions.append((index, start - first, stop - first, number))\n"
        "                    number += 1"
    ),
    job="small_jobs/chosen_experts:job",
    plan="dp=2,zero=1",
    truth=(
        "Under zero=1 the second rank looks up whether a slice's parameter was used at the wrong "
        "entry (counted over its own slices, not over all), so unused parameters get a gradient "
        "of zeros or used ones none."
    ),
    module="trunk",
)

edit(
    "chunk_not_cleared",
    "exchange/buckets/scattered.py",
    old=("            if not place.filled:\n                view.zero_()"),
    new=("            if not place.entry.arrived:\n                view.zero_()"),
    job="small_jobs/chosen_experts:job",
    plan="dp=2,zero=2,microbatches=2",
    truth=(
        "Under zero=2 a parameter that an earlier chunk used and this one does not is not cleared "
        "in the reused bucket memory, so leftover gradients of another chunk are added once more."
    ),
    says="what chunk 0 adds to experts.0.weight counts 2 times): where a chunk does not use a parameter, such as chunk 1, memory still holds",
    module="experts.0",
)

edit(
    "sparse_last_chunk",
    "exchange/sparse_gradients.py",
    old="sparse = [_of_rows(each) for each in arrived]",
    new="sparse = [_of_rows(each) for each in arrived[-1:]]",
    job="small_jobs/recommending:job",
    plan="dp=2,microbatches=2",
    truth=(
        "Of the sparse gradients of a replica's chunks only the last chunk's count; those of "
        "earlier microbatches are lost."
    ),
    says=(
        "are those of each replica's last microbatch alone: the gradients of the other microbatches are lost"
    ),
    module="items",
)

edit(
    "server_hears_servers",
    "exchange/server.py",
    old="for theirs in pushed[1:]:",
    new="for theirs in pushed[1 : self._num_owners]:",
    job="small_jobs/wide_rows:by_momentum",
    plan="dp=3,exchange=server,servers=2",
    devices="cpu",
    truth=(
        "Servers add up only the gradients of ranks that are servers; the pushed gradients of "
        "pure workers (rank 2) are left out."
    ),
    says="All gradients are without the share of replica 2.",
)

edit(
    "wider_not_cast",
    "comm/collectives/travelling.py",
    old="self._dtype is not None and dtype != self._dtype and dtype not in self._never_cast",
    new="self._dtype is not None and dtype.itemsize > self._dtype.itemsize and dtype not in self._never_cast",
    job="small_jobs/wide_rows:in_bfloat16",
    plan="dp=3,reduce=float32",
    truth=(
        "With reduce=float32 gradients in bfloat16 are not widened for the sum over replicas: "
        "sums are rounded to bfloat16 on the way."
    ),
)

edit(
    "divided_by_each",
    "exchange/zero_three.py",
    old=("        for part in self._trained:\n            if part.summed is not None and divides(weight):"),
    new=("        for part, _ in self._mine:\n            if part.summed is not None and divides(weight):"),
    job="small_jobs/tied_texts:untied",
    plan="dp=2,zero=3",
    truth=(
        "Under zero=3 the gradients of a unit are divided by the weight once for each parameter "
        "that the rank has a slice of, not once: those of units of several parameters are far too "
        "small."
    ),
    says="by powers of 38, the weight of the whole batch (emb.weight 38^-1, blocks.0.n.weight 38^-8",
    module="blocks.0.n",
)

edit(
    "first_element_missing",
    "exchange/sparse_gradients.py",
    old="inside = (at >= owned.start) & (at < owned.stop)",
    new="inside = (at > owned.start) & (at < owned.stop)",
    job="small_jobs/recommending:job",
    plan="dp=2,zero=1",
    truth=(
        "Under zero=1 the first element of each rank's slice of a sparse table never gets its "
        "gradient (off by one), so that element is not updated."
    ),
    says="the update leaves one element of items.weight (number 0) as before, which one device changes: the optimizer is not given",
    module="items",
)

edit(
    "folded_overwrites",
    "comm/collectives/halving.py",
    old='    reduce = moved("add", other, 0, num_elements) if other else []',
    new='    reduce = moved("receive", other, 0, num_elements) if other else []',
    job="small_jobs/wide_rows:by_momentum",
    plan="dp=3,exchange=halving",
    devices="cpu",
    truth=(
        "In the all-reduce by halving of a number of ranks that is no power of two, what the "
        "folded rank sends overwrites the gradients of the rank that takes part for both instead "
        "of being added: rank 0's gradients are lost."
    ),
    says="All gradients are without the share of replica 0.",
)
