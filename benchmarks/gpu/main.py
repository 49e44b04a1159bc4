"""Everything that a GPU is needed for, in one command: tries it part by part, and writes one JSON file and
one page.

    make gpu                                    all parts; PART="losses memory" picks, WHEELS=DIR has packages that are missing
    make gpu SECONDS=600                        that each part may take instead of 300
    make gpu DEVICE=cpu                         the same code without a GPU: nothing is called passed then, but not run
    python benchmarks/gpu/main.py --device cuda --parts losses memory --out runs/gpu

The exit status: 0 if nothing failed, 1 if a row or a part did, 2 if it cannot be tried here.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from page import page

SECONDS = 300  # that a part may take, where nothing else is asked for
LEAST_TORCH = (2, 11)
NEEDED = (
    "torch",
    "numpy",
    "rich",
    "safetensors",
    "scipy",
    "zmq",
    "sklearn",
    "pytest",
    "pytest_timeout",
    "hypothesis",
    "psutil",
    "expecttest",
    "transformers",
    "yaml",
)
PARTS = (
    "losses", "schedules", "compiled", "waits", "speed_gpt", "speed_resnet", "processes", "verify_gpt", "verify_small", "tests", "checkpoints",
    "memory", "memory_gpt", "timeline", "host_memory", "offload", "second_device",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--parts", nargs="*", default=[], metavar="PART", help=f"of {', '.join(PARTS)}; none: all"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/gpu"), help="directory for gpu.json and gpu.md"
    )
    parser.add_argument(
        "--seconds", type=int, default=SECONDS, help="that a part may take (a loaded machine compiles slowly)"
    )
    arguments = parser.parse_args()
    problem = _problem(arguments.device, arguments.parts)
    if problem:
        print(problem, file=sys.stderr)
        return 2
    chosen = [part for part in PARTS if not arguments.parts or part in arguments.parts]
    parts = [_run(part, arguments.device, arguments.seconds) for part in chosen]
    record = {"device": arguments.device, "environment": _environment(arguments.device), "parts": parts}
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "gpu.json").write_text(json.dumps(record, indent=1) + "\n")
    (arguments.out / "gpu.md").write_text(page(record))
    failed = [row for part in parts for row in part["rows"] if row["status"] == "failed"]
    for row in failed:
        print(f"failed: {row['name']}: {row['text']}", file=sys.stderr)
    print(
        f"{arguments.out / 'gpu.md'}: {sum(len(part['rows']) for part in parts)} rows, {len(failed)} failed",
        file=sys.stderr,
    )
    return 1 if failed else 0


def _problem(device: str, parts: list[str]) -> str:
    """Why this cannot be tried here, with the way out; "" if it can."""
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        return f"There is no part {', '.join(unknown)}. Use {', '.join(PARTS)}."
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return f"These packages are missing: {', '.join(missing)}. Give a folder with their wheels: make gpu WHEELS=DIR."
    import torch

    if tuple(int(number) for number in torch.__version__.split(".")[:2]) < LEAST_TORCH:
        return f"torch is {torch.__version__}, and {'.'.join(map(str, LEAST_TORCH))} or later is needed."
    if device == "cuda" and not torch.cuda.is_available():
        return (
            "No GPU is visible. make gpu DEVICE=cpu runs the same code on the CPU, and calls nothing passed."
        )
    return ""


def _run(part: str, device: str, seconds: int = SECONDS) -> dict[str, Any]:
    """Of one part: its rows and how long it took."""
    print(f"{part} ...", file=sys.stderr, flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        rows = Path(directory, "rows")
        rows.touch()
        problem = ""
        try:
            command = [sys.executable, str(Path(__file__).with_name("parts.py")), part, device, str(rows)]
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds
            )
            problem = f"ended with {done.returncode}: {done.stdout[-3000:]}" if done.returncode else ""
        except subprocess.TimeoutExpired:
            problem = f"took longer than {seconds} s: make gpu SECONDS={2 * seconds} gives it more"
        found = [json.loads(line) for line in rows.read_text().splitlines()]
    if problem or not found:
        found.append({"name": part, "status": "failed", "text": problem or "gave nothing", "figures": {}})
    return {
        "part": part,
        "seconds": round(time.monotonic() - began, 1),
        "rows": [as_found_on(device, row) for row in found],
    }


def as_found_on(device: str, row: dict[str, Any]) -> dict[str, Any]:
    """The row; where there was no GPU, what went well there has not been tried on one."""
    if device == "cuda" or row["status"] != "passed":
        return row
    return {**row, "status": "not run", "text": f"needs a GPU; rehearsed on the CPU: {row['text']}"}


def _environment(device: str) -> dict[str, Any]:
    import torch

    gpus = (
        [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        if device == "cuda"
        else []
    )
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gpus": gpus,
        "machine": platform.machine(),
    }


if __name__ == "__main__":
    raise SystemExit(main())
