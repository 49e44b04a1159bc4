"""Ranks whose address space is limited are told what takes so much of it, and what to do."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.killing import assert_nothing_left, command


@pytest.mark.processes
@pytest.mark.slow
def test_a_limit_of_address_space_is_named(tmp_path: Path) -> None:
    """ "Cannot allocate memory" it said, on a machine with plenty."""
    limit = 30 << 30
    limited = f"import os, resource, sys; resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit})); os.execv(sys.argv[1], sys.argv[1:])"
    words = [sys.executable, "-c", limited, *command("fault_job.py:job", "dp=2", tmp_path / "run")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200)
    assert done.returncode != 0
    assert (
        "each rank maps 16 GiB of address space for every one of 2 ranks, of which little is used, and ulimit -v allows 30 GiB in all"
        in done.stderr
    ), done.stderr
    assert "--transport gloo" in done.stderr
    assert_nothing_left(tmp_path / "run")
    assert resource.getrlimit(resource.RLIMIT_AS)[0] != limit
