"""Whole parameters come together at their keepers and go back, whatever the owners' division is."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from meshloom.comm.recording import RecordedGroup
from meshloom.comm.simulated import simulated_groups
from meshloom.comm.turns import in_turns
from meshloom.exchange.exchange import Slice
from meshloom.optimizer.full_from_slices import FullFromSlices, assign_evenly
from meshloom.telemetry.traffic import Traffic

SHAPES: list[tuple[tuple[int, ...], torch.dtype]] = [
    ((3, 4), torch.float64),
    ((5,), torch.float32),
    ((), torch.float64),
    ((2, 2), torch.float32),
]
# of each parameter: where ranks 0, 1, 2 begin and the last ends
CUTS = [[0, 5, 5, 12], [0, 1, 5, 5], [0, 0, 0, 1], [0, 0, 4, 4]]
USED = [True, True, True, False]


def test_sizes_are_divided_evenly_and_the_same_everywhere():
    ranks = assign_evenly([7, 3, 9, 1, 4, 6], 3)
    loads = [
        sum(size for size, rank in zip([7, 3, 9, 1, 4, 6], ranks, strict=True) if rank == each)
        for each in range(3)
    ]
    assert sum(loads) == 30 and max(loads) <= 11
    assert assign_evenly([], 2) == []


def test_gradients_come_together_and_values_go_back():
    groups = [RecordedGroup(group, "dp") for group in simulated_groups(3)]
    worlds: list[list[nn.Parameter]] = [
        [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape, dtype in SHAPES] for _ in groups
    ]
    keepers = [[1], [0, 1, 2], [2], [0]]
    gradient = [torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=dtype) for shape, dtype in SHAPES]

    def rank(number: int) -> FullFromSlices:
        parameters = worlds[number]
        owned = [
            Slice(str(i), each, cut[number], cut[number + 1])
            for i, (each, cut) in enumerate(zip(parameters, CUTS, strict=True))
        ]
        owned = [each for each in owned if each.start < each.stop]
        mine = [
            gradient[int(each.name)][each.start : each.stop] if USED[int(each.name)] else None
            for each in owned
        ]
        whole = FullFromSlices(parameters, keepers, owned, groups[number])
        whole.fetch(mine)
        for i, each in enumerate(parameters):
            if number in keepers[i] and USED[i]:
                assert (
                    each.grad is not None
                    and torch.equal(each.grad.view(-1), gradient[i])
                    and each.grad.shape == each.shape
                )
                each.data.sub_(each.grad)
            else:
                assert each.grad is None
        whole.give_back()
        return whole

    wholes = in_turns([partial(rank, number) for number in range(3)])
    for number, parameters in enumerate(worlds):
        for i, (each, cut) in enumerate(zip(parameters, CUTS, strict=True)):
            expected: Tensor = -gradient[i] if USED[i] else torch.zeros_like(gradient[i])
            own = slice(cut[number], cut[number + 1])
            assert torch.equal(each.detach().view(-1)[own], expected[own])
    for whole, group in zip(wholes, groups, strict=True):
        assert whole.expected_bytes().after(steps=1) == Traffic.of({"dp": group.counts})
