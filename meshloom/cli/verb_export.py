"""`meshloom export`: writes the weights of a checkpoint, and the optimizer's state, for other programs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from meshloom.checkpoint.checkpoint import Checkpoint
from meshloom.checkpoint.copied_weights import CopiedWeights
from meshloom.checkpoint.format import AVERAGE, MASTER
from meshloom.checkpoint.writing.exporting import (
    nested_state,
    put_in_place,
    save_weight_files,
    save_with_torch,
)
from meshloom.comm.torch.checkpoint_directory import save_directory
from meshloom.core.errors import CheckpointError
from meshloom.core.units import format_count
from meshloom.report.terminal import LongPhases


def export(arguments: argparse.Namespace) -> int:
    """Exit code 0."""
    checkpoint, out = Checkpoint.open(Path(arguments.run)), Path(arguments.out)
    if arguments.masters and arguments.average:
        raise CheckpointError("--masters and --average give other weights. Export once with each.")
    kind = MASTER if arguments.masters else AVERAGE if arguments.average else None
    copies = CopiedWeights(checkpoint, kind) if kind else None
    what: dict[str, Any] = {"optimizer": arguments.optimizer, "copies": copies}
    writers = {
        "safetensors": lambda path: save_weight_files(checkpoint, path, **what),
        "torch": lambda path: save_with_torch(checkpoint, path, **what),
        "dcp": lambda path: save_directory(nested_state(checkpoint, **what), path),
    }
    with LongPhases(Console()) as phases:
        phases.enter(f"writing {out}")
        put_in_place(checkpoint, out, writers[arguments.to], overwrite=arguments.overwrite)
    said = "masters" if arguments.masters else "averaged weights" if arguments.average else "weights"
    said += " and the optimizer's state" if arguments.optimizer else ""
    print(f"{out} holds the {said} of {checkpoint.path} (step {checkpoint.step}) as {arguments.to}.")
    if copies and copies.kept:
        names = ", ".join(copies.kept[:3]) + (", ..." if copies.kept[3:] else "")
        print(f"{format_count(len(copies.kept), 'tensor')} without a master stayed bfloat16: {names}.")
    return 0
