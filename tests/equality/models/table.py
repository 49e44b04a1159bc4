"""All models, in the order of their families, and those of which `make test` runs a few cells each."""

from __future__ import annotations

from tests.equality.model import Model
from tests.equality.models.dense import DENSE

MODELS: dict[str, Model] = {model.name: model for model in [*DENSE]}
# `make test` runs a few cells of each of these
EARLY = [*MODELS]
