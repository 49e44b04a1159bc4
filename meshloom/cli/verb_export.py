"""`meshloom export`: writes the weights of a checkpoint for other programs."""

from __future__ import annotations

import argparse
from pathlib import Path

from meshloom.checkpoint.checkpoint import Checkpoint
from meshloom.checkpoint.writing.exporting import copy_weight_files, put_in_place, save_with_torch
from meshloom.comm.torch.checkpoint_directory import save_directory


def export(arguments: argparse.Namespace) -> int:
    """Exit code 0."""
    checkpoint, out = Checkpoint.open(Path(arguments.run)), Path(arguments.out)
    writers = {
        "safetensors": lambda path: copy_weight_files(checkpoint, path),
        "torch": lambda path: save_with_torch(checkpoint, path),
        "dcp": lambda path: save_directory({"model": checkpoint.weights()}, path),
    }
    put_in_place(checkpoint, out, writers[arguments.to], overwrite=arguments.overwrite)
    print(f"{out} holds the weights of {checkpoint.path} (step {checkpoint.step}) as {arguments.to}.")
    return 0
