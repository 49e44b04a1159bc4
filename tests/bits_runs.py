"""Runs of `bits.py` on simulated ranks, one after another in a process that imports one of the two trees."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch

import meshloom as ml


def main() -> None:
    """The argument: a list of [job, plan, directory], as JSON."""
    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(__file__).parent))
    import bits_jobs

    warnings.simplefilter("ignore")
    quiet = ml.Listener(started=lambda text: None, note=lambda text: None)
    for job, plan, directory in json.loads(sys.argv[1]):
        with ml.Trainer(
            getattr(bits_jobs, job), plan, devices="simulated", out=directory, cache="off", listener=quiet
        ) as trainer:
            trainer.fit()


if __name__ == "__main__":
    main()
