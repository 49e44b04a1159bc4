"""Loops over `zip` of several data loaders: what was watched, as of one loader that gives a batch of each."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from meshloom.adopt.data.zipped_loader import ZippedLoader
from meshloom.adopt.watching.route import WayToBackward
from meshloom.adopt.watching.source import calls, method
from meshloom.adopt.watching.watch import Watched


@dataclass(frozen=True)
class Zipped:
    """loaders: in the order of the call. cycled: places of those that begin anew."""

    loaders: list[Any]
    cycled: list[int]

    def text(self, names: list[str]) -> str:
        """The one loader in the job. names: expressions of these."""
        cycled = f", cycled={self.cycled}" if self.cycled else ""
        return f"ZippedLoader({', '.join(names)}{cycled})"


def with_zipped_loader(watched: Watched, route: WayToBackward) -> Watched:
    """As it is where the loop is over something else, or where the batches of the steps differ in size."""
    values: dict[str, Any] = {}
    for frame in watched.frames:
        values |= frame.globals | frame.values
    found = next(iter(_zipped(route, values)), None)
    if found is None:
        return watched
    steps = []
    for step in watched.steps:
        batches = [[each.read[one][0] if one in each.read else [] for one in found.loaders] for each in step]
        if any([len(own) for own in each] != [one.batch_size for one in found.loaders] for each in batches):
            return watched
        steps.append([replace(each, samples=ZippedLoader.together(own)) for each, own in zip(step, batches, strict=True)])  # fmt: skip
    return replace(
        watched, steps=steps, loader=ZippedLoader(*found.loaders, cycled=found.cycled), zipped=found
    )


def _zipped(route: WayToBackward, values: Mapping[str, Any]) -> Iterator[Zipped]:
    for loop in reversed(route.loops):
        for call in calls(loop.node.iter) if isinstance(loop.node, ast.For) else ():
            if method(call) != "zip":
                continue
            inner = [each.args[0] if isinstance(each, ast.Call) and method(each) == "cycle" and each.args else each for each in call.args]  # fmt: skip
            loaders = [values.get(each.id) if isinstance(each, ast.Name) else None for each in inner]
            cycled = [place for place, each in enumerate(inner) if each is not call.args[place]]
            if len(loaders) > 1 and len(cycled) < len(loaders) and all(map(_gives_full_batches, loaders)):
                yield Zipped(loaders, cycled)


def _gives_full_batches(loader: Any) -> bool:
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and loader.batch_size is not None
        and type(loader.sampler) in (RandomSampler, SequentialSampler)
    )
