"""A job for ranks on two hosts."""

from __future__ import annotations

from tests.jobs import make_job

job = make_job("gpt", "adamw")
