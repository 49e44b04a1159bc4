"""A machine with other GPUs and cores than this one, for tests of what is chosen on it."""

from __future__ import annotations

import os

import pytest
import torch


def machine(monkeypatch: pytest.MonkeyPatch, gpus: int, cores: int) -> None:
    """This many of each, and nothing said about threads."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
