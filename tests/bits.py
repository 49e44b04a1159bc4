"""The bits that plans train, as digests: `python -m tests.bits --out FILE` writes them, `--against FILE`
compares with what an earlier commit wrote.

A change that moves or renames code, and changes nothing that is computed, leaves all of them as they were on
the same machine. Of other machines other bits are expected, so no suite holds them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

JOBS = Path(__file__).with_name("bits_jobs.py")
STEPS = 5
PIECE = re.compile(r"(.*)\[(\d+):\d+\]")
# Name of the job in `bits_jobs.py`, plan, devices.
PAIRS = [
    ("gpt", "dp=2,keyed_draws=true", "cpu"),
    ("gpt", "tp=2", "cpu"),
    ("gpt", "pp=2,microbatches=2,schedule=zb-h1", "cpu"),
    ("gpt", "dp=2,pp=2,tp=2,microbatches=2,zero=1", "simulated"),
    ("gpt", "pp=2,tp=2,microbatches=4,recompute=selective", "simulated"),
    ("cnn", "dp=3,sync_batch_norm=true", "simulated"),
    ("cnn", "dp=2,pp=2,microbatches=2,schedule=zb-v", "simulated"),
    ("branch", "dp=4,exchange=server,servers=2", "simulated"),
    ("branch", "dp=2,compress=powersgd:2", "cpu"),
    ("unused", "dp=4,exchange=diloco,local_steps=2", "simulated"),
    ("unused", "dp=3,exchange=ring,shares=3+2+1", "simulated"),
    ("mlp", "dp=2,exchange=async,servers=2,staleness=1", "simulated"),
]


def digest_of(job: str, plan: str, devices: str) -> str:
    """Of all weights and the optimizer's state after `STEPS` steps, as the last checkpoint has them."""
    with tempfile.TemporaryDirectory() as directory:
        words = [
            "train",
            f"{JOBS}:{job}",
            "--plan",
            plan,
            "--devices",
            devices,
            "--steps",
            str(STEPS),
            "--out",
            directory,
        ]
        done = subprocess.run(
            [sys.executable, "-m", "meshloom", *words],
            capture_output=True,
            text=True,
            env={**os.environ, "MESHLOOM_CACHE": "off"},
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{job} under {plan}: {done.stderr}")
        return _digest(max(Path(directory).glob("step-*")))


def _digest(checkpoint: Path) -> str:
    """By name, whatever the files are and however state is divided among them."""
    parts: defaultdict[tuple[bool, str], dict[int, np.ndarray[Any, Any]]] = defaultdict(dict)
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118  it is no mapping
                piece = PIECE.fullmatch(name) if file.name.startswith("state") else None
                key, start = (piece[1], int(piece[2])) if piece else (name, 0)
                parts[piece is not None, key][start] = tensors.get_tensor(name)
    found = hashlib.sha256()
    for key, pieces in sorted(parts.items()):
        value = np.concatenate([pieces[start].reshape(-1) for start in sorted(pieces)])
        found.update(f"{key} {value.dtype} {value.shape}\n".encode())
        found.update(value.tobytes())
    return found.hexdigest()[:16]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the digests here")
    parser.add_argument("--against", type=Path, help="digests of an earlier commit on this machine")
    said = parser.parse_args()
    found = {f"{job} {plan}": digest_of(job, plan, devices) for job, plan, devices in PAIRS}
    for name, digest in found.items():
        print(digest, name)
    if said.out:
        said.out.write_text(json.dumps(found, indent=1) + "\n")
    known = json.loads(said.against.read_text()) if said.against else found
    different = [name for name in known if known[name] != found.get(name)]
    if different:
        print("other bits: " + "; ".join(different))
    return bool(different)


if __name__ == "__main__":
    raise SystemExit(main())
