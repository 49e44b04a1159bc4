"""A benchmark's own file on several ranks of this host, started by torchrun with one thread each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def torchrun(num_ranks: int, directory: str) -> list[str]:
    """The command before a benchmark's file that starts it on ranks of this host. directory: for their logs."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"),
        *("--log-dir", directory, "--nproc-per-node", str(num_ranks)),
    ]


def launched(file: str, num_ranks: int, words: Sequence[str]) -> list[dict[str, Any]]:
    """The records that its rank 0 writes to what `--json` names. words: the other arguments. A rank that
    fails ends this process, too."""
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory, "records.json")
        command = [*torchrun(num_ranks, directory), file, *words, "--json", str(output)]
        code = subprocess.run(
            command, env={**os.environ, "OMP_NUM_THREADS": "1", "MESHLOOM_KEEP_RANKS": "1"}
        ).returncode
        if code:
            sys.exit(code)
        return [json.loads(line) for line in output.read_text().splitlines()]
