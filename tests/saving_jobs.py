"""Saving on several ranks in lockstep, each with a slice of the optimizer's state."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshloom.checkpoint.format import Piece, fingerprint_of
from meshloom.checkpoint.writing.across_hosts import write_across_hosts
from meshloom.checkpoint.writing.parallel import divide, parallel
from meshloom.checkpoint.writing.saving import Write, WrittenFiles, save
from meshloom.comm.group import Group
from meshloom.comm.simulated import simulated_groups
from meshloom.comm.turns import in_turns
from meshloom.core.plan_shares import chunk_sizes

SHAPES = {"blocks.0.up.weight": (5, 3), "blocks.0.up.bias": (5,), "scale": ()}


def weights_of(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def state_of(step: int) -> dict[str, Tensor]:
    """The optimizer's state in full shape: what slices are cut from, and what reading is held against."""
    return {f"optimizer/{name}/exp_avg": weight * 10 for name, weight in weights_of(step).items()}


def slices_of(state: dict[str, Tensor], rank: int, num_ranks: int) -> list[Piece]:
    """Rank's contiguous part of every tensor."""
    pieces = []
    for key, tensor in state.items():
        sizes = chunk_sizes(tensor.numel(), num_ranks)
        start = sum(sizes[:rank])
        stop = start + sizes[rank]
        if stop > start:
            pieces.append(Piece(key, tensor.flatten()[start:stop], start, stop, tuple(tensor.shape)))
    return pieces


def written_in_parallel(weights: dict[str, Tensor], pieces: list[Piece], **settings: Any) -> Write:
    """Every rank holds all weights."""
    return parallel(whole_pieces(weights), pieces, **settings)


def written_across_hosts(weights: dict[str, Tensor], pieces: list[Piece], file_bytes: int = 60) -> Write:
    """The same, each file by one rank. file_bytes: small, so that several ranks write some."""

    def write(directory: Path, temporary: Path, group: Group) -> WrittenFiles:
        divided = divide(group, whole_pieces(weights), pieces, file_bytes)
        return write_across_hosts(divided)(directory, temporary, group)

    return write


def whole_pieces(weights: dict[str, Tensor]) -> list[Piece]:
    return [Piece(name, each.flatten(), 0, each.numel(), tuple(each.shape)) for name, each in weights.items()]


def save_step(
    directory: Path, step: int, num_ranks: int = 2, keep: int = 2, content: int | None = None, **changes: Any
) -> Path:
    """Save what `weights_of` and `state_of` say belongs to `step` (or to `content`)."""
    content = step if content is None else content
    settings: dict[str, Any] = {
        "values": {"epoch": content},
        "fingerprint": fingerprint_of(weights_of(content).items()),
        "plan_text": f"dp={num_ranks}",
        "keep": keep,
        **changes,
    }
    pieces = settings.pop("pieces", lambda rank: slices_of(state_of(content), rank, num_ranks))
    weights = settings.pop("weights", weights_of(content))
    writing = settings.pop("writing", written_in_parallel)
    paths = in_turns(
        [
            partial(
                save, directory, step, write=writing(weights, pieces(group.rank)), group=group, **settings
            )
            for group in simulated_groups(num_ranks)
        ]
    )
    assert len(set(paths)) == 1
    return paths[0]


LOGS = frozenset({"events.jsonl", "metrics.csv"})  # that a run writes besides checkpoints


def names_in(directory: Path) -> list[str]:
    """But for the run's logs."""
    return sorted({path.name for path in directory.iterdir()} - LOGS)
