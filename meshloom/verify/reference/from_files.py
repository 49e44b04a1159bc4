"""What one device's model starts from: a seed, and a job's weights from its files, whole files at a time.

What ranks do in slices is implemented here a second time.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from meshloom.core.job import Job
from meshloom.core.modules.built import originals

WeightNames = Mapping[str, str | None] | Callable[[str], str | None] | None


def seed_model(seed: int) -> None:
    """Seed what a model function draws from, by no function that ranks use."""
    number = int.from_bytes(hashlib.blake2b(f"{seed}/model".encode(), digest_size=8).digest(), "little") >> 1
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number % 2**32)


def with_values(model: nn.Module, job: Job) -> nn.Module:
    """`model`, with its parameters and persistent buffers set to the values in the job's files, if it has
    some. Tensors that have no counterpart there are left as they are."""
    if job.weights is None:
        return model
    stored: dict[str, Tensor] = {}
    for file in _files(Path(job.weights).expanduser()):
        stored |= load_file(file)
    names = {name: _renamed(name, job.weight_names) for name in model.state_dict()}
    found = {name: stored[there] for name, there in names.items() if there in stored}
    model.load_state_dict(found, strict=False)
    seed_model(job.seed)  # no draw of the construction counts
    return model


def _renamed(name: str, weight_names: WeightNames) -> str | None:
    if weight_names is None:
        return name
    return weight_names.get(name, name) if isinstance(weight_names, Mapping) else weight_names(name)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    checkpoints = [each for each in path.glob("step-*") if (each / "meta.json").exists()]
    if checkpoints:  # a run directory: the one written last
        path = max(
            checkpoints, key=lambda each: json.loads((each / "meta.json").read_text())["checkpoint"]["order"]
        )
    if (path / "model.safetensors").exists():
        return [path / "model.safetensors"]
    index = json.loads((path / "model.safetensors.index.json").read_text())
    return [path / name for name in sorted(set(index["weight_map"].values()))]


def with_hooks(model: nn.Module) -> nn.Module:
    """A model of which parts lie outside of the job's function, so that it has copies of them: with the hooks that these parts' parameters
    have, whatever copying has made of them."""
    parameters = dict(model.named_parameters())
    for name, original in originals(model).items():
        if (copied := parameters.get(name)) is None:
            continue
        for kind, register in (
            ("_backward_hooks", copied.register_hook),
            ("_post_accumulate_grad_hooks", copied.register_post_accumulate_grad_hook),
        ):
            known = [*(getattr(copied, kind) or {}).values()]
            for hook in (getattr(original.value, kind, None) or {}).values():
                if all(hook is not each for each in known):
                    register(hook)
    return model
