"""Memory on a GPU: that of a step, predicted beside what the allocator counted, and the optimizer's state in host
memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import speed
import torch
from rows import MAIN, Row, job_of, simulated, status_of, trained, tried
from torch.utils.data import default_collate

import meshloom as ml
from meshloom.core.losses.in_precision import in_precision
from meshloom.planner.memory.measured import measure_memory
from meshloom.planner.memory.memory import predict_memory
from meshloom.program.capture.capture import capture
from meshloom.program.capture.shapes import capture_shapes
from meshloom.telemetry.progress import QUIET


def memory(device: str) -> Iterator[Row]:
    """Workspaces of kernels and the allocator's rounding are not predicted (docs/memory.md), so a fifth is
    allowed, and what products of matrices leave allocated is counted by itself."""
    workspaces = _workspaces() if device == "cuda" else 0
    for batch in (8, 32):
        job = replace(job_of(MAIN), batch_size=batch)
        data = job.data()
        batches = [
            default_collate([data[number * batch + each] for each in range(batch)]) for number in range(2)
        ]
        predicted = predict_memory(capture(job, (batches[0], batches[1])), job.optimizer)
        followed = measure_memory(job, batches[:1], device=device).peak
        counted = _counted_peak(job, device) - workspaces if device == "cuda" else followed
        allowed = 0.2 * predicted.peak
        text = f"predicted {_mib(predicted.peak)} (in {predicted.phase}), counted {_mib(counted)} and {_mib(workspaces)} of workspaces, tensors followed {_mib(followed)}"
        figures = {
            "predicted": predicted.peak,
            "counted": counted,
            "followed": followed,
            "workspaces": workspaces,
        }
        yield Row(
            name=f"a step of {MAIN.name}, batch {batch}",
            status=status_of(abs(counted - predicted.peak) <= allowed),
            text=text,
            figures=figures,
        )


def memory_gpt(device: str) -> Iterator[Row]:
    """At sizes where activations are what matters, cuBLAS's workspaces are not: within 5%. The kernel of attention is the one that
    torch chooses for a CPU when the loss is captured, so what others save in its place is part of the difference."""
    task = speed.gpt_task(device)
    for plan in ("dp=1", "dp=1,precision=bf16-mixed"):
        yield from tried(f"{task.name} under {plan}", lambda plan=plan: _within_5_percent(task, plan, device))


def offload(device: str) -> Iterator[Row]:
    """Operators of the host round otherwise than those of a GPU. Of AdamW's state, two averages leave the device."""
    for plan in ("dp=1", "dp=2,zero=1"):
        where = device if plan == "dp=1" else simulated(device)
        away, here = (
            trained(job_of(MAIN), each, where, steps=5, dtype=torch.float64)
            for each in (f"{plan},offload=optimizer", plan)
        )
        worst = max(abs(one - other) / abs(one) for one, other in zip(here, away, strict=True))
        yield Row(
            name=f"5 steps under {plan},offload=optimizer",
            status=status_of(worst <= 1e-9),
            text=f"losses differ from those of {plan} by {worst:.2g}",
            figures={"worst": worst},
        )
    if device == "cuda":
        here, away = (_standing(job_of(MAIN), plan) for plan in ("dp=1", "dp=1,offload=optimizer"))
        state = 2 * sum(each.nbytes for each in job_of(MAIN).model().parameters())
        yield Row(
            name="memory between steps",
            status=status_of(here - away >= 0.9 * state),
            text=f"{here / 2**20:.1f} MiB, and {away / 2**20:.1f} MiB with offload=optimizer; the state is {state / 2**20:.1f} MiB",
            figures={"without": here, "with": away, "state": state},
        )


def _within_5_percent(task: speed.Task, plan: str, device: str) -> tuple[bool, str, dict[str, Any]]:
    job = ml.Job(
        model=task.model, loss=task.loss, data=lambda: task.data, optimizer=task.optimizer, batch_size=task.batch, steps=3,
    )  # fmt: skip
    batch = next(task.batches())
    mixed = in_precision(job, ml.Plan.parse(plan))
    predicted = predict_memory(capture_shapes(mixed, batch), job.optimizer).peak
    followed = measure_memory(mixed, [batch], device=device).peak
    counted = _counted_peak(job, device, plan) if device == "cuda" else followed
    text = f"predicted {_mib(predicted)}, counted {_mib(counted)}, {predicted / counted - 1:+.1%} (goal 5%), tensors followed {_mib(followed)}"
    figures = {"predicted": predicted, "counted": counted, "followed": followed}
    return abs(predicted / counted - 1) <= 0.05, text, figures


def _counted_peak(job: ml.Job, device: str, plan: str = "dp=1") -> int:
    """Bytes, in the third step."""
    with ml.Trainer(job, plan, devices=device, steps=3, listener=QUIET, cache="off") as trainer:
        for batch in trainer.batches():
            torch.cuda.reset_peak_memory_stats()
            trainer.step(batch)
        return torch.cuda.max_memory_allocated()


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def _workspaces() -> int:
    """Bytes that one product of matrices and its backward, in a thread of its own, leave allocated on the GPU."""
    before = torch.cuda.memory_allocated()
    a = torch.ones(64, 64, device="cuda", requires_grad=True)
    (a @ a).sum().backward()
    torch.cuda.synchronize()
    del a
    return torch.cuda.memory_allocated() - before


def _standing(job: ml.Job, plan: str) -> int:
    """Bytes that are allocated on the GPU after two steps."""
    with ml.Trainer(job, plan, devices="cuda", steps=2, listener=QUIET, cache="off") as trainer:
        for batch in trainer.batches():
            trainer.step(batch)
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
