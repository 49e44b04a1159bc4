"""Slurm's commands, as far as the scripts in docs/clusters use them, on this machine: python tests/slurm.py
sbatch | srun | scontrol WORDS.

A node is an address of this machine, or a network namespace. Tasks get the environment that Slurm documents
for its own; an option that is not known here is an error.

    STAND_IN_NODES=127.0.0.[1-2]     the nodes of the cluster, as Slurm writes them
    STAND_IN_NAMESPACES="a b"        where their tasks run, in order; without it, here
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

SBATCH = {"nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "gpus-per-node", "time"}
SRUN = {"cpus-per-task", "kill-on-bad-exit"}


def install(directory: Path, python: str) -> None:
    """Commands of these names in `directory`, for the front of PATH."""
    for name in ("sbatch", "srun", "scontrol"):
        path = directory / name
        path.write_text(f'#!/bin/sh\nexec "{python}" "{__file__}" {name} "$@"\n')
        path.chmod(0o755)


def sbatch(words: Sequence[str]) -> int:
    """Run the script at once. Options on the command line win over those in the script."""
    given, (script, *arguments) = _options(words, SBATCH)
    lines = Path(script).read_text().splitlines()
    head = lines[: next(number for number, line in enumerate(lines) if line and not line.startswith("#"))]
    written = [word for line in head if line.startswith("#SBATCH ") for word in line.split()[1:]]
    options = _options(written, SBATCH)[0] | given
    nodes = int(options.get("nodes", 1))
    each = int(options.get("ntasks-per-node", int(options.get("ntasks", nodes)) // nodes))
    told = {
        "SLURM_JOB_ID": os.getpid(),
        "SLURM_JOB_NODELIST": os.environ["STAND_IN_NODES"],
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_NNODES": nodes,
        "SLURM_NTASKS": nodes * each,
        "SLURM_NTASKS_PER_NODE": each,
        "SLURM_TASKS_PER_NODE": f"{each}(x{nodes})" if nodes > 1 else each,
        "SLURM_CPUS_PER_TASK": options.get("cpus-per-task", 1),
        "SLURM_PROCID": 0,
        "SLURM_LOCALID": 0,
        "SLURM_NODEID": 0,
    }
    return subprocess.run(["bash", script, *arguments], env=_with(told)).returncode


def srun(words: Sequence[str]) -> int:
    """Run the command as every task of the job; the highest exit code. The first task that fails ends the
    others."""
    _, command = _options(words, SRUN)
    nodes, each = int(os.environ["SLURM_JOB_NUM_NODES"]), int(os.environ["SLURM_NTASKS_PER_NODE"])
    namespaces = os.environ.get("STAND_IN_NAMESPACES", "").split()
    tasks: list[subprocess.Popen[bytes]] = []
    for task in range(nodes * each):
        node, local = divmod(task, each)
        told = {
            "SLURM_PROCID": task,
            "SLURM_LOCALID": local,
            "SLURM_NODEID": node,
            "SLURM_STEP_ID": 0,
            "SLURM_STEP_NUM_TASKS": nodes * each,
            "SLURM_STEP_NUM_NODES": nodes,
            "SLURM_STEP_NODELIST": os.environ["SLURM_JOB_NODELIST"],
            "SLURM_STEP_TASKS_PER_NODE": os.environ["SLURM_TASKS_PER_NODE"],
        }
        place = ["ip", "netns", "exec", namespaces[node]] if namespaces else []
        tasks.append(subprocess.Popen([*place, *command], env=_with(told)))
    codes: dict[int, int] = {}
    while len(codes) < len(tasks):
        pid, status = os.wait()
        codes[pid] = os.waitstatus_to_exitcode(status)
        if codes[pid]:
            for each_task in tasks:
                if each_task.pid not in codes:
                    each_task.terminate()
    return max(abs(code) for code in codes.values())


def scontrol(words: Sequence[str]) -> int:
    """show hostnames LIST"""
    show, hostnames, nodes = words
    if (show, hostnames) != ("show", "hostnames"):
        return 2
    before, _, rest = nodes.partition("[")
    first, _, last = rest.rstrip("]").partition("-")
    for number in range(int(first), int(last) + 1):
        print(f"{before}{number}")
    return 0


def _options(words: Sequence[str], known: set[str]) -> tuple[dict[str, str], list[str]]:
    """(options in front, the words after them). Raises `SystemExit` for one that is not known."""
    found: dict[str, str] = {}
    for number, word in enumerate(words):
        if not word.startswith("--"):
            return found, list(words[number:])
        name, _, value = word[2:].partition("=")
        if name not in known:
            raise SystemExit(f"stand-in for Slurm: {word} is not known")
        found[name] = value
    return found, []


def _with(told: Mapping[str, object]) -> dict[str, str]:
    return {**os.environ, **{name: str(value) for name, value in told.items()}}


if __name__ == "__main__":
    raise SystemExit({"sbatch": sbatch, "srun": srun, "scontrol": scontrol}[sys.argv[1]](sys.argv[2:]))
