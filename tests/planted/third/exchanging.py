"""Bugs of gradients between replicas."""

from __future__ import annotations

import torch

from tests.planted.third.planting import Planter, bug


@bug("rare", "dp=2", causes="None_or_zero", module="rare")
def used_on_all(p: Planter) -> None:
    """The gradient of a parameter that only some replicas used in a step is dropped: it counts as used where all have used it."""
    from meshloom.exchange import all_reduce

    p.set(
        all_reduce,
        "used_anywhere",
        lambda arrived, flags: [each == max(flags.tolist()) for each in flags.tolist()],
    )


@bug("deep", "dp=2,zero=1,bucket_bytes=2000", causes="not_reduced", module="blocks.3")
def work_by_size(p: Planter) -> None:
    """Buckets of one size share the handle of a collective, so that of several equally large ones only the first is summed: an owner takes its own
    gradients of the others for the sum."""
    from meshloom.exchange.zero import ZeroOne, segment

    def start(self, bucket):
        bucket.flat[bucket.length :].zero_()
        sizes = self.__dict__.setdefault("_sizes", set())
        if bucket.flat.numel() not in sizes:
            sizes.add(bucket.flat.numel())
            self._works.append(self._travelling.reduce_scatter(self._gradients[bucket.number], bucket.flat))
        else:
            self._gradients[bucket.number].copy_(segment(bucket.flat, self._group))

    def make(original):
        def finish(self, weight):
            found = yield from original(self, weight)
            self.__dict__.setdefault("_sizes", set()).clear()
            return found

        return finish

    p.set(ZeroOne, "_start", start)
    from meshloom.exchange.sharded import Sharded

    p.wrap(Sharded, "finish", make)


@bug("residual", "dp=3,exchange=ring", causes="loss")
def ring_tail(p: Planter) -> None:
    """A ring's pieces are floor(n / size) elements, so the last elements of a bucket are not summed."""
    from meshloom.comm.collectives import ring

    p.set(
        ring,
        "divided",
        lambda start, stop, parts: [start + part * ((stop - start) // parts) for part in range(parts + 1)],
    )


@bug("rare", "dp=2,zero=2,microbatches=2,bucket_bytes=700", causes="stale", module="rare")
def pool_not_cleared(p: Planter) -> None:
    """With zero=2 the memory of a bucket's next round is not cleared where a chunk has no gradient: an earlier bucket's gradients are added there."""
    from meshloom.exchange.buckets.scattered import ScatteredBuckets

    def start_next(self, *, rest):
        bucket = self.buckets[self._order[self._next]]
        self._next += 1
        self._rounds.open(bucket)
        for place, view in zip(bucket.places, bucket.views, strict=True):
            gradient = place.entry.parameter.grad
            if gradient is not None and (rest or gradient is view):
                self._move(place)
            place.filled = False
        bucket.flat[bucket.length :].zero_()
        self._rounds.start(bucket)
        bucket.count()
        if bucket.is_complete:
            self._completed.append(bucket.number)
        if not self._overlap:
            self._rounds.end()

    p.set(ScatteredBuckets, "_start_next", start_next)


@bug("units", "dp=2,zero=3")
def prefetch_overwrites(p: Planter) -> None:
    """With zero=3 units of one size are gathered into the same memory, so the unit that is gathered ahead overwrites the one that computes:
    a block runs with the next block's weights."""
    from meshloom.exchange.units.unit_gathering import Traffic, UnitGathering, _Gather

    def gather(self, number):
        parts, pool = self.units[number].parts, self.__dict__.setdefault("_pool", {})
        values = [pool.setdefault((at, part.kept.numel()), part.full()) for at, part in enumerate(parts)]
        works = [self._group.all_gather(flat, part.kept) for part, flat in zip(parts, values, strict=True)]
        self._traffic += Traffic.along("dp", all_gather=sum(part.kept.nbytes for part in parts))
        return _Gather(number=number, values=values, works=works)

    p.set(UnitGathering, "_gather", gather)


@bug("residual", "dp=2,shares=3+1", causes="mean_of_means", module="out")
def shares_count_alike(p: Planter) -> None:
    """A mean over samples is weighted as if every replica had as many: gradients of a replica with fewer samples count too much."""
    from meshloom.replica.loss_sums import LossSums

    def make(original):
        def add(self, returned, chunk):
            _, loss, weight = original(self, returned, chunk)
            return loss / chunk.samples / 2, loss, weight

        return add

    p.wrap(LossSums, "add", make)


@bug("gpt", "dp=2", causes="rounding", module="norm")
def large_in_bf16(p: Planter) -> None:
    """Buckets of over 800 elements travel in bfloat16 although the plan does not say so: gradients are rounded in transit."""
    from meshloom.comm.collectives.travelling import TravellingSums

    def make(original):
        def all_reduce(self, flat):
            if flat.numel() > 800:
                flat.copy_(flat.bfloat16())
            return original(self, flat)

        return all_reduce

    p.wrap(TravellingSums, "all_reduce", make)


@bug("residual", "dp=3,exchange=server,servers=2", causes="missing_chunk", module="out")
def server_skips_workers(p: Planter) -> None:
    """A server adds up the gradients of as many ranks as there are servers: those of the others are lost."""
    from meshloom.exchange.server import Server

    def add_up(self):
        for pushed in self._pushed:
            for theirs in pushed[1 : self._num_owners]:
                pushed[0].add_(theirs)
        return [pushed[0] for pushed in self._pushed]

    p.set(Server, "_add_up", add_up)


@bug("gpt", "dp=2,microbatches=2", causes="microbatches", module="norm")
def vectors_overwritten(p: Planter) -> None:
    """Gradients of one-dimensional parameters are copied into their bucket instead of added: those of all microbatches but the last are lost."""
    from meshloom.exchange.buckets import buckets

    def ready_of(self, bucket, entry, view):
        def ready(parameter):
            gradient = parameter.grad
            if gradient is not None:
                if bucket.started:
                    raise buckets.arrived_again(entry)
                if (
                    (entry.arrived and parameter.ndim > 1)
                    or gradient is view
                    or gradient.layout is not torch.strided
                ):
                    buckets.add_gradient(view, gradient, filled=entry.arrived)
                else:
                    view.copy_(gradient)
                parameter.grad = None
                entry.arrived = True
            if self._last_chunk and entry.arrived and not entry.counted:
                entry.counted = True
                bucket.missing -= 1
                if not bucket.missing:
                    self._completed.append(bucket.number)
                    if self._overlap:
                        self._start_complete()

        return ready

    p.set(buckets.GradientBuckets, "_ready_of", ready_of)


@bug("residual", "dp=3,zero=1", causes="border", module="inp")
def padding_off_by_one(p: Planter) -> None:
    """Where a bucket is padded, clearing the padding also clears the last element of its last gradient."""
    from meshloom.exchange.zero import ZeroOne

    def start(self, bucket):
        if bucket.length < len(bucket.flat):
            bucket.flat[bucket.length - 1 :].zero_()
        self._works.append(self._travelling.reduce_scatter(self._gradients[bucket.number], bucket.flat))

    p.set(ZeroOne, "_start", start)


@bug("rare", "dp=2,zero=1,bucket_bytes=600", causes="scale", module="body.0")
def flags_by_slice(p: Planter) -> None:
    """An owner reads whether a parameter was used by the number of its slice instead of the number of the parameter: in steps without some parameter the
    gradients of others are dropped, and zeros are taken for gradients."""
    from meshloom.exchange.slices import OwnedSlices

    def gradients(self, shares, is_used):
        views = self._views[1] if self._views and self._views[0] is shares else self._views_of(shares)
        return [view if is_used[at] else None for at, view in enumerate(views)]

    p.set(OwnedSlices, "gradients", gradients)
