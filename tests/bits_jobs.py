"""The jobs of `bits.py`."""

from __future__ import annotations

from tests.jobs import make_job

gpt = make_job("gpt", "adamw")
cnn = make_job("cnn", "sgd")
branch = make_job("branch", "sgd")
unused = make_job("unused_twice", "adamw")
mlp = make_job("mlp", "adamw")
