"""Scripts see no GPU while they are watched and compared: a job's steps and the script's are those of one kind of device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from meshloom.program.ir.replaced import replaced


@contextmanager
def no_gpus() -> Iterator[None]:
    """Code in it that asks whether there is a GPU, or another accelerator, is told that there is none. What names one all the
    same is on it."""
    absent = [
        (torch.cuda, "is_available", False),
        (torch.cuda, "device_count", 0),
        (torch.xpu, "is_available", False),
        (torch.backends.mps, "is_available", False),
        (torch.accelerator, "is_available", False),
        (torch.accelerator, "device_count", 0),
        (torch.accelerator, "current_accelerator", None),
    ]
    with ExitStack() as stack:
        for module, name, found in absent:
            stack.enter_context(replaced(module, name, lambda *_, found=found, **__: found))
        yield
