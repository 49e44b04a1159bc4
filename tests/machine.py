"""Machines with other GPUs, cores and links than this one, for tests of what is chosen on them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meshloom.machine.machine import example_machine, machine_file, save

_EXAMPLE = example_machine()
# Where sending costs next to nothing, whatever is worth dividing at all is divided.
_FAST_LINKS = replace(
    _EXAMPLE,
    links=tuple(replace(each, latency_seconds=1e-6, bytes_per_second=1e10) for each in _EXAMPLE.links),
)


def machine(monkeypatch: pytest.MonkeyPatch, gpus: int, cores: int) -> None:
    """This many of each, and nothing said about threads."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def with_fast_links(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """This machine is one with fast links, for processes that are started, too. home: an empty directory."""
    monkeypatch.setenv("HOME", str(home))
    save_fast_links(home)


def save_fast_links(home: Path) -> None:
    """Measurements of a machine with fast links, as this one's, for processes with this home."""
    save(_FAST_LINKS, home / machine_file("cpu").relative_to(Path.home()))
