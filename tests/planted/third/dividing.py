"""Bugs of operators that are divided."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.planted.third.planting import DIVIDED, Planter, bug


@bug("gpt", DIVIDED, causes="division", module="blocks.0.attention.out")
def bias_on_every_rank(p: Planter) -> None:
    """A value that enters a partial sum (a row layer's bias, a residual) is added on every rank instead of the first."""
    from meshloom.program.operators import collectives as c

    def make(original):
        def value(change, group, given):
            if change.target == "partial" and change.source == "invariant":
                return given.clone()
            return original(change, group, given)

        return value

    def make_all(original):
        def values(change, given):
            if change.target == "partial" and change.source == "invariant":
                return [each.clone() for each in given]
            return original(change, given)

        return values

    p.wrap(c, "_value", make)
    p.wrap(c, "_values", make_all)


@bug("gpt", "tp=2,tp_placements=embed:vocabulary", causes="division", module="the model or loss")
def class_border(p: Planter) -> None:
    """With a sharded vocabulary the later rank's classes begin one too late: its first class is missed, and others are shifted."""
    from meshloom.program.operators.partial import _CrossEntropy

    def make(original):
        def forward(ctx, part, ranks, *rest):
            part = replace(part, starts=(part.starts[0], *(each + 1 for each in part.starts[1:])))
            return original(ctx, part, ranks, *rest)

        return forward

    p.wrap(_CrossEntropy, "forward", make)


@bug(
    "encdec",
    "tp=2,tp_placements=encoder.*.own:heads+decoder.*.own:heads",
    causes="division",
    module="encoder.0.own.drop",
)
def masks_of_parts(p: Planter) -> None:
    """Each rank draws a mask of its part's size, instead of a slice of the full one: ranks have the same mask for other parts."""
    from meshloom.program.operators import sliced_draws as s

    def call(self, *args, **kwargs):
        before = torch.default_generator.initial_seed()
        result = self.op(*args, **kwargs)
        s.seed_torch(s.seed_of_draw(before, self.count))
        return result

    p.set(s.PartOfDraw, "__call__", call)


@bug("gpt", DIVIDED, causes="forward", module="head")
def uneven_rows(p: Planter) -> None:
    """Parts that are gathered are read at rank x their own size, not rank x the longest: wrong where shards are uneven."""
    from meshloom.program.operators import collectives as c

    def start_gather(before, group, value):
        source = c.owned(before)
        mine = c.take_within(source, before, group.rank, value) if before.is_shared else value
        longest = source.most_elements
        row = value.new_zeros(longest)
        row[: mine.numel()].view(mine.shape).copy_(mine)
        rows = value.new_empty(group.size * longest)
        gathering = group.all_gather(rows, row)

        def finish():
            gathering.wait()
            parts = [
                rows[rank * source.num_elements(rank) : (rank + 1) * source.num_elements(rank)].view(
                    source.local_shape(rank)
                )
                for rank in range(group.size)
            ]
            return c.assemble(source, parts)

        return finish

    p.set(c, "start_gather", start_gather)


@bug("gpt", DIVIDED, causes="division", module="blocks.0.attention.k")
def packed_runs_reversed(p: Planter) -> None:
    """A rank's rows of one projection (the keys') are taken in reverse order of their runs: heads exchanged for one another."""
    from meshloom.program.operators import linears

    def make(original):
        def forward(self, layer, x, weight, bias):
            found = original(self, layer, x, weight, bias)
            if layer == 1 and len(self.biased) == 3:
                n = found.shape[-1] // 3
                found = torch.cat([found[..., n : 2 * n], found[..., :n], found[..., 2 * n :]], -1)
            return found

        return forward

    p.wrap(linears.GatheredLinears, "forward", make)


@bug("lstm", "tp=2,tp_placements=embed:vocabulary", causes="division", module="embed")
def embedding_border(p: Planter) -> None:
    """The first row of each part of a divided embedding is taken for another rank's: its tokens get zeros."""
    import sys

    from meshloom.program.operators import partial as q

    original = q.embedding_of_part

    def embedding_of_part(weight, index, start, padding):
        found = original(weight, index, start, padding)
        return torch.where((index > start).unsqueeze(-1), found, 0.0)

    for module in list(sys.modules.values()):
        if (
            getattr(module, "__name__", "").startswith("meshloom.")
            and vars(module).get("embedding_of_part") is original
        ):
            p.set(module, "embedding_of_part", embedding_of_part)


@bug(
    "deep",
    "dp=2,pp=2,tp=2,microbatches=2,tp_placements=blocks.*.up:column+blocks.*.down:row",
    causes="stages",
    module="blocks.4.norm",
)
def tp_sum_twice(p: Planter) -> None:
    """A sum over tp that is started in backward is added to itself where the shard is contiguous already."""
    from meshloom.program.operators import collectives as c

    def make(original):
        def start(change, group, gradient, *, ours=False):
            summing = original(change, group, gradient, ours=ours)
            return (lambda: summing() * 2) if ours else summing

        return start

    p.wrap(c, "start_sum_back", make)
    from meshloom.program.operators import gathered

    p.set(gathered, "start_sum_back", c.start_sum_back)
