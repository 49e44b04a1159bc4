"""`meshloom export`: writes the weights of a checkpoint, and the optimizer's state, for other programs."""

from __future__ import annotations

import argparse
from pathlib import Path

from meshloom.checkpoint.checkpoint import Checkpoint
from meshloom.checkpoint.writing.exporting import (
    copy_weight_files,
    nested_state,
    put_in_place,
    save_with_torch,
)
from meshloom.comm.torch.checkpoint_directory import save_directory


def export(arguments: argparse.Namespace) -> int:
    """Exit code 0."""
    checkpoint, out = Checkpoint.open(Path(arguments.run)), Path(arguments.out)
    what = {"optimizer": arguments.optimizer, "average": arguments.average}
    writers = {
        "safetensors": lambda path: copy_weight_files(checkpoint, path, **what),
        "torch": lambda path: save_with_torch(checkpoint, path, **what),
        "dcp": lambda path: save_directory(nested_state(checkpoint, **what), path),
    }
    put_in_place(checkpoint, out, writers[arguments.to], overwrite=arguments.overwrite)
    said = "averaged weights" if arguments.average else "weights"
    said += " and the optimizer's state" if arguments.optimizer else ""
    print(f"{out} holds the {said} of {checkpoint.path} (step {checkpoint.step}) as {arguments.to}.")
    return 0
