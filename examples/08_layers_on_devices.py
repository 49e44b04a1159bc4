"""A model in two parts on two devices: what each holds, what travels between them, and how much faster it can
become.

    python examples/08_layers_on_devices.py       # prints all of it: on simulated devices, and timed on two CPU processes
    meshloom verify examples/08_layers_on_devices.py --plan pp=2,microbatches=4,cuts=second --devices cpu

f(x) = second(first(x)) reads handwritten digits. Under pp=2 rank 0 has `first` and rank 1 has `second`:
activations go forward, their gradients come back, and each rank updates its own part. With microbatches both
compute at the same time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from statistics import median

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import meshloom as ml
from meshloom.program.cost.rates import rates_here
from meshloom.replica.replica import Replica

WIDTH = 1024  # features that go from the first part to the second
BATCH = 256
STEPS_PER_EPOCH, EPOCHS = 5, 4
MICROBATCHES = 4
PLAN = f"pp=2,microbatches={MICROBATCHES},cuts=second"
TIMED_STEPS = 10


class TwoParts(nn.Module):
    """Images [batch, 64] -> logits [batch, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.second = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))

    def forward(self, images: Tensor) -> Tensor:
        return self.second(self.first(images))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Mean cross-entropy."""
    images, digits = batch
    return F.cross_entropy(model(images), digits)


def digits() -> TensorDataset:
    """1280 of scikit-learn's handwritten digits: pixels [64] from 0 to 1, and which digit it is."""
    found = load_digits()
    count = STEPS_PER_EPOCH * BATCH
    return TensorDataset(
        torch.tensor(found.data[:count], dtype=torch.float32) / 16, torch.tensor(found.target[:count])
    )


job = ml.Job(
    model=TwoParts,
    loss=loss,
    optimizer=lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9),
    data=digits,
    batch_size=BATCH,
    steps=EPOCHS * STEPS_PER_EPOCH,
)


def train_and_compare() -> None:
    """Two devices and one, epoch after epoch; then what was sent."""
    with (
        ml.Trainer(job, PLAN, devices="simulated") as two,
        ml.Trainer(job, f"microbatches={MICROBATCHES}", devices="simulated") as one,
    ):
        print("\nWhat each rank holds and updates.\n")
        for rank, replica in enumerate(two.replicas):
            parts = dict.fromkeys(name.split(".")[0] for name, _ in replica.named)
            count = sum(parameter.numel() for _, parameter in replica.named)
            print(f"  rank {rank}: {', '.join(parts):<8}{count:>12,} parameters")
        before = [sent_by(replica) for replica in two.replicas]
        print("\nepoch   two devices    one device    difference")
        losses: list[tuple[float, float]] = []
        for of_two, of_one in zip(two.batches(), one.batches(), strict=True):
            losses.append((two.step(of_two), one.step(of_one)))
            if len(losses) == STEPS_PER_EPOCH:
                both = [sum(each) / STEPS_PER_EPOCH for each in zip(*losses, strict=True)]
                # float32, sums in another order
                torch.testing.assert_close(both[0], both[1], rtol=1e-4, atol=0.0)
                print(
                    f"{two.next_step // STEPS_PER_EPOCH:5}{both[0]:14.6f}{both[1]:14.6f}{both[0] - both[1]:14.1e}"
                )
                losses.clear()
        counted = [
            (sent_by(replica) - start) // two.next_step
            for replica, start in zip(two.replicas, before, strict=True)
        ]
    # R s b: of one cut, s values per sample go forward, and as many gradients come back; 4 bytes each.
    predicted = WIDTH * BATCH * torch.float32.itemsize
    print(f"\nBytes per step: {WIDTH} values x {BATCH} samples x 4 bytes, forward and back.\n")
    print(f"{'':<32}{'predicted':>12}{'counted':>12}")
    for what, count in zip(
        ("rank 0 -> rank 1, activations", "rank 1 -> rank 0, gradients"), counted, strict=True
    ):
        print(f"  {what:<30}{predicted:>12,}{count:>12,}")
    if counted != [predicted, predicted]:
        raise SystemExit("What was sent is not what was predicted.")


def sent_by(replica: Replica) -> int:
    """Bytes that a rank has sent along pp so far."""
    count = replica.context.groups["pp"].counts.get("send")
    return count.bytes if count else 0


# --- How much faster two devices can be.


def part_seconds() -> list[float]:
    """On one thread, medians: a microbatch forward and backward through `first`, through `second`; the update
    of each."""
    torch.set_num_threads(1)
    model, (images, targets) = TwoParts(), digits()[: BATCH // MICROBATCHES]
    middle = model.first(images).detach().requires_grad_()
    arriving = torch.ones_like(middle)
    first, second = (job.optimizer(list(part.named_parameters())) for part in (model.first, model.second))
    works: list[Callable[[], object]] = [
        lambda: model.first(images).backward(arriving),
        lambda: F.cross_entropy(model.second(middle), targets).backward(),
        first.step,
        second.step,
    ]
    return [
        median(times) for times in zip(*([seconds_of(work) for work in works] for _ in range(9)), strict=True)
    ]


def seconds_of(work: Callable[[], object]) -> float:
    """Of one call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measured_on_one() -> float:
    """Median seconds of a step of one device with one thread, in this process."""
    with ml.Trainer(job, f"microbatches={MICROBATCHES}", devices="simulated", steps=TIMED_STEPS) as trainer:
        return median([seconds_of(partial(trainer.step, batch)) for batch in trainer.batches()])


def measured_on_two() -> float:
    """The same of two CPU processes with one thread each, started by the command line."""
    command = [
        sys.executable,
        "-m",
        "meshloom",
        "train",
        __file__,
        "--plan",
        PLAN,
        "--devices",
        "cpu",
        "--steps",
        str(TIMED_STEPS),
        "--json",
        "-",
    ]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=True
    )
    rates = [
        record["samples_per_second"]
        for record in map(json.loads, done.stdout.splitlines())
        if record["event"] == "step"
    ]
    ends = [number * BATCH / rate for number, rate in enumerate(rates, 1)]  # the rate is of all steps so far
    return median(after - before for before, after in pairwise(ends))


def speed_up() -> None:
    """Amdahl's bound, the same with measured parts and communication, and what processes take."""
    m = MICROBATCHES
    # while a pipeline fills and drains, a microbatch's worth of work is done with one rank at a time
    parallel = 1 - 1 / m
    first, second, *updates = part_seconds()
    rates = rates_here("cpu", 2)
    message = rates.latency_seconds + WIDTH * BATCH // m * 4 / rates.link_bytes_per_second
    one = m * (first + second) + sum(updates)
    two = m * max(first, second) + min(first, second) + max(updates)
    print("\nHow much faster two devices can be than one. Each has one thread.\n")
    print(
        f"  {'Amdahl, f = 1 - 1/m, parts alike':<36}1 / (1 - f + f/2) = {1 / (1 - parallel + parallel / 2):.2f}"
    )
    show("these parts, as they take here", one, two)
    show("... and two messages unhidden", one, two + 2 * message)  # the first forward and the last backward
    if (os.cpu_count() or 1) < 2:
        print("  measured: not here, as one core cannot run two ranks at the same time")
    else:
        show("measured, two CPU processes", measured_on_one(), measured_on_two())
    print(
        f"\n  first {first * 1e3:.1f} ms, second {second * 1e3:.1f} ms a microbatch; a message {message * 1e3:.1f} ms ({rates.source})"
    )


def show(what: str, one: float, two: float) -> None:
    """Seconds of a step on one device and on two, and their ratio."""
    print(f"  {what:<36}{one * 1e3:6.1f} ms / {two * 1e3:5.1f} ms = {one / two:.2f}")


def main() -> None:
    train_and_compare()
    speed_up()


if __name__ == "__main__":
    main()
