"""The same job under four exchanges, with workers of one speed and with one that is three times slower: loss
against time.

    python examples/10_parameter_server.py                 # a table
    python examples/10_parameter_server.py picture.png     # and a picture; needs `pip install 'meshloom[report]'`

The job and the script stay the same, only the plan's text changes. Time is virtual, so that every run of this
file prints the same: a worker needs 1 s for its share of a batch (the slow one 3 s), and a message takes 0.1
s.

What to see: with workers of one speed it pays to wait, since gradients at old parameters ask for smaller
steps. With a slow one, who waits has a third of the steps, and who does not is ahead. Each kind has the
learning rate and the momentum (0 or 0.9) with which it does best here.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import meshloom as ml

# seconds that each worker needs for its share of a batch
SPEEDS = {"even": (1.0, 1.0, 1.0, 1.0), "one slow": (1.0, 1.0, 1.0, 3.0)}
MESSAGE = 0.1  # seconds
SECONDS = 60.0  # of each run
SHOWN = (10.0, 20.0, 30.0, 60.0)  # when the table looks at the loss


def digits(train: bool) -> TensorDataset:
    """Images [64] from 0 to 1 and digits, of which every fifth is held out."""
    found = load_digits()
    chosen = (torch.arange(len(found.target)) % 5 != 0) == train
    return TensorDataset(
        torch.tensor(found.data, dtype=torch.float32)[chosen] / 16, torch.tensor(found.target)[chosen]
    )


def cross_entropy(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Mean over the samples."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


job = ml.Job(
    model=lambda: nn.Sequential(nn.Linear(64, 50), nn.GELU(), nn.Linear(50, 10)),
    loss=cross_entropy,
    optimizer=lambda named: torch.optim.SGD(named, lr=0.3, momentum=0.9),
    data=lambda: digits(train=True),
    batch_size=64,
    steps=60,
    evaluate=ml.Evaluate(lambda: digits(train=False), {"loss": cross_entropy}, every=5),
)


@dataclass(frozen=True)
class Exchange:
    """A plan, and when its steps are done. waits: for the slowest worker, in every step. messages: of a step,
    one after the other."""

    plan: str
    messages: float
    waits: bool = True

    def step_seconds(self, speeds: tuple[float, ...]) -> float:
        """Between two steps, on average. An asynchronous one is the share of one worker, a synchronous one
        those of all."""
        if self.waits:
            return max(speeds) + self.messages * MESSAGE
        return 1 / sum(1 / (each + self.messages * MESSAGE) for each in speeds)


EXCHANGES = {
    "all-reduce (ring)": Exchange("dp=4", messages=6),  # 2 (N - 1) messages one after the other, N = 4
    "server": Exchange("dp=4,exchange=server", messages=2),  # push and pull
    "local steps": Exchange("dp=4,exchange=local_sgd,local_steps=8", messages=6 / 8),
    "asynchronous": Exchange("dp=4,exchange=async", messages=2, waits=False),
}


def train(exchange: Exchange, speeds: tuple[float, ...]) -> list[tuple[float, float]]:
    """(virtual seconds, loss on the held-out digits), as the run goes."""
    step_seconds = exchange.step_seconds(speeds)
    steps = round(SECONDS / step_seconds)
    curve: list[tuple[float, float]] = []
    now = 0.0

    def step(progress: ml.Progress) -> None:
        nonlocal now
        now = progress.step * step_seconds if exchange.waits else progress.virtual_seconds

    listener = ml.Listener(
        started=lambda text: None,
        note=lambda text: None,
        step=step,
        evaluated=lambda step, metrics: curve.append((now, metrics["loss"])),
    )
    settings = (
        {}
        if exchange.waits
        else {"circumstances": ml.Circumstances(step_seconds=speeds, latency_seconds=MESSAGE)}
    )
    watched = replace(job, evaluate=replace(job.evaluate, every=max(1, steps // 12)))
    if not exchange.waits:
        watched = replace(watched, optimizer=lambda named: torch.optim.SGD(named, lr=0.2))
    with ml.Trainer(
        watched, exchange.plan, devices="simulated", steps=steps, listener=listener, **settings
    ) as trainer:
        trainer.fit()
    return curve


def loss_at(curve: list[tuple[float, float]], seconds: float) -> float:
    """Between two points of the curve."""
    for (before, high), (after, low) in pairwise(curve):
        if before <= seconds <= after:
            return high + (low - high) * (seconds - before) / (after - before)
    return curve[-1][1] if seconds > curve[-1][0] else curve[0][1]


def draw(curves: dict[tuple[str, str], list[tuple[float, float]]], file: str) -> None:
    """One picture per kind of workers, one line per exchange."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, speeds in zip(figure.subplots(1, len(SPEEDS), sharey=True), SPEEDS, strict=True):
        for name in EXCHANGES:
            axes.plot(*zip(*curves[name, speeds], strict=True), label=name)
        axes.set(
            title=f"{speeds}: {', '.join(f'{each:g}' for each in SPEEDS[speeds])} s per share",
            xlabel="virtual seconds",
            ylabel="loss on held-out digits",
        )
        axes.set_yscale("log")
        axes.grid(visible=True, which="both", alpha=0.3)
        axes.legend()
    figure.savefig(file)


def main() -> None:
    curves = {
        (name, speeds): train(exchange, SPEEDS[speeds])
        for name, exchange in EXCHANGES.items()
        for speeds in SPEEDS
    }
    print("loss on held-out digits after".ljust(66) + "".join(f"{seconds:7g} s" for seconds in SHOWN))
    for speeds in SPEEDS:
        for name, exchange in EXCHANGES.items():
            losses = "".join(f"{loss_at(curves[name, speeds], seconds):9.3f}" for seconds in SHOWN)
            print(f"{speeds:10}{name:20}{exchange.plan:36}{losses}")
    if len(sys.argv) > 1:
        draw(curves, sys.argv[1])
        print(f"The picture is {sys.argv[1]}.")


if __name__ == "__main__":
    main()
