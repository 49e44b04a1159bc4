"""What an installation consists of and what its machine has, on one page to paste into a bug report."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Mapping
from typing import Any

import torch

from meshloom.comm.shm.native_engine import why_not
from meshloom.core.units import format_bytes
from meshloom.machine.cores import cores
from meshloom.machine.host_memory import free_bytes, total_bytes
from meshloom.machine.machine import machine_file
from meshloom.machine.packages import version_of

# what each optional package is for
OPTIONAL = {
    "matplotlib": "report --timeline FILE.png or .svg",
    "plotly": "report --html",
    "tensorboard": "train --log tensorboard",
    "wandb": "train --log wandb",
    "mlflow": "train --log mlflow",
    "shtab": "meshloom completion",
    "transformers": "ml.Job of transformers models",
}
_NEEDED = ("torch", "numpy", "rich", "safetensors", "scipy", "pyzmq")


def doctor_facts(version: str) -> Mapping[str, Any]:
    """By topic; None: not there. version: of this package."""
    compilers = {name: shutil.which(name) for name in ("cc", "c++", "nvcc")}
    return {
        "meshloom": version,
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": {
            "cores": cores(),
            "vectors": torch.backends.cpu.get_cpu_capability(),
            "name": platform.machine(),
        },
        "memory": {"total": total_bytes(), "free": free_bytes()},
        "torch": {"cuda": torch.version.cuda},
        "gpus": [_gpu(number) for number in range(torch.cuda.device_count())],
        "shared memory": why_not() or None,
        "compilers": compilers,
        "packages": {name: version_of(name) for name in _NEEDED},
        "optional": {name: version_of(name) for name in OPTIONAL},
        "measured": {device: machine_file(device).exists() for device in ("cpu", "cuda")},
    }


def doctor_lines(facts: Mapping[str, Any]) -> list[str]:
    """The same for people: what is missing comes with what it is for."""
    processor, memory, built = facts["processor"], facts["memory"], facts["torch"]
    lines = [
        f"meshloom    {facts['meshloom']}",
        f"python      {facts['python']}",
        f"system      {facts['system']}",
        f"processor   {processor['cores']} cores, {processor['name']}, {processor['vectors']}",
        f"memory      {format_bytes(memory['total'])}, {format_bytes(memory['free'])} free",
        f"torch       built for {'CUDA ' + built['cuda'] if built['cuda'] else 'CPUs'}",
        *(f"GPU {number}       {each['name']}, {format_bytes(each['bytes'])}, compute {each['compute']}" for number, each in enumerate(facts["gpus"])),
        *([] if facts["gpus"] else ["GPUs        none"]),
        f"transport   {facts['shared memory'] or 'ranks of one machine share memory'}",
    ]  # fmt: skip
    lines += [f"compiler    {name}: {path or 'not found'}" for name, path in facts["compilers"].items()]
    for device, known in facts["measured"].items():
        if device == "cpu" or facts["gpus"]:
            lines.append(f"measured    {device}: {'yes' if known else 'no; meshloom calibrate measures it'}")
    lines += [
        f"package     {name} {version or 'MISSING: install meshloom again'}"
        for name, version in facts["packages"].items()
    ]
    lines += [
        f"optional    {name} {version or f'not installed; it is for: {OPTIONAL[name]}'}"
        for name, version in facts["optional"].items()
    ]
    return lines


def _gpu(number: int) -> dict[str, Any]:
    found = torch.cuda.get_device_properties(number)
    return {"name": found.name, "bytes": found.total_memory, "compute": f"{found.major}.{found.minor}"}
