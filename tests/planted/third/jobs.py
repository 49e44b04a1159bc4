"""The jobs of the third list, by name."""

from __future__ import annotations

from collections.abc import Callable

import torch

from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.verify.findings import Report
from meshloom.verify.run import verify
from tests.planted.third.plain import (
    adafactor,
    augmented,
    averaged,
    background,
    cnn,
    deep,
    frozen,
    gentle,
    growing,
    mixed,
    noisy,
    plateau,
    residual,
    stepping,
    stream,
    units,
    wide,
)
from tests.planted.third.sequences import encdec, gpt, lstm, mqa
from tests.planted.third.stateful import buffered, carrying, experts, gan, rare

JOBS: dict[str, Callable[[], Job]] = {
    "gpt": gpt,
    "packed": lambda: gpt(packed=True),
    "mqa": mqa,
    "gpt4": lambda: gpt(layers=4),
    "cnn": cnn,
    "cumulative": lambda: cnn(momentum=None),
    "augmented": lambda: cnn(draws=augmented),
    "residual": residual,
    "deep": deep,
    "wide": wide,
    "units": units,
    "averaged": averaged,
    "adafactor": adafactor,
    "background": background,
    "frozen": frozen,
    "growing": growing,
    "mixed": mixed,
    "stream": stream,
    "lstm": lstm,
    "encdec": encdec,
    "experts": experts,
    "hard": lambda: experts(True),
    "rare": rare,
    "carrying": carrying,
    "buffered": buffered,
    "gan": gan,
    "noisy": noisy,
    "stepping": stepping,
    "gentle": gentle,
    "plateau": plateau,
}


def verified(name: str, plan: str, dtype: torch.dtype | None = None) -> Report:
    """The job verified at the defaults; what a bug has changed in programs is not kept."""
    report = verify(
        JOBS[name](), Plan.parse(plan), devices="simulated", dtype=dtype, quick=False, cache="off"
    )
    assert report
    return report
