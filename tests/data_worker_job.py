"""A job whose data is read by processes, which a test kills."""

from __future__ import annotations

from tests.jobs import make_job

job = make_job("gpt", "adamw", steps=1_000_000, num_workers=2)
