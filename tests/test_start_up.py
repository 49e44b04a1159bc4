"""What a process imports before its first step."""

from __future__ import annotations

import subprocess
import sys

HEAVY = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "scipy.optimize",
    "transformers",
    "matplotlib",
    "plotly",
)
TRAINED = f"""
import sys
from meshloom.cli.main import main

assert main(["train", "tests/job_file.py", "--plan", "dp=2", "--devices", "simulated", "--steps", "2"]) == 0
print("imported:", [name for name in {HEAVY} if name in sys.modules])
"""


def _said(program: str) -> str:
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_training_without_programs_imports_nothing_heavy() -> None:
    assert "imported: []" in _said(TRAINED)
