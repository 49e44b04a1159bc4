"""Parameters and buffers that start from a job's files: their names in the files, found before anything is
built on them, and their values, of which a rank reads those that it holds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor, nn

from meshloom.checkpoint.file_identity import FileIdentity
from meshloom.checkpoint.mapped_tensors import MappedTensors
from meshloom.checkpoint.resuming import check_together
from meshloom.checkpoint.weights import open_weights
from meshloom.comm.group import Group
from meshloom.comm.objects import agree
from meshloom.comm.rank_context import RankContext
from meshloom.core.errors import JobError, WeightsError
from meshloom.core.job import Job
from meshloom.core.random import model_seed, seed_torch
from meshloom.core.units import format_bytes, format_count
from meshloom.parameters.model import build_model, copy_from_first, state_of
from meshloom.parameters.shards import Shards
from meshloom.parameters.values.initial_values import HeldTensor, InitialValues
from meshloom.parameters.weight_differences import WeightDifferences, short
from meshloom.telemetry.traffic import Traffic

FileName = Callable[[str], str | None]  # name in the model -> name in the files; None: none


@dataclass(frozen=True, kw_only=True)
class FileWeights:
    """The weights of a job in files, matched with its model.

    path: as the job gives it. identities: of the files, as they were compared with the model. sources: name
        of a parameter or buffer, all names of a tied one -> its names in the files.
    """

    path: Path
    files: MappedTensors
    identities: Sequence[FileIdentity]
    sources: Mapping[str, tuple[str, ...]]
    notes: Sequence[str]

    def fill(self, model: nn.Module, shards: Shards | None = None) -> None:
        """Give what this rank holds of `model` its values, converted to the dtypes of the model. What is on
        the meta device is not read.

        shards: this rank's; None: it holds full tensors. Raises `WeightsError` if a file has changed, or has
        two values for a tied tensor.
        """
        state = {name: each for name, each in state_of(model).items() if name in self.sources}
        pieces = shards.pieces if shards else {}
        self.give(
            HeldTensor(
                name=name, tensor=each.detach(), pieces=pieces.get(name), rank=shards.rank if shards else 0
            )
            for name, each in state.items()
            if not each.is_meta
        )  # fmt: skip

    def give(self, held: Iterable[HeldTensor]) -> None:
        """Give tensors that are in the files their values. Raises `WeightsError` as `fill` does."""
        self._check_unchanged()
        for each in held:
            first, *others = self.sources[each.name]
            each.take(self.files.tensor(first))
            for other in others:
                if not torch.equal(each.tensor, each.of(self.files.tensor(other)).to(each.tensor)):
                    raise WeightsError(
                        f"{first} and {other} differ in {self.path}, and are one tensor of the model, {each.name}. "
                        f"To take {first}, let Job(weight_names=...) give None for {other}."
                    )
        self._check_unchanged()

    def _check_unchanged(self) -> None:
        for each in self.identities:
            each.check_unchanged()


class FromFiles(InitialValues):
    """Values in the files `weights`; of tensors that are not there, those of `others`."""

    def __init__(self, weights: FileWeights, others: InitialValues) -> None:
        self._weights, self._others = weights, others

    def fill(self, held: Sequence[HeldTensor]) -> None:
        self._weights.give(each for each in held if each.name in self._weights.sources)
        self._others.fill([each for each in held if each.name not in self._weights.sources])

    @property
    def is_built(self) -> bool:
        return self._others.is_built


def match_weights(job: Job, model: nn.Module) -> FileWeights | None:
    """The files of `job.weights`, compared with its full model; None if it has none.

    Raises `WeightsError` with all differences.
    """
    if job.weights is None:
        return None
    path = _path(job.weights)
    files = open_weights(path)
    identities = [FileIdentity.of(file) for file in files.files]
    file_name = _file_name(job)
    tied = _tied_names(model)
    differences = WeightDifferences(path, files.entries)
    sources: dict[str, tuple[str, ...]] = {}
    kept: list[str] = []
    converted: list[str] = []
    for names, tensor in tied:
        mapped = {name: file_name(name) for name in names}
        found = tuple(dict.fromkeys(each for each in mapped.values() if each in files.entries))
        if all(each is None for each in mapped.values()):
            kept.append(names[0])
        elif not found:
            differences.missing(mapped, tensor)
        for each in found:
            if differences.fits(names[0], tensor, each, files.entries[each]):
                sources |= dict.fromkeys(names, found)
                if files.entries[each].dtype != tensor.dtype:
                    converted.append(
                        f"{names[0]} from {short(files.entries[each].dtype)} to {short(tensor.dtype)}"
                    )
        differences.used.update(found)
    differences.superfluous(_unused_on_purpose(job, model, file_name, files.entries, tied))
    if isinstance(job.weight_names, Mapping):
        known = (
            {name for names, _ in tied for name in names}
            | dict(model.named_buffers()).keys()
            | files.entries.keys()
        )
        differences.unknown([name for name in job.weight_names if name not in known])
    differences.check()
    taken = [tensor.nbytes for names, tensor in tied if names[0] in sources]
    notes = [
        f"Parameters and buffers start from {path}: {format_count(len(taken), 'tensor')}, {format_bytes(sum(taken))}."
    ]
    notes += _some(converted, "are converted to the model's dtype")
    notes += _some(kept, "keep the values that the model function gave them (weight_names)")
    return FileWeights(path=path, files=files, identities=identities, sources=sources, notes=notes)


def agree_on_weights(job: Job, model: nn.Module, group: Group) -> FileWeights | None:
    """`match_weights` on all ranks, which raise the same error. Raises `WeightsError` if their files
    differ."""
    found: list[FileWeights | None] = []
    check_together(group, lambda: found.append(match_weights(job, model)))
    agree(
        group,
        _facts(found[0].identities) if found[0] else {},
        "Give every host the same files.",
        WeightsError,
    )
    return found[0]


def copy_from_first_rank(model: nn.Module, context: RankContext, weights: FileWeights | None) -> Traffic:
    """Sets all ranks' parameters and buffers to those of rank 0, except those that are in files. Returns the bytes copied."""
    skip = weights.sources if weights else {}
    num_bytes = sum(each.nbytes for name, each in state_of(model).items() if name not in skip)
    copied = Traffic()
    for axis in ("tp", "dp", "pp"):
        group = context.groups.get(axis)
        if group is not None and group.size > 1:
            copy_from_first(model, group, skip)
            copied += Traffic.along(axis, broadcast=num_bytes)
    return copied


def file_facts(job: Job) -> dict[str, str]:
    """What must be equal on all ranks of `job`'s files."""
    if job.weights is None:
        return {}
    return _facts([FileIdentity.of(file) for file in open_weights(_path(job.weights)).files])


def build_filled_model(job: Job, device: torch.device, dtype: torch.dtype | None) -> nn.Module:
    """The job's full model, as `build_model` builds it, with the values of the job's files if it has some."""
    model = build_model(job, device, dtype)
    fill_from_files(job, model)
    return model


def fill_from_files(job: Job, model: nn.Module) -> FileWeights | None:
    """Gives a full model the values of the job's files, if it has some."""
    weights = match_weights(job, model)
    if weights is not None:
        weights.fill(model)
        seed_torch(model_seed(job.seed))
    return weights


def _path(weights: str | PathLike[str]) -> Path:
    return Path(weights).expanduser()


def _facts(identities: Sequence[FileIdentity]) -> dict[str, str]:
    return {f"file {each.path.name} of weights": each.text for each in identities}


def _tied_names(model: nn.Module) -> list[tuple[list[str], Tensor]]:
    """The parameters and persistent buffers, each with all its names."""
    tied: dict[int, tuple[list[str], Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            tied.setdefault(id(tensor), ([], tensor))[0].append(name)
    return list(tied.values())


def _file_name(job: Job) -> FileName:
    names = job.weight_names
    if names is None:
        return lambda name: name
    if isinstance(names, Mapping):
        return lambda name: names.get(name, name)

    def called(name: str) -> str | None:
        found = names(name)
        if found is not None and not isinstance(found, str):
            raise JobError(
                f"Job(weight_names=...) returned a {type(found).__name__} for {name}. Return its name in the files, or None if it is not there."
            )
        return found

    return called


def _unused_on_purpose(
    job: Job,
    model: nn.Module,
    file_name: FileName,
    stored: Collection[str],
    tied: list[tuple[list[str], Tensor]],
) -> set[str]:
    """Tensors of the files that the model does not take: buffers that are not persistent, and those for which
    `weight_names` gives None."""
    in_model = {name for names, _ in tied for name in names}
    others = [name for name, _ in model.named_buffers(remove_duplicate=False) if name not in in_model]
    unused = {each for each in map(file_name, others) if each is not None}
    for name in stored if job.weight_names is not None else ():
        try:
            if file_name(name) is None:
                unused.add(name)
        except LookupError:  # of a function that knows the model's names only
            continue
    return unused


def _some(names: list[str], what: str) -> list[str]:
    return [f"{format_count(len(names), 'tensor')} {what}: first {names[0]}."] if names else []
