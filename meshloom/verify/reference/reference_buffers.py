"""The reference's buffers after a step: the rules of `Job(buffers=...)`, written a second time.

Every chunk reads the buffers as they were at the start of the step. Torch's own normalization layers, unless a pattern names
them, do not read in training what they write, so their buffers are simply updated chunk after chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.instancenorm import _InstanceNorm  # pyright: ignore[reportPrivateUsage]

from meshloom.core.job import Job
from meshloom.verify.reference.state_before import same

Buffers = dict[str, Tensor]


class ReferenceBuffers:
    """The buffers and untrained parameters of `model` that are merged, from step to step."""

    def __init__(self, job: Job, model: nn.Module) -> None:
        names = [name for name, _ in model.named_buffers()]
        names += [name for name, each in model.named_parameters() if not each.requires_grad]
        rules: list[tuple[str, Any]] = [*job.buffers.items()][::-1]  # of several that match, the first
        self._rules = {name: rule for name in names for pattern, rule in rules if fnmatchcase(name, pattern)}
        for path, module in model.named_modules():
            if getattr(type(module), "forward", None) in (_BatchNorm.forward, _InstanceNorm.forward):
                own = {f"{path}.{key}" if path else key for key, _ in module.named_buffers(recurse=False)}
                names = [name for name in names if name not in own or own & self._rules.keys()]
        modules = dict(model.named_modules(remove_duplicate=False))
        self._places = {name: (modules[name.rpartition(".")[0]], name.rpartition(".")[2]) for name in names}

    def snapshot(self, known: Mapping[str, Tensor] | None = None) -> Buffers:
        """Copies of the buffers. known: earlier copies, reused for buffers that did not change."""
        known, found = known or {}, Buffers()
        for name, (module, key) in self._places.items():
            if (value := getattr(module, key)) is not None:
                kept = name in known and same(known[name], value)
                found[name] = known[name] if kept else value.detach().clone()
        return found

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Set the buffers to these values; a buffer of another shape is replaced by a new tensor."""
        for name, value in values.items():
            module, key = self._places[name]
            buffer = getattr(module, key)
            if buffer is not None and buffer.shape == value.shape and buffer.dtype == value.dtype:
                buffer.detach().copy_(value)
            else:
                setattr(module, key, value.clone())

    def merge(self, start: Buffers, ends: Sequence[Buffers]) -> Buffers:
        """The buffers after a step that found `start`, and whose chunks left `ends`, in their order."""
        merged = {**start, **(ends[-1] if ends else {})}
        for name, rule in self._rules.items():
            left = [end[name] for end in ends if name in end]
            if rule == "last" or name not in start or not any(each is not start[name] for each in left):
                continue
            first = value = start[name]
            if rule == "sum":
                for end in left:
                    value = value + (end - first)
            elif callable(rule):
                value = rule(first.clone(), [each.clone() for each in left])
            else:
                for end in left:
                    moved = ~((end == first) | ((end != end) & (first != first)))
                    value = torch.where(moved, rule.decay * value + (end - rule.decay * first), value)
            merged[name] = value.to(first.dtype)  # pyright: ignore[reportAttributeAccessIssue]
        return merged
