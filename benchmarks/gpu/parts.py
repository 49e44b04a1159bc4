"""What is tried on a GPU, part by part: each part is a function that gives rows, one for each fact.

    losses        the main job on the device, beside the CPU's losses
    verify_gpt    the main job under five plans on simulated devices that are the device, held against one device
    verify_small  the other examples, likewise
    tests         every test that computes and starts no processes, with its worlds on the device
    checkpoints   written on one kind of device, gone on from on the other
    memory        the memory of a step, predicted beside what the allocator counted
    schedules     every schedule, zero and tp on simulated devices that are the device, beside one CPU
    compiled      compile=true where a loss, units and regions of programs are compiled, beside one CPU
    waits         how often the host waits for the GPU in a step, as torch warns of it
    speed_gpt     a GPT of 124 million parameters beside a plain loop with torch.compile: tokens/s and MFU
    speed_resnet  ResNet-50, likewise
    processes     one process for each GPU (NCCL), where there are two
    second_device what a device written in Python shows without a GPU, where this torch can have one
    memory_gpt    the memory of a step of the large GPT, which is to be predicted within 5%
    timeline      a pipeline's timeline as events of the GPU record it, beside the step on the clock
    host_memory   ranks that share a GPU, or of which one has none, over shared memory of the host
    offload       updates where the optimizer's state is, in host memory, beside updates on the device

A part runs on the CPU as well: then all of its code has run, and nothing has been found out about a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import speed
import torch
from device_memory import memory, memory_gpt, offload
from host_memory import host_memory
from rows import MAIN, ROOT, Row, job_of, simulated, status_of, trained, tried
from timelines import timeline

import meshloom as ml
from meshloom.core.schedules import SCHEDULES
from meshloom.telemetry.progress import QUIET
from meshloom.verify.findings import lines_of
from meshloom.verify.run import verify

SMALL = (
    "02_digits",
    "03_data_parallel",
    "05_from_a_script",
    "06_tensor_parallel",
    "07_own_operator",
    "08_layers_on_devices",
    "09_grid",
)
PLANS = ("dp=2", "tp=2", "pp=2,microbatches=2", "dp=2,zero=1", "dp=2,pp=2,tp=2")


def losses(device: str) -> Iterator[Row]:
    """Float64 shows mistakes, float32 what is lost in ordinary training."""
    # float64: sums in other orders. float32: 1e-7 of rounding, which AdamW's first steps (g / |g|) blow up
    # for gradients close to zero.
    for dtype, steps, tolerance in ((torch.float64, 5, 1e-9), (torch.float32, 10, 5e-3)):
        here, there = (
            trained(job_of(MAIN), "dp=1", each, steps=steps, dtype=dtype) for each in ("cpu", device)
        )
        worst = max(abs(one - other) / abs(one) for one, other in zip(here, there, strict=True))
        name = f"{steps} steps of {MAIN.name} in {str(dtype).removeprefix('torch.')}"
        text = f"losses differ by {worst:.2g} of their value at most; {tolerance:g} is allowed"
        yield Row(
            name=name,
            status=status_of(worst <= tolerance),
            text=text,
            figures={"worst": worst, "cpu": here, "device": there},
        )


def verify_gpt(device: str) -> Iterator[Row]:
    yield from _verified(MAIN, device)


def verify_small(device: str) -> Iterator[Row]:
    for name in SMALL:
        yield from _verified(ROOT / f"examples/{name}.py", device)


def tests(device: str) -> Iterator[Row]:
    """How many tests had a world on the device is counted: on the CPU alone a test says nothing of a GPU."""
    with tempfile.TemporaryDirectory() as directory:
        found = Path(directory, "junit.xml")
        words = [
            "-m",
            "pytest",
            "-q",
            "--device",
            device,
            "-m",
            "not processes and not long and not slow",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:benchmark",  # where it is installed it warns that it doesn't time beside other tests
        ]
        words += [f"--junitxml={found}", "tests", *_at_once()]
        done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
        if not found.exists():
            yield Row(name="pytest", status="failed", text=(done.stdout + done.stderr)[-2000:])
            return
        cases = list(ElementTree.parse(found).iter("testcase"))
    on_device = [
        case for case in cases if any(each.get("name") == "device" for each in case.iter("property"))
    ]
    for case in cases:
        problem = next((each for each in case if each.tag in ("failure", "error")), None)
        if problem is not None:
            yield Row(
                name=f"{case.get('classname')}::{case.get('name')}",
                status="failed",
                text=(problem.get("message") or "")[:500],
            )
    skipped = sum(case.find("skipped") is not None for case in cases)
    text = f"{len(cases)} tests, {len(on_device)} of them with a world on {device}, {skipped} skipped"
    yield Row(
        name="pytest --device",
        status=status_of(done.returncode == 0 and bool(on_device)),
        text=text,
        figures={"tests": len(cases), "on_device": len(on_device)},
    )


def checkpoints(device: str) -> Iterator[Row]:
    unbroken = trained(job_of(MAIN), "dp=1", "cpu", steps=6, dtype=torch.float64)
    for first, second in (("cpu", device), (device, "cpu")):
        with tempfile.TemporaryDirectory() as out:
            job = replace(job_of(MAIN), checkpoint_every=3)
            before = trained(job, "dp=1", first, steps=3, dtype=torch.float64, out=out)
            after = trained(job, "dp=1", second, steps=6, dtype=torch.float64, resume=out)
        both = [*before, *after]
        worst = max(abs(one - other) / abs(one) for one, other in zip(unbroken, both, strict=True))
        # float64, whose sums are taken in other orders.
        yield Row(
            name=f"3 steps on {first}, then 3 on {second}",
            status=status_of(worst <= 1e-9),
            text=f"losses differ from 6 steps on the CPU by {worst:.2g}",
            figures={"worst": worst},
        )


def schedules(device: str) -> Iterator[Row]:
    """In float64, whose sums are taken in other orders."""
    expected = trained(job_of(MAIN), "dp=1", "cpu", steps=2, dtype=torch.float64)
    plans = [f"pp=2,microbatches=4,schedule={name}" for name in SCHEDULES]
    plans += [
        "tp=2",
        "dp=2",
        *(f"dp=2,zero={number}" for number in (1, 2, 3)),
        "dp=2,pp=2,microbatches=2,zero=3",
        "dp=2,tp=2,zero=1",
    ]
    for plan in plans:
        yield from tried(f"2 steps under {plan}", lambda plan=plan: _compared_losses(plan, device, expected))


def compiled(device: str) -> Iterator[Row]:
    """In float64; Triton joins operators, so sums are taken in other orders."""
    expected = trained(job_of(MAIN), "dp=1", "cpu", steps=2, dtype=torch.float64)
    for plan in ("dp=1", "dp=2,zero=3", "tp=2", "pp=2,microbatches=2"):
        words = f"{plan},compile=true"
        yield from tried(
            f"2 steps under {words}", lambda words=words: _compared_losses(words, device, expected)
        )


def waits(device: str) -> Iterator[Row]:
    """torch warns of what stops the host; the wait for the step's loss is for an event, of which it does not."""
    for plan in ("dp=1", "dp=1,recompute=selective", "dp=2,zero=1", "tp=2", "pp=2,microbatches=2"):
        yield from tried(f"a step under {plan}", lambda plan=plan: _waits_of(plan, device))


def speed_gpt(device: str) -> Iterator[Row]:
    yield from (Row(**each) for each in speed.compared(speed.gpt_task(device), device))


def speed_resnet(device: str) -> Iterator[Row]:
    yield from (Row(**each) for each in speed.compared(speed.resnet_task(device), device))


def processes(device: str) -> Iterator[Row]:
    """`meshloom verify` in processes of its own; without two GPUs there is nothing to find out."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        yield Row(name="NCCL", status="not run", text="needs two GPUs")
        return
    plans = (
        ("dp=2", "dp=2,zero=1", "dp=2,zero=3", "tp=2", "pp=2,microbatches=2")
        if device == "cuda"
        else ("dp=2",)
    )
    for plan in plans:
        words = [
            "-m",
            "meshloom",
            "verify",
            str(MAIN),
            "--plan",
            plan,
            "--devices",
            device,
            "--quick",
            "--steps",
            "1",
        ]
        done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
        yield Row(
            name=f"verify --plan {plan}, a process a rank",
            status=status_of(done.returncode == 0),
            text=(done.stdout + done.stderr)[-300:],
        )


def second_device(device: str) -> Iterator[Row]:
    """What docs/devices.md says, on this machine."""
    words = ["-m", "tests.second_device", "--quick"]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 2:
        yield Row(name="second device", status="not run", text=done.stderr.strip()[-300:])
        return
    found: dict[str, dict[str, Any]] = json.loads(done.stdout) if done.returncode == 0 else {}
    if not found:
        yield Row(name="second device", status="failed", text=done.stderr[-1000:])
    for name, each in found.items():
        right = "problem" not in each and each["waits"] <= 1 and each["error"] <= 1e-10
        text = each.get("problem") or f"{each['waits']:g} waits, error {each['error']:.2g}"
        yield Row(name=name, status=status_of(right), text=text, figures=each)


PARTS: dict[str, Callable[[str], Iterator[Row]]] = {
    "losses": losses,
    "verify_gpt": verify_gpt,
    "verify_small": verify_small,
    "tests": tests,
    "checkpoints": checkpoints,
    "memory": memory,
    "memory_gpt": memory_gpt,
    "timeline": timeline,
    "host_memory": host_memory,
    "offload": offload,
    "schedules": schedules,
    "compiled": compiled,
    "waits": waits,
    "speed_gpt": speed_gpt,
    "speed_resnet": speed_resnet,
    "processes": processes,
    "second_device": second_device,
}


def _verified(path: Path, device: str) -> Iterator[Row]:
    for plan in PLANS:
        name = f"{path.name} under {plan}"
        try:
            report = verify(
                job_of(path), ml.Plan.parse(plan), devices=simulated(device), steps=1 if path == MAIN else 2
            )
        except ml.MeshloomError as refusal:
            yield Row(name=name, status="refused", text=str(refusal))
            continue
        assert report is not None
        worst = report.worst(1)
        text = f"{report.devices}" + (
            f"; largest error {worst[0].error:.2g} ({worst[0].kind} of {worst[0].name})" if worst else ""
        )
        if not report.passed:
            text += f". {' '.join(lines_of(report))}"
        yield Row(
            name=name,
            status=status_of(report.passed),
            text=text,
            figures={"worst": worst[0].error if worst else 0.0},
        )


def _compared_losses(plan: str, device: str, expected: list[float]) -> tuple[bool, str, dict[str, Any]]:
    found = trained(job_of(MAIN), plan, simulated(device), steps=len(expected), dtype=torch.float64)
    worst = max(abs(one - other) / abs(one) for one, other in zip(expected, found, strict=True))
    return worst <= 1e-9, f"losses differ from one CPU's by {worst:.2g}", {"worst": worst}


def _waits_of(plan: str, device: str) -> tuple[bool, str, dict[str, Any]]:
    where = device if plan.startswith("dp=1") else simulated(device)
    with ml.Trainer(job_of(MAIN), plan, devices=where, steps=4, listener=QUIET, cache="off") as trainer:
        found: list[str] = []
        for batch in trainer.batches():
            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always")
                if device == "cuda" and batch.step == 2:
                    torch.cuda.set_sync_debug_mode("warn")
                try:
                    trainer.step(batch)
                finally:
                    if device == "cuda":
                        torch.cuda.set_sync_debug_mode("default")
            found += [
                f"{each.filename}:{each.lineno}"
                for each in heard
                if "synchronizing CUDA" in str(each.message)
            ]
        ranks = trainer.plan.mesh.size
    # dict: each line once
    return (
        len(found) <= ranks,
        f"{len(found)} in {ranks} ranks: {', '.join(dict.fromkeys(found)) or 'none'}",
        {"waits": len(found)},
    )


def _at_once() -> list[str]:
    """Tests start no processes of their own, so several run at a time, where pytest can."""
    return ["--numprocesses", "4", "--dist", "worksteal"] if importlib.util.find_spec("xdist") else []


def main() -> int:
    """Run one part, and write its rows: `main.py` starts this, a process for each part, because an error of a
    GPU's ends all that a process can do with it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("device", choices=("cpu", "cuda"))
    parser.add_argument("rows", type=Path)
    arguments = parser.parse_args()
    with arguments.rows.open("a") as file:
        for row in PARTS[arguments.part](arguments.device):
            # as they come: what a part found before it was stopped is not lost
            print(json.dumps(asdict(row)), file=file, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
