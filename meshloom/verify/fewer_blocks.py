"""A job with fewer of the repeated blocks of its model, for models too large to be verified as they are.

Blocks are modules of one ModuleList or Sequential, one behind another, of equal type, parts and shapes; also groups
of several that take turns. The first ones are kept; their parameters have values of their own, by convention, so that the
whole model is never in memory.

    embed  [ block block block block block block ]  norm  head       --blocks 2
    embed  [ block block ]                          norm  head
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from meshloom.core.errors import JobError
from meshloom.core.job import Job
from meshloom.core.modules.built import built
from meshloom.core.random import model_seed, preserved_draws, seed_everything
from meshloom.parameters.model import all_named
from meshloom.parameters.stand_ins import fill_by_convention
from meshloom.parameters.values.building import NotDescribableError, described

CONTAINERS = (nn.ModuleList, nn.Sequential)
MIN_SHARE = 20  # runs that hold less than one of so many elements of the model stay, unless no run holds more


@dataclass(frozen=True, kw_only=True)
class RepeatedBlocks:
    """A run of equal blocks. path: of their container, "" the model. names: of the container's modules that
    are in blocks; `period` of them make one block. elements: of their parameters."""

    path: str
    names: tuple[str, ...]
    period: int
    elements: int

    @property
    def num_blocks(self) -> int:
        """Blocks of the run."""
        return len(self.names) // self.period

    def but(self, kept: int) -> tuple[str, ...]:
        """The container's modules that are not in the first `kept` blocks."""
        return self.names[kept * self.period :]


@dataclass(frozen=True, kw_only=True)
class FewerBlocks:
    """`job` as given, but that its model has the first `kept` blocks of every run. from_files: whether the job given has values in files. sentence:
    what was done, for the user."""

    job: Job
    kept: int
    runs: Sequence[RepeatedBlocks]
    from_files: bool

    @property
    def sentence(self) -> str:
        """How many blocks of how many, and where."""
        shown = [f"{each.num_blocks} in {each.path or 'the model'}" for each in self.runs[:4]]
        more = f" and {len(self.runs) - 4} more runs" if len(self.runs) > 4 else ""
        files = ", but the values of its files" if self.from_files else ""
        return f"NOT the whole model: of repeated blocks it has only the first {self.kept}, of {', '.join(shown)}{more}; all else is the job's own{files}."

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {"kept": self.kept, "of": {each.path: each.num_blocks for each in self.runs}}


def with_fewer_blocks(job: Job, kept: int) -> FewerBlocks:
    """`job` with the first `kept` of its model's repeated blocks. The blocks left out never get memory, where
    the model can be built without the values of its parameters; values of files are left out.

    Raises `JobError` where there are no more than `kept`.
    """
    if kept < 1:
        raise JobError(f"--blocks {kept} must be 1 or more.")
    model = without_values(job)
    all_runs = find_blocks(model)
    runs = [each for each in all_runs if each.num_blocks > kept]
    if not all_runs:
        raise JobError(
            f"--blocks {kept} takes the first {kept} of repeated blocks, and the model has none: no ModuleList or Sequential in it holds equal modules one "
            "behind another. Verify it without --blocks."
        )
    if not runs:
        most = max(all_runs, key=lambda each: each.num_blocks)
        raise JobError(
            f"--blocks {kept} leaves nothing out: {most.path or 'the model'} has {most.num_blocks} repeated blocks. Use --blocks {most.num_blocks - 1} or "
            "less, or leave it out."
        )
    shorter = replace(job, model=_ShorterModel(job.model, kept), weights=None, weight_names=None)
    return FewerBlocks(job=shorter, kept=kept, runs=runs, from_files=job.weights is not None)


def find_blocks(model: nn.Module) -> list[RepeatedBlocks]:
    """The runs of equal blocks of a model, in its order, that are not within blocks themselves.

    >>> block = lambda: nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    >>> [(run.path, run.num_blocks) for run in find_blocks(nn.ModuleDict({"body": nn.Sequential(*(block() for _ in range(5)))}))]
    [('body', 5)]
    """
    runs = list(_runs_in("", model))
    total = sum(each.numel() for each in model.parameters())
    large = [each for each in runs if each.elements * MIN_SHARE >= total]
    return large or sorted(runs, key=lambda each: -each.elements)[:1]


def cut(model: nn.Module, runs: Sequence[RepeatedBlocks], kept: int) -> nn.Module:
    """`model`, without all but the first `kept` blocks of these runs."""
    for run in runs:
        container = model.get_submodule(run.path)
        modules: dict[str, nn.Module | None] = vars(container)["_modules"]
        for name in run.but(kept):
            del modules[name]
        if isinstance(container, nn.ModuleList):  # it finds its modules by number
            rest = list(modules.values())
            modules.clear()
            modules.update((str(index), each) for index, each in enumerate(rest))
    return model


def without_values(job: Job) -> nn.Module:
    """The job's model, whose parameters have no memory where it can be built so."""
    with preserved_draws():
        seed_everything(model_seed(job.seed))
        return _described(job.model) or built(job.model)


@dataclass(frozen=True)
class _ShorterModel:
    """A job's model function, but that its model has fewer blocks: of the whole model's values where that is built with them,
    else of values by convention."""

    whole: Callable[[], nn.Module]
    kept: int

    def __call__(self) -> nn.Module:
        found = _described(self.whole)
        model = found or built(self.whole)
        runs = [each for each in find_blocks(model) if each.num_blocks > self.kept]
        cut(model, runs, self.kept)
        if found:
            fill_by_convention(found, int(torch.randint(2**62, ())))
        return model


def _described(build: Callable[[], nn.Module]) -> nn.Module | None:
    try:
        return described(lambda: built(build))
    except NotDescribableError:
        return None


def _runs_in(path: str, module: nn.Module) -> Iterator[RepeatedBlocks]:
    """Outermost runs inside `module`."""
    children = {name: child for name, child in vars(module)["_modules"].items() if child is not None}
    run = _longest_run(path, children) if isinstance(module, CONTAINERS) else None
    if run:
        yield run
    for name, child in children.items():
        if (not run or name not in run.names) and not isinstance(child, torch.jit.ScriptModule):
            yield from _runs_in(f"{path}.{name}" if path else name, child)


def _longest_run(path: str, children: Mapping[str, nn.Module]) -> RepeatedBlocks | None:
    """The run with most parameters, of the shortest period; None: there is none."""
    names, kinds = list(children), [_kind(child) for child in children.values()]
    best: RepeatedBlocks | None = None
    for period in range(1, len(kinds) // 2 + 1):
        start = 0
        while start + period < len(kinds):
            end = start + period
            while end < len(kinds) and kinds[end] == kinds[end - period]:
                end += 1
            num_blocks = (end - start) // period
            inside = names[start : start + num_blocks * period]
            elements = sum(each.numel() for name in inside for each in children[name].parameters())
            if num_blocks > 1 and elements and (best is None or elements > best.elements):
                best = RepeatedBlocks(path=path, names=tuple(inside), period=period, elements=elements)
            start = max(start + 1, end - period + 1)
    return best


def _kind(module: nn.Module) -> Any:
    """What equal modules have in common: types and shapes of all parts. Settings such as a layer's index may
    differ."""
    parts = tuple((name, type(each)) for name, each in module.named_modules(remove_duplicate=False))
    return parts, tuple(
        (name, tuple(each.shape), each.dtype, each.requires_grad) for name, each in all_named(module)
    )
