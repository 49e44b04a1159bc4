"""Finds the first module whose output is not finite."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def watch_finite(model: nn.Module) -> Iterator[list[str]]:
    """Around a forward: the list receives the name of the first module, in order of execution, whose output is not finite."""
    first: list[str] = []
    with ExitStack() as around:
        for name, module in model.named_modules():
            around.callback(module.register_forward_hook(_hook(name or "the model", first)).remove)
        yield first


def _hook(name: str, first: list[str]) -> Any:
    def look(module: nn.Module, inputs: Any, output: Any) -> None:
        tensors = [each for each in (output if isinstance(output, tuple | list) else [output]) if isinstance(each, Tensor)]
        if not first and any(each.is_floating_point() and not bool(torch.isfinite(each).all()) for each in tensors):
            first.append(name)

    return look
