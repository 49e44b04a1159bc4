"""Torch's own parallel tools give over shm what they give over Gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from processes import on_ranks
from torch.utils import _pytree as pytree
from torch_backend_world import SCENARIOS, world

from meshloom.comm.shm import why_not

pytestmark = [pytest.mark.processes, pytest.mark.skipif(bool(why_not()), reason=why_not() or "it is there")]


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return on_ranks(world, 2)


@pytest.mark.parametrize("name", SCENARIOS)
def test_shm_equals_gloo(found: list[dict[str, Any]], name: str):
    """Bit by bit: the sum of two numbers does not depend on their order."""
    for rank in found:
        over_shm, over_gloo = map(pytree.tree_leaves, rank[name])
        assert len(over_shm) == len(over_gloo) > 0
        for one, other in zip(over_shm, over_gloo, strict=True):
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_checkpoints_saved_over_one_are_loaded_over_the_other(found: list[dict[str, Any]]):
    for rank in found:
        assert len(rank["checkpoint"]) == 8
        assert all(torch.equal(loaded, saved) for loaded, saved in rank["checkpoint"])
