"""The digits job as asynchronous plans need it: an old gradient and momentum add up, so the rate and the momentum are smaller (docs/asynchronous.md)."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import torch

_FILE = Path(__file__).parents[1] / "examples" / "02_digits.py"
_specification = importlib.util.spec_from_file_location("digits", _FILE)
assert _specification and _specification.loader
_digits = importlib.util.module_from_spec(_specification)
sys.modules["digits"] = _digits
_specification.loader.exec_module(_digits)

job = replace(_digits.job, optimizer=lambda named: torch.optim.SGD(named, lr=0.05, momentum=0.5, weight_decay=1e-4), steps=400)
