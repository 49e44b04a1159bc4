"""The key of a captured program: all that capturing a loss depends on, as text by name. Equal texts, equal programs.

A file counts by a hash of its contents, an installed package by its version, a value as Python writes it. What has no
text (a lock, code that was typed in) raises `NoTextError`, and the program is not stored.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshloom.core.cache import digest_of
from meshloom.core.job import Job
from meshloom.core.modules.packages import is_users
from meshloom.core.moments.numerics import numeric_settings
from meshloom.program.ir.leaves import Leaves
from meshloom.program.store.object_text import NoTextError, ObjectText

_ARGUMENTS = ("seed", "init", "leaves", "buffers")  # of a job, that may change what is captured
_STARTED = time.time()


def capture_key(
    job: Job, model: nn.Module, leaves: Leaves, *, values: bool = True, known: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Texts by name of all that capturing the job's loss for such batches depends on. Raises `NoTextError`.

    values: include those of buffers, which a model of shapes lacks. known: `versions()`, if computed.
    """
    files = _source_files()
    text = ObjectText({file for file, _ in files.values()})
    batch = [
        f"{name}: {each.dtype} {list(each.shape)} strides {each.stride()} {each.device.type}"
        for name, each in leaves.tensors.items()
    ]
    key = {
        "source files": _lines({name: content for name, (_, content) in files.items()}),
        "settings of torch": _lines(_settings()),
        "job": _lines({name: text.of(getattr(job, name), name) for name in _ARGUMENTS}),
        "batch": "\n".join([*batch, *leaves.values]),
        "model": text.module(model, values=values),
        "loss": text.of(job.loss, "the loss"),
    }
    return {**(versions() if known is None else known), **key, "what code reads": "\n".join(text.reads)}


def function_key(function: Callable[..., Any], what: str) -> dict[str, str]:
    """Texts by name of all that a function of the job depends on, except its arguments. what: its name in
    messages. Raises `NoTextError`."""
    files = _source_files()
    text = ObjectText({file for file, _ in files.values()})
    return {
        "source files": _lines({name: content for name, (_, content) in files.items()}),
        "settings of torch": _lines(_settings()),
        what: "\n".join([text.of(function, f"the {what}"), *text.reads]),
    }


def versions() -> dict[str, str]:
    """Of Python, PyTorch, this package (a hash of its files) and all other installed packages."""
    packages = sorted(
        each.name.removesuffix(".dist-info")
        for place in sys.path
        if "-packages" in place and os.path.isdir(place)
        for each in os.scandir(place)
        if each.name.endswith(".dist-info")
    )
    root = Path(__file__).parents[2]
    own = [(str(path.relative_to(root)), digest_of(path.read_bytes())) for path in sorted(root.rglob("*.py"))]
    return {
        "Python": f"{sys.version} {platform.machine()}",
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "meshloom": digest_of(repr(own)),
        "packages": "\n".join(packages),
    }


def _source_files() -> dict[str, tuple[str, str]]:
    """The user's own modules -> their file, and a hash of its contents."""
    files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    found: dict[str, tuple[str, str]] = {}
    for name, file in sorted(files.items()):
        # some modules of packages have no source file
        root = files.get(name.partition(".")[0]) or file
        if isinstance(file, str) and isinstance(root, str) and is_users(root) and is_users(file):
            try:
                written, content = os.stat(file).st_mtime, Path(file).read_bytes()
            except OSError as error:
                raise NoTextError(f"the source of {name}, {file},") from error
            if written > _STARTED:  # it may have been imported before
                raise NoTextError(f"{name}, whose file was changed since this process began,")
            found[name] = file, digest_of(content)[:32]
    return found


def _settings() -> dict[str, Any]:
    """The settings of torch that change the captured program."""
    backends: Any = torch.backends
    attention_kernels = ("flash", "mem_efficient", "math", "cudnn")
    return {
        **numeric_settings(),
        "default dtype": torch.get_default_dtype(),
        "autocast": [torch.is_autocast_enabled(device) for device in ("cpu", "cuda")],
        "autocast dtypes": [torch.get_autocast_dtype(device) for device in ("cpu", "cuda")],
        "gradients": torch.is_grad_enabled(),
        "attention": [
            kernel for kernel in attention_kernels if getattr(backends.cuda, f"{kernel}_sdp_enabled")()
        ],
        "MKL-DNN": backends.mkldnn.enabled,
        "cuDNN": backends.cudnn.enabled,
        "fast path of attention": backends.mha.get_fastpath_enabled(),
        "hooks of all modules": bool(nn.modules.module._global_forward_hooks),  # pyright: ignore[reportPrivateUsage]
    }


def _lines(named: Mapping[str, Any]) -> str:
    return "\n".join(f"{name}: {each}" for name, each in named.items())
