"""The figures of the batch: how it is split, how gradients go around a ring, and what the promise compares."""

from __future__ import annotations

import torch
from sketch import EVERYBODY, NOTHING, QUIET, RANKS, Page
from torch import Tensor

from meshloom.comm.collectives.ring import ring_group
from meshloom.comm.group import Group, Work
from meshloom.comm.simulated import simulated_groups
from meshloom.comm.turns import in_turns
from meshloom.core.plan import Plan
from meshloom.data.chunks import share_of, split_batch


def batch_split() -> Page:
    """66 samples on dp=4."""
    plan, samples = Plan(dp=4), 66
    page, left, wide = Page(9.6, 4.6), 0.3, 9.0
    page.words(left, 4.35, f"one batch of {samples} samples, --plan {plan}", at="left", bold=True)
    column, gap = 2.05, (wide - 4 * 2.05) / 3
    for replica in range(plan.dp):
        (cut,) = share_of(replica, split_batch(samples, plan), plan)
        x, colour = left + replica * (column + gap), RANKS[replica]
        page.box(
            left + wide * cut.start / samples,
            3.65,
            wide * cut.samples / samples,
            0.45,
            f"samples {cut.start}-{cut.stop - 1}",
            colour=colour,
        )
        middle = x + column / 2
        page.arrow((left + wide * (cut.start + cut.stop) / 2 / samples, 3.63), (middle, 3.2))
        page.box(x, 2.4, column, 0.78, f"rank {replica}: whole model\n{cut.samples} samples", colour=colour)
        page.arrow((middle, 2.38), (middle, 1.83))
        page.words(middle + 0.12, 2.1, f"gradients $g_{replica}$", at="left", size=10)
        page.arrow((middle, 1.23), (middle, 0.83))
        page.box(x, 0.25, column, 0.55, "same update,\nsame parameters", colour=colour, size=10)
    page.box(
        left,
        1.25,
        wide,
        0.55,
        f"all-reduce: everybody gets $(g_0 + g_1 + g_2 + g_3)$ / {samples}",
        colour=EVERYBODY,
    )
    return page


def ring() -> Page:
    """Four ranks, each tensor in four parts. What each rank's part is the sum of is what the package's own ring sends."""
    ranks = 4
    sent = _sent_around(ranks)
    held = [[{rank} for _ in range(ranks)] for rank in range(ranks)]  # [rank][part]: whose numbers are in it
    page, cell, top = Page(12.0, 4.1), 0.37, 2.9
    wide = ranks * cell + 0.13
    for step in range(2 * (ranks - 1) + 1):
        x = 0.78 + step * wide
        arriving: dict[tuple[int, int], set[int]] = {}
        if step < 2 * (ranks - 1):
            for rank in range(ranks):
                part, owners = sent[(rank - 1) % ranks][step]
                arriving[rank, part] = owners | (held[rank][part] if step < ranks - 1 else set())
        page.words(x + ranks * cell / 2, top + 0.3, "start" if step == 0 else f"after step {step}", size=10)
        for rank in range(ranks):
            y = top - (rank + 1) * 0.6
            for part in range(ranks):
                owners = held[rank][part]
                sends = ((rank + 1) % ranks, part) in arriving
                colour = EVERYBODY if len(owners) == ranks else RANKS[rank] if len(owners) == 1 else NOTHING
                size = 7.5 if len(owners) == ranks else 9.0
                page.box(
                    x + part * cell,
                    y,
                    cell,
                    0.42,
                    "".join(map(str, sorted(owners))),
                    colour=colour,
                    size=size,
                    bold=sends,
                )
        for (rank, part), owners in arriving.items():
            held[rank][part] = owners
    assert all(owners == set(range(ranks)) for row in held for owners in row)
    for rank in range(ranks):
        page.words(0.12, top - (rank + 1) * 0.6 + 0.21, f"rank {rank}", at="left", size=10)
    for first, words in ((1, "scatter-reduce: add what comes"), (ranks, "all-gather: keep what comes")):
        start = 0.78 + first * wide
        page.arrow(
            (start, top + 0.62), (start + (ranks - 1) * wide - 0.13, top + 0.62), both=True, colour=QUIET
        )
        page.words(start + ((ranks - 1) * wide - 0.13) / 2, top + 0.84, words, bold=True)
    legend = "A row is a rank's gradients, cut into four parts. The digits say whose gradients a part is the sum of. "
    page.words(
        0.12,
        0.24,
        f"{legend}Bold border: sent next, to the rank below (from rank 3 to rank 0).",
        at="left",
        size=9.5,
        colour=QUIET,
    )
    return page


def _sent_around(ranks: int) -> list[list[tuple[int, set[int]]]]:
    """[rank][step] the part that it sends in an all-reduce of one element per rank, and whose numbers are in it."""
    sent: list[list[tuple[int, set[int]]]] = [[] for _ in range(ranks)]

    def all_reduce(group: Group) -> None:
        send = group.send

        def seen(tensor: Tensor, destination: int) -> Work:
            assert destination == (group.rank + 1) % ranks
            owners = {rank for rank in range(ranks) if int(tensor) >> rank & 1}
            sent[group.rank].append((int(tensor.storage_offset()), owners))
            return send(tensor, destination)

        group.send = seen
        ring_group(group).all_reduce(torch.full((ranks,), 1 << group.rank)).wait()

    in_turns([lambda group=group: all_reduce(group) for group in simulated_groups(ranks)])
    return sent


def promise() -> Page:
    """10 samples, dp=2,microbatches=2, beside one device."""
    plan, samples = Plan(dp=2, microbatches=2), 10
    cuts = split_batch(samples, plan)
    page, left, unit = Page(9.6, 4.5), 1.7, 0.49
    page.words(0.2, 4.25, f"{samples} samples, --plan {plan}", at="left", bold=True)
    page.words(0.2, 3.7, "the batch", at="left")
    for cut in cuts:
        words = f"samples\n{cut.start} to {cut.stop - 1}"
        page.box(
            left + unit * cut.start, 3.4, unit * cut.samples, 0.6, words, colour=RANKS[cut.index], size=10
        )
    for replica in range(plan.dp):
        x, y = left, 2.65 - 0.55 * replica
        page.words(0.2, y + 0.21, f"replica {replica}", at="left")
        for cut in share_of(replica, cuts, plan):
            page.box(x, y, unit * cut.samples, 0.42, f"chunk {cut.index}", colour=RANKS[cut.index], size=10)
            x += unit * cut.samples
    page.words(0.2, 1.11, "one device", at="left")
    for cut in cuts:
        page.box(
            left + unit * cut.start,
            0.9,
            unit * cut.samples,
            0.42,
            f"chunk {cut.index}",
            colour=RANKS[cut.index],
            size=10,
        )
    for y, height in ((2.1, 0.97), (0.9, 0.42)):
        page.arrow(
            (left + unit * samples + 0.05, y + height / 2), (left + unit * samples + 0.4, y + height / 2)
        )
        page.box(
            left + unit * samples + 0.42,
            y,
            2.1,
            height,
            f"sum of gradients\n/ {samples}, one update",
            colour=EVERYBODY,
            size=9.5,
        )
    page.words(left + unit * samples + 1.47, 1.72, "the same, up to rounding", size=10, bold=True)
    page.arrow((left, 0.55), (left + unit * samples, 0.55), colour=QUIET)
    page.words(left + unit * samples / 2, 0.32, "time", size=10, colour=QUIET)
    return page
