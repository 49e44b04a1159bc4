"""The exact jobs on one device, in a plain loop, and under twelve plans: what they train, what they send, what they write."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import meshloom as ml
from meshloom.core.random import sample_order
from meshloom.program.cost.rates import Rates
from meshloom.telemetry.progress import QUIET
from meshloom.tensor_parallel import division
from tests.golden.exact_jobs import JOBS
from tests.golden.exactness import Exact

# Every axis, each zero, all schedules, recomputation, uneven shares, servers and messages.
PLANS = (
    "dp=4,microbatches=2",
    "dp=4,microbatches=2,zero=1",
    "dp=2,microbatches=2,zero=2,bucket_bytes=512",
    "dp=2,zero=3",
    "dp=3,exchange=ring,shares=4+2+2",
    "dp=4,exchange=server,servers=2",
    "tp=2",
    "pp=2,microbatches=4",
    "pp=2,microbatches=4,schedule=zb-v",
    "dp=2,pp=2,microbatches=2,schedule=gpipe,recompute=full",
    "dp=2,tp=2,microbatches=2,zero=3,recompute=selective",
    "dp=2,pp=2,tp=2,microbatches=2,schedule=zb-h1,zero=1",
)
_PIECE = re.compile(r"(.*)\[(\d+):\d+\]")


@dataclass(frozen=True, kw_only=True)
class Result:
    """losses: of the steps. tensors: weights and the optimizer's state at the end, by name, state flat."""

    losses: list[float]
    tensors: Mapping[str, Tensor]

    def __str__(self) -> str:
        """As it stands in a golden file: losses as they are, of each tensor the digest of its bits."""
        tensors = [f"{name}: {digest(each)}" for name, each in sorted(self.tensors.items())]
        return "\n".join([f"losses {' '.join(map(repr, self.losses))}", *tensors])


def digest(tensor: Tensor) -> str:
    """Of its bits, but for the sign of zeros: a sum of nothing but -0.0 keeps it only where adding does not begin with 0."""
    content = hashlib.sha256((tensor + 0.0).contiguous().numpy().tobytes()).hexdigest()
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} {content[:16]}"


def on_one_device(job: ml.Job) -> Result:
    """A plain loop, in which every operator is proved to be exact. It shares nothing with what it is compared with but the order of samples, which is
    written down, too."""
    torch.manual_seed(0)
    model, data = job.model(), job.data()
    named = [pair for pair in model.named_parameters() if pair[1].requires_grad]
    optimizer: Any = job.optimizer(named)
    scheduler = job.scheduler(optimizer) if job.scheduler else None
    losses: list[float] = []
    with Exact():
        for indices in samples_of(job):
            batch = [torch.stack(column) for column in zip(*(data[each] for each in indices), strict=True)]
            optimizer.zero_grad()
            found = job.loss(model, batch)
            total, weight = found if isinstance(found, tuple) else (found, 1)
            total.backward()
            for _, parameter in named:
                parameter.grad = parameter.grad / float(weight)  # type: ignore[operator]
            losses.append(total.item() / float(weight))
            optimizer.step()
            if scheduler:
                scheduler.step()
    state = {
        f"{name}/{key}": value.reshape(-1)
        for name, parameter in named
        for key, value in optimizer.state[parameter].items()
        if isinstance(value, Tensor)
    }
    return Result(
        losses=losses, tensors={**{name: each.detach() for name, each in model.state_dict().items()}, **state}
    )


def samples_of(job: ml.Job) -> list[list[int]]:
    """The samples of each step's batch, in order."""
    order: list[int] = []
    size = len(job.data())
    for epoch in range(-(-job.steps * job.batch_size // size)):
        order += sample_order(job.seed, epoch, size, job.shuffle)
    return [order[step * job.batch_size : (step + 1) * job.batch_size] for step in range(job.steps)]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run under a plan. bytes: that its first rank handed to each kind of collective along each axis, after what formulas say of them was found equal.
    held: each rank's trainable parameters, with their shapes there."""

    result: Result
    bytes: str
    held: str


def trained(
    job: ml.Job, plan: str, out: Path, *, devices: str = "simulated", resume: Path | None = None
) -> Run:
    """All steps, with a checkpoint of each in `out`. Of ranks that are processes, which may have one copy of the parameters, the first one knows the result."""
    losses: list[float] = []
    quiet = ml.Listener(
        started=QUIET.started, note=QUIET.note, step=lambda progress: losses.append(progress.loss)
    )
    with ml.Trainer(
        job,
        plan,
        devices=devices,
        out=out,
        resume=resume,
        share=devices != "simulated",
        cache="off",
        listener=quiet,
    ) as trainer:
        summary = trainer.fit()
        named = [replica.named for replica in trainer.replicas]
        tensors = tensors_of(newest(out)) if trainer.world.main else {}
    counted, predicted = summary.counted.bytes, summary.predicted.bytes
    assert counted == predicted, f"{plan}: {counted} bytes are counted, and {predicted} are predicted"
    sent = [
        f"{axis} {kind} {size}" for axis, kinds in counted.items() for kind, size in sorted(kinds.items())
    ]
    held = [" ".join(f"{name}{list(each.shape)}" for name, each in own) or "nothing" for own in named]
    return Run(
        result=Result(losses=losses, tensors=tensors),
        bytes="\n".join(sent),
        held="\n".join(f"rank {rank}: {each}" for rank, each in enumerate(held)),
    )


@contextmanager
def divided_readily() -> Iterator[None]:
    """A machine on which it pays to divide small models along tp, too."""
    rates = Rates(start_seconds=1e-6, latency_seconds=1e-6, memory_price=1e5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(division, "rates_for", lambda *_: rates)
        yield


def newest(out: Path) -> Path:
    return max(out.glob("step-*"))


def tensors_of(checkpoint: Path) -> dict[str, Tensor]:
    """By name, whatever the files are and however state is divided among them: state is flat."""
    found: dict[str, Tensor] = {}
    pieces: defaultdict[str, dict[int, Tensor]] = defaultdict(dict)
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  it is no mapping
                piece = _PIECE.fullmatch(name) if file.name.startswith("state") else None
                if piece:
                    pieces[piece[1].removeprefix("optimizer/")][int(piece[2])] = tensors.get_tensor(name)
                else:
                    found[name] = tensors.get_tensor(name)
    for name, parts in sorted(pieces.items()):
        found[name] = torch.cat([parts[start].reshape(-1) for start in sorted(parts)])
    return found


# --- What the files hold.


def results() -> dict[str, str]:
    """Of the six jobs, which all plans come to."""
    return {name: str(on_one_device(job)) for name, job in JOBS.items()}


def traffic() -> dict[str, str]:
    """Of all jobs under all plans: bytes, and who holds what."""
    found: dict[str, str] = {}
    for name, job in JOBS.items():
        for plan in PLANS:
            with tempfile.TemporaryDirectory() as out, divided_readily():
                run = trained(job, plan, Path(out))
            found |= {
                f"{name} under {plan}: {what}": value
                for what, value in (("bytes", run.bytes), ("held", run.held))
            }
    return found


def layout_of(checkpoint: Path) -> dict[str, str]:
    """The files, what they hold, and what meta.json says, without checksums and without what belongs to torch's optimizers."""
    found: dict[str, str] = {"files": "\n".join(sorted(path.name for path in checkpoint.iterdir()))}
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            each = {name: tensors.get_tensor(name) for name in sorted(tensors.keys())}
        found[file.name] = "\n".join(
            f"{name} {tensor.dtype} {list(tensor.shape)}" for name, tensor in each.items()
        )
    meta = json.loads((checkpoint / "meta.json").read_text())["checkpoint"]
    meta["files"] = {name: sorted(each) for name, each in meta["files"].items()}
    meta["values"] = {
        name: each if name != "updater" else sorted(each) for name, each in meta["values"].items()
    }
    return found | {f"meta.json, {name}": json.dumps(value, sort_keys=True) for name, value in meta.items()}


def checkpoints() -> dict[str, str]:
    """The layout that a few plans write."""
    found: dict[str, str] = {}
    for plan in ("dp=1", "dp=2,zero=1", "dp=2,tp=2,zero=3"):
        with tempfile.TemporaryDirectory() as out, divided_readily():
            trained(JOBS["frozen"], plan, Path(out))
            found |= {"directory": "\n".join(sorted(path.name for path in Path(out).iterdir()))}
            found |= {f"{plan}: {name}": value for name, value in layout_of(newest(Path(out))).items()}
    return found
