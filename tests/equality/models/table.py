"""All models, in the order of their families, and those of which `make test` runs a few cells each."""

from __future__ import annotations

from tests.equality.model import Model
from tests.equality.models.attention import ATTENTION
from tests.equality.models.convolutional import CONVOLUTIONAL
from tests.equality.models.dense import DENSE
from tests.equality.models.generative import GENERATIVE
from tests.equality.models.idioms import IDIOMS
from tests.equality.models.library import LIBRARY
from tests.equality.models.recurrent import RECURRENT
from tests.equality.models.several import SEVERAL
from tests.equality.models.sparse import SPARSE
from tests.equality.models.states import STATES

FAMILIES = (DENSE, ATTENTION, CONVOLUTIONAL, RECURRENT, SPARSE, GENERATIVE, SEVERAL, LIBRARY, STATES, IDIOMS)
MODELS: dict[str, Model] = {model.name: model for family in FAMILIES for model in family}

# `make test` runs a few cells of each of these.
EARLY = (
    "mlp", "square", "skips", "tied_autoencoder", "norms", "dropped", "batch_normed", "square_gpt", "llama", "one_key",
    "cnn", "unet", "scan", "top_two", "dlrm", "bags", "diffusion", "towers", "lora", "detector",
)  # fmt: skip
