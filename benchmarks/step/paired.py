"""Two trees of meshloom, step by step in turns: the ranks of both live at once, and a round is a few steps of one, then of the other, while the one that is
not timed waits and takes no core. In the next round the order is reversed.

Ranks are started by torchrun, with this file, which runs with either tree's package.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1])]
from earlier_tree import THIS, Tree, earlier_tree
from launched import torchrun

RANKS = 2
WAIT_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class Mode:
    """plan: of the two ranks. small: a three-layer MLP in place of the benchmark GPT, of which the CPU time counts: what it computes takes
    next to none. steps: of a round, for each of that of the GPT."""

    plan: str
    transport: str = "auto"
    small: bool = False
    steps: int = 1


MODES = {
    "dp": Mode(plan=f"dp={RANKS}"),
    "tp": Mode(plan=f"tp={RANKS}"),
    "pp": Mode(plan=f"pp={RANKS},microbatches=4"),
    "zero3": Mode(plan=f"dp={RANKS},zero=3", transport="gloo"),  # as over a network
    "small": Mode(plan=f"dp={RANKS}", small=True, steps=100),
}


def measure(
    revision: str, names: Sequence[str], batch_size: int, num_rounds: int, num_steps: int
) -> list[dict[str, Any]]:
    """A record for each mode and tree, the ratio to the other tree's median in that of this one; also to standard error, mode by mode."""
    records: list[dict[str, Any]] = []
    with earlier_tree(revision) as other:
        for name in names:
            mode = MODES[name]
            rounds = _rounds([THIS, other], name, batch_size, num_rounds, num_steps * mode.steps)
            for tree, seconds in rounds.items():
                records.append(
                    {
                        "tree": tree.name,
                        "mode": name,
                        "plan": mode.plan,
                        "batch": batch_size,
                        **_summary(seconds),
                    }
                )
            counts = "cpu" if mode.small else "seconds"
            mine, theirs = ([each[counts] for each in rounds[tree]] for tree in (THIS, other))
            ratio = statistics.median(mine) / statistics.median(theirs)
            paired = statistics.median(one / its for one, its in zip(mine, theirs, strict=True))
            records[-2] |= {"ratio of": counts, "ratio": ratio, "paired ratio": paired}
            what = "ms of CPU a step, both ranks" if mode.small else "ms a step"
            print(
                f"{name:6} {statistics.median(mine) * 1e3:9.2f} against {statistics.median(theirs) * 1e3:9.2f} {what}   {ratio:.3f} ({paired:.3f}) of {revision}",
                file=sys.stderr, flush=True,
            )  # fmt: skip
    return records


def _summary(rounds: Sequence[dict[str, float]]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for name in ("seconds", "cpu"):
        values = [each[name] for each in rounds]
        found[name] = {"median": statistics.median(values), "minimum": min(values), "maximum": max(values)}
    return found


def _rounds(
    trees: Sequence[Tree], mode: str, batch_size: int, num_rounds: int, num_steps: int
) -> dict[Tree, list[dict[str, float]]]:
    """Of each tree, what each round says; the first, which warms up, is left out."""
    found: dict[Tree, list[dict[str, float]]] = {tree: [] for tree in trees}
    with ExitStack() as stack:
        ranks = {
            tree: stack.enter_context(_started(tree, mode, batch_size, (num_rounds + 1) * num_steps))
            for tree in trees
        }
        losses: dict[Tree, float] = {}
        for number in range(num_rounds + 1):
            for tree in trees[:: -1 if number % 2 else 1]:
                ranks[tree].send(num_steps)
                answer = ranks[tree].recv()
                losses.setdefault(tree, answer.pop("loss"))
                if number:
                    found[tree].append(answer)
        one, other = losses.values()
        assert abs(one - other) <= 1e-5 * abs(other), f"the first losses differ: {one} and {other}"
    return found


@contextmanager
def _started(tree: Tree, mode: str, batch_size: int, steps: int) -> Iterator[Connection]:
    """The ranks of a tree: its rank 0, which is sent numbers of steps and answers. They end with the connection."""
    with (
        tempfile.TemporaryDirectory() as directory,
        Listener(str(Path(directory, "socket")), "AF_UNIX") as listener,
    ):
        _, *command = torchrun(RANKS, directory)
        words = ["--at", listener.address, "--mode", mode, "--batch", str(batch_size), "--steps", str(steps)]
        process = tree.start([*command, __file__, *words])
        try:
            listener._listener._socket.settimeout(WAIT_SECONDS)  # type: ignore[attr-defined]
            with listener.accept() as connection:
                yield connection
            if code := process.wait():
                raise SystemExit(f"the ranks of {tree.name} ended with exit code {code}")
        finally:
            process.terminate()  # torchrun ends its ranks
            process.wait()


# --- On each rank.


def run_rank(where: str, name: str, batch_size: int, steps: int) -> None:
    """Take as many steps as rank 0 is told, until its connection ends."""
    import torch
    import torch.distributed as dist

    import meshloom as ml

    torch.set_num_threads(1)
    mode = MODES[name]
    with ExitStack() as stack:
        connection = stack.enter_context(Client(where, "AF_UNIX")) if os.environ["RANK"] == "0" else None
        trainer = stack.enter_context(
            ml.Trainer(
                _job(mode, batch_size, steps),
                mode.plan,
                devices="cpu",
                transport=mode.transport,
                share=True,
                cache="off",
            )
        )
        if not dist.is_initialized():
            dist.init_process_group("gloo")
            stack.callback(dist.destroy_process_group)
        batches = trainer.batches()
        stack.callback(batches.close)
        while True:
            told = torch.tensor([_told(connection)])
            dist.broadcast(told, 0)  # over Gloo, where who waits takes no core
            if not told.item():
                break
            seconds = cpu = 0.0
            losses: list[float] = []
            for _ in range(int(told)):
                batch = next(batches)
                dist.barrier()
                started, used = time.perf_counter(), time.process_time()
                losses.append(trainer.step(batch))
                seconds += time.perf_counter() - started
                cpu += time.process_time() - used
            slowest, total = torch.tensor(seconds / len(losses)), torch.tensor(cpu / len(losses))
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            dist.all_reduce(total)
            if connection:
                connection.send({"seconds": slowest.item(), "cpu": total.item(), "loss": losses[0]})
        time.sleep(1.0)  # as `rounds.end_rounds` says


def _told(connection: Connection | None) -> int:
    """The number of steps of the next round; 0: there is none."""
    try:
        return connection.recv() if connection else 0
    except EOFError:
        return 0


def _job(mode: Mode, batch_size: int, steps: int) -> Any:
    import gpt
    import torch
    from torch import nn

    import meshloom as ml

    common = {"batch_size": batch_size, "steps": steps, "shuffle": False, "optimizer": gpt.make_optimizer}
    if not mode.small:
        return ml.Job(
            model=gpt.make_model, loss=gpt.loss, data=partial(gpt.make_data, batch_size * steps), **common
        )

    def data() -> torch.utils.data.TensorDataset:
        drawn = torch.Generator().manual_seed(1)
        return torch.utils.data.TensorDataset(torch.randn(64 * batch_size, 32, generator=drawn))

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return model(batch[0]).square().mean()

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    return ml.Job(model=model, loss=loss, data=data, **common)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--at", required=True)
    parser.add_argument("--mode", required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    said = parser.parse_args()
    run_rank(said.at, said.mode, said.batch, said.steps)


if __name__ == "__main__":
    main()
