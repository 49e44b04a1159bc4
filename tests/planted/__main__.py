"""Plants each bug of the list and counts: `python -m tests.planted [--float64] [--bf16-mixed] [PART OF A NAME ...]`."""

from __future__ import annotations

import sys
import time

import pytest
import torch

from tests.planted import BUGS
from tests.planted.bugs import at_precision
from tests.planted.judging import judged

if __name__ == "__main__":
    parts = [each for each in sys.argv[1:] if not each.startswith("--")]
    dtype = torch.float64 if "--float64" in sys.argv else None
    listed = [at_precision(each, "bf16-mixed") for each in BUGS] if "--bf16-mixed" in sys.argv else BUGS
    chosen = [each for each in listed if not parts or any(part in each.name for part in parts)]
    counts = [0, 0, 0]
    with_module = 0
    for bug in chosen:
        began = time.monotonic()
        with pytest.MonkeyPatch.context() as patch:
            try:
                found = judged(bug, patch, dtype)
            except Exception as error:  # the plant is wrong, or verification is
                print(f"!!! {bug.name}: {type(error).__name__}: {error}".replace("\n", " ")[:300], flush=True)
                continue
        counts = [a + b for a, b in zip(counts, (found.caught, found.named, found.module_right), strict=True)]
        with_module += bug.module is not None
        marks = "".join("x" if each else "." for each in (found.caught, found.named, found.module_right))
        print(f"{marks} {bug.name} {time.monotonic() - began:.1f} s: {found.said}", flush=True)
    print(
        f"{counts[0]} of {len(chosen)} caught, {counts[1]} named; first module right in {counts[2]} of {with_module}"
    )
