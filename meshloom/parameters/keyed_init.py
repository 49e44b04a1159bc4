"""Initial values whose random draws are keyed by the names of tensors, for `Job(init="keyed")`: any tensor is drawn
without the others, and one device has the same values.

    blocks.3.up.weight   its draws 0, 1, ...   seeds (job's seed, "blocks.3.up.weight", 0), (..., 1), ...
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack  # pyright: ignore[reportPrivateUsage]

from meshloom.core.errors import JobError
from meshloom.core.job import Job
from meshloom.core.modules.built import built
from meshloom.core.random import derive, model_seed, seed_torch
from meshloom.parameters.construction.draw_stream import SeededDraws
from meshloom.parameters.construction.recording import RecordedTensors, record
from meshloom.parameters.construction.replay import Replay
from meshloom.parameters.construction.tape import NotRecordableError, Place, Tape
from meshloom.parameters.initial_values import HeldTensor, Recorded


def call_model(job: Job) -> nn.Module:
    """What the job's model function returns, with the values that `job.init` asks for. Where its construction is
    being recorded or has no values, those are up to whoever does that.

    Raises `JobError` for a construction whose draws cannot be keyed.
    """
    if job.init != "keyed" or _get_current_dispatch_mode_stack():
        return built(job.model)
    try:
        model, recorded = record(lambda: built(job.model))
    except NotRecordableError as error:
        raise _cannot_be_keyed(f"cannot be recorded ({error})") from error
    tensors = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    for name, place in recorded.places.items():
        storage = tensors[name].untyped_storage()
        if not storage.nbytes():
            storage.resize_(recorded.tape.num_bytes[place.storage])
    keyed_values(recorded, job.seed).fill(
        [
            HeldTensor(names=(name,), shape=place.size, tensor=tensors[name].detach())
            for name, place in recorded.places.items()
        ]
    )
    seed_torch(model_seed(job.seed))
    return model


def keyed_values(recorded: RecordedTensors, seed: int) -> Recorded:
    """The values of a recorded model under `Job(init="keyed")`."""
    if recorded.draws_read:
        raise _cannot_be_keyed("reads values that it has drawn, which would be others")
    names = _names_of_draws(recorded.tape, recorded.places)
    seeds = [derive(seed, "init", *names.get(draw, ("", draw))) for draw in range(len(recorded.tape.draws))]
    return Recorded(recorded, Replay(recorded.tape, SeededDraws(seeds.__getitem__)))


def _cannot_be_keyed(why: str) -> JobError:
    return JobError(
        f'Job(init="keyed") draws each tensor of the model from a seed of its own, and the model function {why}. Leave init out: values are then drawn one '
        "after another, as the function does."
    )


def _names_of_draws(tape: Tape, places: Mapping[str, Place]) -> dict[int, tuple[str, int]]:
    """Draw -> the name of the first tensor that it fills or, where it fills none, on whose value it has an effect,
    and how many draws of that tensor come before it."""
    owners: dict[int, str] = {}  # storage -> name
    for name, place in places.items():
        for storage in _with_sources(tape, place.storage):
            owners.setdefault(storage, name)
    filled = {
        draw: next((owners[each] for each in tape.operators[index].writes if each in owners), None)
        for draw, index in enumerate(tape.draws)
    }
    others = {tape.draws[draw]: draw for draw, name in filled.items() if name is None}
    for name, place in places.items() if others else ():
        for index in others.keys() & set(tape.needed([place.storage])):
            filled[others.pop(index)] = name
    counted: Counter[str] = Counter()
    found: dict[int, tuple[str, int]] = {}
    for draw, name in filled.items():
        if name is not None:
            found[draw] = name, counted[name]
            counted[name] += 1
    return found


def _with_sources(tape: Tape, storage: int) -> list[int]:
    """A storage, and those that it is a copy of, in another dtype perhaps."""
    found = [storage]
    while len(writers := tape.needed([found[-1]])) and (operator := tape.operators[writers[-1]]).reads:
        schema = getattr(operator.function, "_schema", None)
        is_copy = schema is not None and schema.name.partition("::")[2] in ("_to_copy", "clone", "copy_")
        if not is_copy or len(operator.reads) != 1 or operator.reads[0] in found:
            break
        found.append(operator.reads[0])
    return found
