"""What is tried on a GPU, part by part: each part is a function that gives rows, one for each fact.

    losses        the main job on the device, beside the CPU's losses
    verify_gpt    the main job under five plans on simulated devices that are the device, held against one device
    verify_small  the other examples, likewise
    tests         every test that computes and starts no processes, with its worlds on the device
    checkpoints   written on one kind of device, gone on from on the other
    memory        the memory of a step, predicted beside what the allocator counted
    schedules     every schedule, zero and tp on simulated devices that are the device, beside one CPU
    waits         how often the host waits for the GPU in a step, as torch warns of it
    speed_gpt     a GPT of 124 million parameters beside a plain loop with torch.compile: tokens/s and MFU
    speed_resnet  ResNet-50, likewise
    processes     one process for each GPU (NCCL), where there are two
    second_device what a device written in Python shows without a GPU, where this torch can have one
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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import speed
import torch
from torch.utils.data import default_collate

import meshloom as ml
from meshloom.core.jobfile import load_job
from meshloom.core.schedules import SCHEDULES
from meshloom.planner.memory.measured import measure_memory
from meshloom.planner.memory.memory import predict_memory
from meshloom.program.capture.capture import capture
from meshloom.telemetry.progress import QUIET
from meshloom.verify.run import verify

ROOT = Path(__file__).parents[2]
MAIN = ROOT / "examples/01_gpt_bytes.py"
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


@dataclass(frozen=True, kw_only=True)
class Row:
    """One fact. status: passed, failed, or refused (meshloom says in a sentence that it does not do this, on
    any device). figures: by name, in JSON."""

    name: str
    status: str
    text: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


def losses(device: str) -> Iterator[Row]:
    """Float64 shows mistakes, float32 what is lost in ordinary training."""
    # float64: sums in other orders. float32: 1e-7 of rounding, which AdamW's first steps (g / |g|) blow up
    # for gradients close to zero.
    for dtype, steps, tolerance in ((torch.float64, 5, 1e-9), (torch.float32, 10, 5e-3)):
        here, there = (
            _trained(_job(MAIN), "dp=1", each, steps=steps, dtype=dtype) for each in ("cpu", device)
        )
        worst = max(abs(one - other) / abs(one) for one, other in zip(here, there, strict=True))
        name = f"{steps} steps of {MAIN.name} in {str(dtype).removeprefix('torch.')}"
        text = f"losses differ by {worst:.2g} of their value at most; {tolerance:g} is allowed"
        yield Row(
            name=name,
            status=_status(worst <= tolerance),
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
        status=_status(done.returncode == 0 and bool(on_device)),
        text=text,
        figures={"tests": len(cases), "on_device": len(on_device)},
    )


def checkpoints(device: str) -> Iterator[Row]:
    unbroken = _trained(_job(MAIN), "dp=1", "cpu", steps=6, dtype=torch.float64)
    for first, second in (("cpu", device), (device, "cpu")):
        with tempfile.TemporaryDirectory() as out:
            job = replace(_job(MAIN), checkpoint_every=3)
            before = _trained(job, "dp=1", first, steps=3, dtype=torch.float64, out=out)
            after = _trained(job, "dp=1", second, steps=6, dtype=torch.float64, resume=out)
        both = [*before, *after]
        worst = max(abs(one - other) / abs(one) for one, other in zip(unbroken, both, strict=True))
        # float64, whose sums are taken in other orders.
        yield Row(
            name=f"3 steps on {first}, then 3 on {second}",
            status=_status(worst <= 1e-9),
            text=f"losses differ from 6 steps on the CPU by {worst:.2g}",
            figures={"worst": worst},
        )


def memory(device: str) -> Iterator[Row]:
    """Workspaces of kernels and the allocator's rounding are not predicted (docs/memory.md), so a fifth is
    allowed, and 32 MiB for cuBLAS."""
    for batch in (8, 32):
        job = replace(_job(MAIN), batch_size=batch)
        data = job.data()
        batches = [
            default_collate([data[number * batch + each] for each in range(batch)]) for number in range(2)
        ]
        predicted = predict_memory(capture(job, (batches[0], batches[1])), job.optimizer)
        followed = measure_memory(job, batches[:1], device=device).peak
        counted = _counted_peak(job, device) if device == "cuda" else followed
        allowed = 0.2 * predicted.peak + 32 * 2**20
        text = f"predicted {predicted.peak / 2**20:.1f} MiB (in {predicted.phase}), counted {counted / 2**20:.1f} MiB, tensors followed {followed / 2**20:.1f} MiB"
        figures = {"predicted": predicted.peak, "counted": counted, "followed": followed}
        yield Row(
            name=f"a step of {MAIN.name}, batch {batch}",
            status=_status(abs(counted - predicted.peak) <= allowed),
            text=text,
            figures=figures,
        )


def offload(device: str) -> Iterator[Row]:
    """Operators of the host round otherwise than those of a GPU. Of AdamW's state, two averages leave the device."""
    for plan in ("dp=1", "dp=2,zero=1"):
        where = device if plan == "dp=1" else _simulated(device)
        away, here = (
            _trained(_job(MAIN), each, where, steps=5, dtype=torch.float64)
            for each in (f"{plan},offload=optimizer", plan)
        )
        worst = max(abs(one - other) / abs(one) for one, other in zip(here, away, strict=True))
        yield Row(
            name=f"5 steps under {plan},offload=optimizer",
            status=_status(worst <= 1e-9),
            text=f"losses differ from those of {plan} by {worst:.2g}",
            figures={"worst": worst},
        )
    if device == "cuda":
        here, away = (_standing(_job(MAIN), plan) for plan in ("dp=1", "dp=1,offload=optimizer"))
        state = 2 * sum(each.nbytes for each in _job(MAIN).model().parameters())
        yield Row(
            name="memory between steps",
            status=_status(here - away >= 0.9 * state),
            text=f"{here / 2**20:.1f} MiB, and {away / 2**20:.1f} MiB with offload=optimizer; the state is {state / 2**20:.1f} MiB",
            figures={"without": here, "with": away, "state": state},
        )


def schedules(device: str) -> Iterator[Row]:
    """In float64, whose sums are taken in other orders."""
    expected = _trained(_job(MAIN), "dp=1", "cpu", steps=2, dtype=torch.float64)
    plans = [f"pp=2,microbatches=4,schedule={name}" for name in SCHEDULES]
    plans += [
        "tp=2",
        "dp=2",
        *(f"dp=2,zero={number}" for number in (1, 2, 3)),
        "dp=2,pp=2,microbatches=2,zero=3",
        "dp=2,tp=2,zero=1",
    ]
    for plan in plans:
        yield from _tried(f"2 steps under {plan}", lambda plan=plan: _compared_losses(plan, device, expected))


def waits(device: str) -> Iterator[Row]:
    """torch warns of what stops the host; the wait for the step's loss is for an event, of which it does not."""
    for plan in ("dp=1", "dp=1,recompute=selective", "dp=2,zero=1", "tp=2", "pp=2,microbatches=2"):
        yield from _tried(f"a step under {plan}", lambda plan=plan: _waits_of(plan, device))


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
        words = ["-m", "meshloom", "verify", str(MAIN), "--plan", plan, "--devices", device, "--steps", "1"]
        done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
        yield Row(
            name=f"verify --plan {plan}, a process a rank",
            status=_status(done.returncode == 0),
            text=(done.stdout + done.stderr)[-300:],
        )


def second_device(device: str) -> Iterator[Row]:
    """What docs/devices.md says, on this machine."""
    words = ["-m", "tests.second_device.table", "--quick"]
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
        yield Row(name=name, status=_status(right), text=text, figures=each)


PARTS: dict[str, Callable[[str], Iterator[Row]]] = {
    "losses": losses,
    "verify_gpt": verify_gpt,
    "verify_small": verify_small,
    "tests": tests,
    "checkpoints": checkpoints,
    "memory": memory,
    "offload": offload,
    "schedules": schedules,
    "waits": waits,
    "speed_gpt": speed_gpt,
    "speed_resnet": speed_resnet,
    "processes": processes,
    "second_device": second_device,
}


def _job(path: Path) -> ml.Job:
    """Without evaluation, which takes longer than the steps; the main job's batches are small, because a CPU
    computes them too."""
    job = load_job(str(path))
    assert job is not None
    return replace(job, evaluate=None, batch_size=8 if path == MAIN else job.batch_size)


def _trained(
    job: ml.Job, plan: str, device: str, *, steps: int, dtype: torch.dtype | None, **settings: Any
) -> list[float]:
    """The losses."""
    with ml.Trainer(
        job, plan, devices=device, steps=steps, dtype=dtype, listener=QUIET, **settings, cache="off"
    ) as trainer:
        found = [trainer.step(batch) for batch in trainer.batches()]
        if "out" in settings:
            trainer.save()
        return found


def _verified(path: Path, device: str) -> Iterator[Row]:
    for plan in PLANS:
        name = f"{path.name} under {plan}"
        try:
            report = verify(
                _job(path), ml.Plan.parse(plan), devices=_simulated(device), steps=1 if path == MAIN else 2
            )
        except ml.MeshloomError as refusal:
            yield Row(name=name, status="refused", text=str(refusal))
            continue
        assert report is not None
        worst = report.worst(1)
        text = f"{report.devices}" + (
            f"; largest error {worst[0].error:.2g} ({worst[0].kind} of {worst[0].name})" if worst else ""
        )
        yield Row(
            name=name,
            status=_status(report.passed),
            text=text,
            figures={"worst": worst[0].error if worst else 0.0},
        )


def _tried(name: str, find: Callable[[], tuple[bool, str, dict[str, Any]]]) -> Iterator[Row]:
    """A row whose failure leaves the others."""
    try:
        right, text, figures = find()
    except Exception as problem:
        yield Row(name=name, status="failed", text=f"{type(problem).__name__}: {problem}"[:1000])
        return
    yield Row(name=name, status=_status(right), text=text, figures=figures)


def _compared_losses(plan: str, device: str, expected: list[float]) -> tuple[bool, str, dict[str, Any]]:
    found = _trained(_job(MAIN), plan, _simulated(device), steps=len(expected), dtype=torch.float64)
    worst = max(abs(one - other) / abs(one) for one, other in zip(expected, found, strict=True))
    return worst <= 1e-9, f"losses differ from one CPU's by {worst:.2g}", {"worst": worst}


def _waits_of(plan: str, device: str) -> tuple[bool, str, dict[str, Any]]:
    where = device if plan.startswith("dp=1") else _simulated(device)
    with ml.Trainer(_job(MAIN), plan, devices=where, steps=4, listener=QUIET, cache="off") as trainer:
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


def _counted_peak(job: ml.Job, device: str) -> int:
    """Bytes, in the third step."""
    with ml.Trainer(job, "dp=1", devices=device, steps=3, listener=QUIET, cache="off") as trainer:
        for batch in trainer.batches():
            torch.cuda.reset_peak_memory_stats()
            trainer.step(batch)
        return torch.cuda.max_memory_allocated()


def _standing(job: ml.Job, plan: str) -> int:
    """Bytes that are allocated on the GPU after two steps."""
    with ml.Trainer(job, plan, devices="cuda", steps=2, listener=QUIET, cache="off") as trainer:
        for batch in trainer.batches():
            trainer.step(batch)
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()


def _at_once() -> list[str]:
    """Tests start no processes of their own, so several run at a time, where pytest can."""
    return ["--numprocesses", "4", "--dist", "worksteal"] if importlib.util.find_spec("xdist") else []


def _simulated(device: str) -> str:
    return "simulated:cuda" if device == "cuda" else "simulated"


def _status(is_right: bool) -> str:
    return "passed" if is_right else "failed"


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
