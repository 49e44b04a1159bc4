"""Seconds of a step beside those of a plain loop with `torch.compile`, in one process and in turns: a GPT of 124 million
parameters at 1,024 tokens, and ResNet-50, under autocast to bfloat16; tiny ones where there is no GPU.

Model FLOPs are counted by torch (`FlopCounterMode`, forward and backward); MFU is of the peak that the GPU's maker gives for
dense bfloat16 (`PEAKS`), or, of a GPU that is not listed, of a product of matrices that is measured here.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset, default_collate
from torch.utils.flop_counter import FlopCounterMode

import meshloom as ml
from meshloom.telemetry.progress import QUIET

sys.path.append(str(Path(__file__).parents[1] / "step"))
from gpt import GPT, GPT2, Size, loss  # pyright: ignore[reportMissingImports]

GOAL = 1.02  # of the plain compiled loop's step
# FLOP/s of dense bfloat16, by a part of the device's name; the first that fits
PEAKS = {
    "B200": 2.25e15,
    "GH200": 9.89e14,
    "H200": 9.89e14,
    "H100 PCIe": 7.56e14,
    "H100 NVL": 8.35e14,
    "H100": 9.89e14,
    "A100": 3.12e14,
    "L40S": 3.62e14,
    "L4": 1.21e14,
    "A10": 1.25e14,
    "RTX 4090": 1.65e14,
}
ROUNDS, STEPS = 5, 8


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained. units: counted in a batch, tokens or samples."""

    name: str
    model: Callable[[], nn.Module]
    loss: Callable[[Any, Any], Tensor]
    data: Dataset[Any]
    batch: int
    units: int
    of: str
    fused: bool

    def optimizer(self, named: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(named, lr=3e-4, fused=self.fused)

    def batches(self) -> Iterator[Any]:
        number = 0
        while True:
            taken = [(number + each) % len(self.data) for each in range(self.batch)]  # type: ignore[arg-type]
            yield default_collate([self.data[each] for each in taken])
            number += self.batch


class Bottleneck(nn.Module):
    """[batch, channels, height, width]; three convolutions beside a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.body = nn.Sequential(
            *_convolution(channels, width, 1), nn.ReLU(inplace=True),
            *_convolution(width, width, 3, stride), nn.ReLU(inplace=True),
            *_convolution(width, out, 1),
        )  # fmt: skip
        same = channels == out and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(*_convolution(channels, out, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class ResNet(nn.Module):
    """Pictures [batch, 3, height, width] -> logits [batch, 1000]; blocks: of each of the four stages; (3, 4, 6, 3) is ResNet-50."""

    def __init__(self, blocks: tuple[int, ...] = (3, 4, 6, 3), width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Sequential(*_convolution(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
        layers, channels = list[nn.Module](), width
        for number, count in enumerate(blocks):
            inner = width * 2**number
            for block in range(count):
                layers.append(Bottleneck(channels, inner, 2 if number and not block else 1))
                channels = 4 * inner
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(channels, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.stem(x)).mean((2, 3)))


def gpt_task(device: str) -> Task:
    real = device == "cuda"
    size = GPT2 if real else Size(vocabulary=97, width=24, blocks=2, heads=3, length=16, tied=True)
    batch = 8 if real else 4
    tokens = torch.randint(
        size.vocabulary, (8 * batch, size.length + 1), generator=torch.Generator().manual_seed(1)
    )
    return Task(
        name=f"GPT of {size.blocks} blocks, width {size.width}, {size.length} tokens, batch {batch}", model=lambda: GPT(size), loss=loss,
        data=TensorDataset(tokens), batch=batch, units=batch * size.length, of="tokens", fused=real,
    )  # fmt: skip


def resnet_task(device: str) -> Task:
    real = device == "cuda"
    batch, side = (64, 224) if real else (4, 32)
    generator = torch.Generator().manual_seed(1)
    pictures = torch.randn(4 * batch, 3, side, side, generator=generator)
    labels = torch.randint(1000, (4 * batch,), generator=generator)

    def build() -> nn.Module:
        return ResNet() if real else ResNet((1, 1, 1, 1), 8)

    return Task(
        name=f"{'ResNet-50' if real else 'a small ResNet'}, {side} x {side}, batch {batch}", model=build, loss=class_loss,
        data=TensorDataset(pictures, labels), batch=batch, units=batch, of="samples", fused=real,
    )  # fmt: skip


def class_loss(model: nn.Module, batch: Any) -> Tensor:
    pictures, labels = batch
    return F.cross_entropy(model(pictures), labels)


def compared(task: Task, device: str) -> Iterator[dict[str, Any]]:
    """Rows, as dicts of name, status, text and figures. The plain compiled loop is timed beside every other system."""
    flops, (peak, where) = flops_of(task, device), peak_of(device)
    others: dict[str, Callable[[ExitStack], Callable[[], Any]]] = {
        "dp=1,precision=bf16-mixed,compile=true": lambda stack: ours(task, "dp=1,precision=bf16-mixed,compile=true", device, stack),
        "plain loop, not compiled": lambda stack: plain(task, device, compiled=False),
        "dp=1,precision=bf16-mixed": lambda stack: ours(task, "dp=1,precision=bf16-mixed", device, stack),
        "dp=1,precision=bf16-mixed,recompute=selective": lambda stack: ours(task, "dp=1,precision=bf16-mixed,recompute=selective", device, stack),
        "dp=1,precision=bf16-mixed,recompute=full": lambda stack: ours(task, "dp=1,precision=bf16-mixed,recompute=full", device, stack),
    }  # fmt: skip
    base = plain(task, device, compiled=True)
    for name, build in others.items():
        with ExitStack() as stack:
            try:
                system = build(stack)
                its, bases, ratio = timed(system, base, device)
            except Exception as problem:  # the others go on
                yield {"name": f"{task.name}: {name}", "status": "failed", "text": f"{type(problem).__name__}: {problem}"[:500], "figures": {}}  # fmt: skip
                continue
        judged = device == "cuda" and name.endswith("compile=true")
        mfu = flops / its / peak
        yield {
            "name": f"{task.name}: {name}", "status": "passed" if ratio <= GOAL or not judged else "failed",
            "text": f"{1e3 * its:.2f} ms a step, {ratio:.3f} of the plain compiled loop's {1e3 * bases:.2f} ms"
            + (f" (goal {GOAL})" if name.endswith("compile=true") else "")
            + f"; {task.units / its:,.0f} {task.of}/s, MFU {mfu:.1%} of {peak:.3g} FLOP/s ({where});"
            + f" plain compiled {task.units / bases:,.0f} {task.of}/s, MFU {flops / bases / peak:.1%}",
            "figures": {"seconds": its, "plain_compiled_seconds": bases, "ratio": ratio, "mfu": mfu, "flops": flops, "peak": peak},
        }  # fmt: skip
        gc.collect()


def plain(task: Task, device: str, *, compiled: bool) -> Callable[[], Any]:
    """A step of a loop that a user would write."""
    torch.manual_seed(0)
    model = task.model().to(device)
    optimizer, batches = task.optimizer(list(model.named_parameters())), task.batches()
    run: Any = torch.compile(model) if compiled else model

    def step() -> None:
        batch = [each.to(device, non_blocking=True) for each in next(batches)]
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16):
            found = task.loss(run, batch)
        found.backward()
        optimizer.step()

    return step


def ours(task: Task, plan: str, device: str, stack: ExitStack) -> Callable[[], Any]:
    """A step of a Trainer."""
    job = ml.Job(
        model=task.model, loss=task.loss, data=lambda: task.data, optimizer=task.optimizer, batch_size=task.batch, steps=10**6
    )  # fmt: skip
    trainer = stack.enter_context(ml.Trainer(job, plan, devices=device, listener=QUIET, cache="off"))
    batches = trainer.batches()
    stack.callback(batches.close)  # type: ignore[attr-defined]
    return lambda: trainer.step(next(batches))


def timed(one: Callable[[], Any], other: Callable[[], Any], device: str) -> tuple[float, float, float]:
    """Median seconds of a step of both, and the median of the rounds' ratios. They take turns, with reading."""
    rounds, steps = (ROUNDS, STEPS) if device == "cuda" else (2, 2)
    for _ in range(3):
        one()
        other()
    found: list[tuple[float, float]] = []
    for number in range(rounds):
        seconds: dict[int, float] = {}
        for place, system in ((0, one), (1, other)) if number % 2 else ((1, other), (0, one)):
            _synchronize(device)
            began = time.perf_counter()
            for _ in range(steps):
                system()
            _synchronize(device)
            seconds[place] = (time.perf_counter() - began) / steps
        found.append((seconds[0], seconds[1]))
    ratio = statistics.median(mine / theirs for mine, theirs in found)
    return (
        statistics.median(mine for mine, _ in found),
        statistics.median(theirs for _, theirs in found),
        ratio,
    )


def flops_of(task: Task, device: str) -> float:
    """Of a step without its update."""
    model, batch = task.model().to(device), [each.to(device) for each in next(task.batches())]
    with FlopCounterMode(display=False) as counter:
        task.loss(model, batch).backward()
    return float(counter.get_total_flops())


def peak_of(device: str) -> tuple[float, str]:
    """FLOP/s, and where that is from."""
    name = torch.cuda.get_device_name() if device == "cuda" else ""
    if listed := next((peak for part, peak in PEAKS.items() if part in name), None):
        return listed, name
    n = 8192 if device == "cuda" else 256
    one = torch.randn(n, n, device=device, dtype=torch.bfloat16)
    seconds: list[float] = []
    for _ in range(10):
        _synchronize(device)
        began = time.perf_counter()
        torch.mm(one, one)
        _synchronize(device)
        seconds.append(time.perf_counter() - began)
    return 2 * n**3 / min(seconds), f"measured: a product of {n} x {n} matrices"


def _convolution(channels: int, out: int, size: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(channels, out, size, stride, size // 2, bias=False), nn.BatchNorm2d(out)]


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
