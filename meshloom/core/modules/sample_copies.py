"""Copies of samples, for a `collate` that changes what it is given."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from meshloom.core.errors import CODE_ERRORS


def copied_samples(samples: Sequence[Any]) -> list[Any]:
    """What they have in common stays in common. One that cannot be copied with all it holds is copied alone, or is taken as it is."""
    memo: dict[int, Any] = {}
    return [_copied(each, memo) for each in samples]


def _copied(sample: Any, memo: dict[int, Any]) -> Any:
    for copied in (partial(copy.deepcopy, memo=memo), copy.copy):
        with suppress(copy.Error, *CODE_ERRORS):  # a lock, a file, a graph of autograd
            return copied(sample)
    return sample
