"""`meshloom export`: writes the weights of a checkpoint, and the optimizer's state, for other programs."""

from __future__ import annotations

import argparse
from pathlib import Path

from meshloom.checkpoint.checkpoint import Checkpoint
from meshloom.checkpoint.master_weights import MasterWeights
from meshloom.checkpoint.writing.exporting import (
    nested_state,
    put_in_place,
    save_weight_files,
    save_with_torch,
)
from meshloom.comm.torch.checkpoint_directory import save_directory
from meshloom.core.units import format_count


def export(arguments: argparse.Namespace) -> int:
    """Exit code 0."""
    checkpoint, out = Checkpoint.open(Path(arguments.run)), Path(arguments.out)
    optimizer: bool = arguments.optimizer
    masters = MasterWeights(checkpoint) if arguments.masters else None
    writers = {
        "safetensors": lambda path: save_weight_files(checkpoint, path, optimizer=optimizer, masters=masters),
        "torch": lambda path: save_with_torch(checkpoint, path, optimizer=optimizer, masters=masters),
        "dcp": lambda path: save_directory(
            nested_state(checkpoint, optimizer=optimizer, masters=masters), path
        ),
    }
    put_in_place(checkpoint, out, writers[arguments.to], overwrite=arguments.overwrite)
    what = ("masters" if masters else "weights") + (" and the optimizer's state" if optimizer else "")
    print(f"{out} holds the {what} of {checkpoint.path} (step {checkpoint.step}) as {arguments.to}.")
    if masters and masters.kept:
        names = ", ".join(masters.kept[:3]) + (", ..." if masters.kept[3:] else "")
        print(f"{format_count(len(masters.kept), 'tensor')} without a master stayed bfloat16: {names}.")
    return 0
