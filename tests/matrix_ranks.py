"""Run as a rank: verifies cases of the matrix one after another on CPU processes; rank 0 writes what differs.

python -m tests.matrix_ranks CASES.json RESULT.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from meshloom.launch.failure import leave, report_failure
from tests.matrix import run_cases


def main() -> int:
    """Verify all cases of the file."""
    torch.set_num_threads(1)
    cases, result = (Path(argument) for argument in sys.argv[1:])
    wrong = run_cases(json.loads(cases.read_text()), "cpu")
    if wrong is not None:
        result.write_text(json.dumps(wrong))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception as error:
        leave(report_failure(error))
