"""What capturing a loss depends on, as one digest per dependency: equal digests, equal programs.

Code counts as its bytecode and what it reads from globals and closures, objects as their class and
attributes, tensors as their values. Contents of installed packages count by name, and all packages by their
versions. Raises for objects that have no digest.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshloom.core.cache import digest_of
from meshloom.core.job import LossFunction
from meshloom.core.moments.numerics import numeric_settings
from meshloom.program.ir.leaves import Leaves
from meshloom.program.ir.lines import is_users
from meshloom.program.store.object_digest import NoDigestError, ObjectDigest


def capture_fingerprint(
    model: nn.Module, loss: LossFunction, leaves: Leaves, *, values: bool = True, known: str | None = None
) -> dict[str, str]:
    """Digests by name of all that capturing `loss` for such batches depends on. Raises `NoDigestError`.

    values: include those of buffers, which a model of shapes lacks. known: `versions()`, if computed.
    """
    layouts = [
        (name, tuple(each.shape), each.stride(), each.dtype, each.device.type)
        for name, each in leaves.tensors.items()
    ]
    return {
        "versions": known or versions(),
        "source files": _sources(),
        "settings of torch": digest_of(repr(_settings())),
        "model": ObjectDigest().module(model).text(),
        "values of buffers": ObjectDigest().buffers(model).text() if values else "",
        "loss": ObjectDigest().add(loss, "the loss").text(),
        "batch": digest_of(repr(layouts)),
        "names in the batch": digest_of(repr(list(leaves.values))),
    }


def function_fingerprint(function: Callable[..., Any], what: str) -> dict[str, str]:
    """Digests by name of all that a function of the job depends on, except its arguments. what: its name
    in messages. Raises `NoDigestError`."""
    return {
        "source files": _sources(),
        "settings of torch": digest_of(repr(_settings())),
        what: ObjectDigest().add(function, f"the {what}").text(),
    }


def versions() -> str:
    """Digest of the versions of Python, PyTorch, this package and all other installed packages."""
    packages = sorted(
        each.name
        for place in sys.path
        if "-packages" in place and os.path.isdir(place)
        for each in os.scandir(place)
        if each.name.endswith(".dist-info")
    )
    root = Path(__file__).parents[2]
    own = [(str(path.relative_to(root)), digest_of(path.read_bytes())) for path in sorted(root.rglob("*.py"))]
    builds = [sys.version, platform.machine(), torch.__version__, torch.version.git_version]
    return digest_of(repr([*builds, packages, own]))


def _sources() -> str:
    """Digest of the source files of the user's own modules."""
    files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    found: list[tuple[str, str]] = []
    for name, file in sorted(files.items()):
        # some modules of packages have no source file
        root = files.get(name.partition(".")[0]) or file
        if isinstance(file, str) and isinstance(root, str) and is_users(root) and is_users(file):
            try:
                found.append((name, digest_of(Path(file).read_bytes())))
            except OSError as error:
                raise NoDigestError(f"the source of {name}, {file},") from error
    return digest_of(repr(found))


def _settings() -> list[Any]:
    """The settings of torch that change the captured program."""
    backends: Any = torch.backends
    attention_kernels = ("flash", "mem_efficient", "math", "cudnn")
    return [
        torch.get_default_dtype(),
        numeric_settings(),
        *(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")),
        *(torch.get_autocast_dtype(device) for device in ("cpu", "cuda")),
        torch.is_grad_enabled(),
        [getattr(backends.cuda, f"{kernel}_sdp_enabled")() for kernel in attention_kernels],
        [backends.mkldnn.enabled, backends.cudnn.enabled, backends.mha.get_fastpath_enabled()],
        nn.modules.module._global_forward_hooks and "hooks",  # pyright: ignore[reportPrivateUsage]
    ]
