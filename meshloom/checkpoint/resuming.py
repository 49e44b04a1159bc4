"""Resuming on all ranks, which see the checkpoint's files: each rank reads the slices that it needs.

Checksums come first: each rank computes those of its share of all bytes. A rank needs memory for its own state and
one full tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from meshloom.checkpoint.checkpoint import Checkpoint
from meshloom.checkpoint.checksums import Sum, of_files, sum_of_share
from meshloom.checkpoint.format import META, read_meta
from meshloom.comm.group import Group
from meshloom.comm.objects import collect, on_rank_0, share
from meshloom.core.errors import CheckpointError

Told = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Loader:
    """What a rank does with the tensors that it receives. It keeps no reference to them; it copies.

    weight: a parameter or buffer by name, in full shape; what it does not touch is not read. state: a key,
    its full shape, and what reads elements of it from start to stop, flat. finish: called after the last one.
    """

    weight: Callable[[str, Tensor], None]
    state: Callable[[str, Sequence[int], Callable[[int, int], Tensor]], None]
    finish: Callable[[], None]


def open_together(directory: Path, group: Group) -> Checkpoint:
    """The checkpoint that rank 0 finds in `directory`, on every rank; sizes are verified, checksums not yet."""
    opened = on_rank_0(group, lambda: Checkpoint.open(directory, checksums=False), CheckpointError)
    path, meta = share(group, [str(opened.path), opened.meta] if opened else None)
    return opened or Checkpoint(Path(path), meta)


def check_together(group: Group, check: Callable[[], None]) -> None:
    """Raises on every rank what `check` raises on the first rank where it does."""
    _raise_first(group, _attempt(check))


def _untold(done: int, of: int) -> None:
    """Nobody is told how far loading is."""


def load_together(
    checkpoint: Checkpoint, keys: Sequence[str], loader: Loader, group: Group, told: Told = _untold
) -> None:  # fmt: skip
    """Passes all weights and the state of `keys`, equal on all ranks, to every rank's `loader`. told: called with the tensors
    that have been read, and their number.

    Raises the same error on every rank if a file is damaged, or else if some rank cannot load.
    """
    seen = collect(group, read_meta(checkpoint.path) == checkpoint.meta)
    if not all(seen):
        raise CheckpointError(
            f"Rank {seen.index(False)} does not see the checkpoint {checkpoint.path}, or sees another one there. All ranks resume from one directory that they share."
        )
    facts = checkpoint.meta["files"]
    sizes = {name: each["bytes"] for name, each in facts.items()}
    sums: list[Sum] = []
    problem = _attempt(lambda: sums.extend(sum_of_share(checkpoint.path, sizes, group.rank, group.size)))
    _raise_first(group, problem)
    everyone = collect(group, sums)
    found = of_files(tuple(each) for theirs in everyone for each in theirs)
    wrong = next((name for name in sorted(facts) if found.get(name, 0) != facts[name]["crc32"]), None)
    damage: str | None = share(group, checkpoint.damaged(wrong) if wrong and not group.rank else None)
    if damage:
        raise CheckpointError(damage)
    _raise_first(group, _attempt(lambda: _read(checkpoint, keys, loader, told)))


def _read(checkpoint: Checkpoint, keys: Sequence[str], loader: Loader, told: Told) -> None:
    weights = checkpoint.stored_weights()
    for name in checkpoint.meta["fingerprint"]:
        if name not in weights.entries:
            raise CheckpointError(f"{checkpoint.path} has no tensor {name}, of which its {META} speaks.")
    of = len(weights.entries) + len(keys)
    for number, name in enumerate(weights.entries):
        told(number, of)
        loader.weight(name, weights.tensor(name))
    for number, key in enumerate(keys):
        told(len(weights.entries) + number, of)
        loader.state(key, checkpoint.shape(key), partial(checkpoint.read, key))
    loader.finish()


def _attempt(action: Callable[[], None]) -> Exception | None:
    """The exception that `action` raises, held until all ranks know of it."""
    try:
        with torch.no_grad():
            action()
    except Exception as error:
        return error
    return None


def _raise_first(group: Group, problem: Exception | None) -> None:
    """Raises on every rank the problem of the first rank that has one; other problems may be consequences of
    it."""
    mine = (str(problem) or type(problem).__name__) if problem else None
    everyone = collect(group, mine)
    said = next((each for each in everyone if each is not None), None)
    if problem is not None and mine == said:
        raise problem
    if said is not None:
        raise CheckpointError(said)
