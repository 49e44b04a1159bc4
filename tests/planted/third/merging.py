"""Bugs of buffers that forwards write."""

from __future__ import annotations

import torch

from tests.planted.third.planting import Planter, bug


@bug("cnn", "dp=3", causes="batch_statistics", module="b1")
def statistics_reversed(p: Planter) -> None:
    """Replicas' running statistics are merged in the reverse order of their chunks."""
    from meshloom.replica.buffers.norm_statistics import NormStatistics

    p.wrap(NormStatistics, "apply", lambda original: lambda self, parts: original(self, parts.flip(0)))


@bug("cnn", "dp=2,sync_batch_norm=true", causes="batch_statistics", module="b1")
def variance_biased(p: Planter) -> None:
    """Synchronised batch norm keeps the biased variance in its running statistics."""
    from meshloom.replica.buffers import batch_norm

    p.wrap(
        batch_norm,
        "_update_running",
        lambda original: lambda module, count, mean, variance: original(module, count * 1e12, mean, variance),
    )


@bug("cnn", "dp=2,sync_batch_norm=true", causes="batch_statistics", module="c2")
def local_count_in_backward(p: Planter) -> None:
    """The backward of synchronised batch norm divides the summed gradients by this replica's count, not by the joined one."""
    from meshloom.replica.buffers.batch_norm import _Normalise

    def make(original):
        def forward(ctx, x, weight, bias, mean, variance, count, eps, group):
            result = original(ctx, x, weight, bias, mean, variance, count, eps, group)
            ctx.count = torch.tensor(float(x.numel() // x.shape[1]), dtype=torch.float64)
            return result

        return forward

    p.wrap(_Normalise, "forward", make)


@bug("buffered", "dp=2,microbatches=2", causes="batch_statistics")
def chunks_reversed(p: Planter) -> None:
    """A replica composes its chunks' writes to a buffer in reverse order."""
    from meshloom.replica.buffers.chunk_writes import ChunkWrites

    def make(original):
        def take(self):
            self._chunks.reverse()
            return original(self)

        return take

    p.wrap(ChunkWrites, "take", make)


@bug("cumulative", "dp=3", causes="batch_statistics", module="b1")
def cumulative_not_counted(p: Planter) -> None:
    """Where momentum is None, calls of earlier replicas in the step are not counted when a later one's mean is added, so it weighs too much."""
    from meshloom.replica.buffers import norm_statistics as n

    def apply(self, parts):
        split = n._HEADER * len(self._layers)
        headers = parts[:, :split].reshape(len(parts), -1, n._HEADER)
        running = torch.cat([value.double() for layer in self._layers for value in layer.running()])
        tracked = torch.stack([layer.tracked(running) for layer in self._layers])
        for header, added in zip(headers, parts[:, split:], strict=True):
            calls, decays, _ = header.unbind(1)
            total = (tracked + calls).clamp(min=1)
            means = torch.where(calls > 0, tracked / total, 1.0)
            decays = torch.where(self._cumulative, means, decays)
            scales = torch.where(self._cumulative, calls / total, 1.0)
            running = decays[self._layer_of] * running + scales[self._layer_of] * added
        tracked = tracked + headers[:, :, 0].sum(0)
        at = 0
        for layer, number in zip(self._layers, tracked, strict=True):
            for value in layer.running():
                value.copy_(running[at : at + layer.channels])
                at += layer.channels
            layer.set_tracked(number)
        return headers

    p.set(n.NormStatistics, "apply", apply)


@bug("buffered", "dp=2", causes="batch_statistics")
def counter_of_last(p: Planter) -> None:
    """Integer buffers are taken from the last replica: a counter misses the calls of the others."""
    from meshloom.replica.buffers import chunk_writes as c

    def make(original):
        def apply(self, parts):
            parts, at = parts.clone(), 0
            for buffer in self._moving:
                n = c.num_reals(buffer.start)
                if not buffer.start.is_floating_point():
                    for row in parts[:-1]:
                        row[at : at + n].view(c.flat(buffer.start).dtype).fill_(1)
                        row[at + n : at + 2 * n].fill_(0)
                at += 2 * n
            return original(self, parts)

        return apply

    p.wrap(c.ChunkWrites, "apply", make)


@bug(
    "cnn",
    "dp=2,pp=2,microbatches=2,schedule=interleaved,cuts=b1+c2+b2",
    causes="batch_statistics",
    module="b2",
)
def buffers_of_first_stage(p: Planter) -> None:
    """At the end of a step a rank with several stages merges the buffers of its first one only."""
    from meshloom.replica.chunk_scope import ChunkScope

    def finish(self):
        for constant in self._constants:
            constant.check()
        for statistics in list(self._now.values())[:1]:
            yield from statistics.finish()
        yield from self._numbers.finish()
        self.carried.clear()
        self._finished[self.turn.number] += 1

    p.set(ChunkScope, "finish", finish)
