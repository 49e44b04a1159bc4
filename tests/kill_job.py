"""A job that trains and saves until it is killed."""

from __future__ import annotations

from tests.jobs import make_job

job = make_job("gpt", "adamw", steps=1_000_000, checkpoint_every=3)
