"""Checks of a Trainer's arguments, before anything is built from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import torch

from meshloom.asynchronous.protocol.circumstances import Circumstances
from meshloom.core.errors import JobError
from meshloom.core.job import Job
from meshloom.telemetry.progress import Listener


def check_arguments(
    job: object, listener: object, circumstances: object, counts: Mapping[str, object], paths: Mapping[str, object], switches: Mapping[str, object],
    words: Mapping[str, object], dtype: object,
) -> None:  # fmt: skip
    """Raise `JobError` for an argument of a wrong kind."""
    if not isinstance(job, Job):
        raise JobError(f"Trainer takes a Job, not a {type(job).__name__}.")
    for name, value in counts.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise JobError(f"{name}={value!r} must be a whole number, 1 or more.")
    for name, value in paths.items():
        if value is not None and not isinstance(value, str | Path):
            raise JobError(f"{name}={value!r} must be the path of a directory, as text or a pathlib.Path.")
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise JobError(f"{name}={value!r} must be True or False.")
    for name, value in words.items():
        if not isinstance(value, str):
            raise JobError(f'{name}={value!r} must be a word, like {name}="auto".')
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        said = (
            f"dtype=torch.{dtype}"
            if dtype in ("float64", "float32", "bfloat16", "float16")
            else "dtype=torch.float64"
        )
        raise JobError(f"dtype={dtype!r} must be a floating-point dtype of torch, like {said}.")
    if isinstance(listener, list | tuple) and listener:
        for one in listener:
            _check_listener(one)
    elif listener is not None:
        _check_listener(listener)
    if circumstances is not None and not isinstance(circumstances, Circumstances):
        raise JobError(f"circumstances must be ml.Circumstances(...), not a {type(circumstances).__name__}.")


def _check_listener(listener: object) -> None:
    if not isinstance(listener, Listener):
        name = getattr(listener, "__name__", repr(listener))
        raise JobError(
            f"listener={name} must be a Listener of functions, like listener=ml.Listener(step=print), not a {type(listener).__name__}."
        )
    for each in fields(Listener):
        if not callable(getattr(listener, each.name)):
            raise JobError(
                f"Listener({each.name}=...) must be a function, not a {type(getattr(listener, each.name)).__name__}."
            )
