"""Directories of `torch.distributed.checkpoint`, written by one process."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp


def save_directory(state: Mapping[str, Any], path: Path) -> None:
    """Saves a state_dict, nested or not, that `torch.distributed.checkpoint.load` reads on any number of
    ranks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there is one process
        dcp.save(dict(state), checkpoint_id=str(path), no_dist=True)
