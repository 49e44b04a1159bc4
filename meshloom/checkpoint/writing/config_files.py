"""What transformers needs beside the weights of one of its models, so that `from_pretrained` of a checkpoint's
directory works."""

from __future__ import annotations

import json
from typing import Any

from torch import nn

CONFIG = "config.json"


def config_files_of(model: nn.Module) -> dict[str, bytes]:
    """config.json and, of a model that generates, generation_config.json, as `save_pretrained` writes them;
    nothing for a model without such a configuration."""
    config: Any = getattr(model, "config", None)
    if not callable(getattr(config, "to_json_string", None)):
        return {}
    content: dict[str, Any] = json.loads(config.to_json_string())
    content["architectures"] = [type(model).__name__]
    kinds = {parameter.dtype for parameter in model.parameters()}
    if len(kinds) == 1:
        content["dtype"] = str(kinds.pop()).removeprefix("torch.")
    found = {CONFIG: (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()}
    generation: Any = getattr(model, "generation_config", None)
    if callable(getattr(generation, "to_json_string", None)):
        found["generation_config.json"] = generation.to_json_string().encode()
    return found
