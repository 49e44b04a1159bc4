"""A replica's state between steps: gathered into full tensors, compared, saved and resumed. All ranks call
these functions together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from meshloom.checkpoint.checkpoint import Checkpoint, Piece
from meshloom.checkpoint.format import MASTER, STATE
from meshloom.checkpoint.resuming import Loader, check_together, load_together, open_together
from meshloom.checkpoint.tensor_file import TensorEntry, why_not_held
from meshloom.comm.group import Group
from meshloom.comm.objects import collect
from meshloom.core.errors import CheckpointError, TrainingError
from meshloom.core.losses.loss_scale import LossScale
from meshloom.exchange.diloco import outer_of
from meshloom.exchange.exchange import Emit, Slice
from meshloom.exchange.local_sgd import rounds_of, within_round
from meshloom.exchange.zero_three import ZeroThree, slices_of
from meshloom.optimizer.averages import ParameterAverages
from meshloom.optimizer.masters import sum_of_parts
from meshloom.optimizer.outer_state import OUTER, outer_loader, outer_pieces
from meshloom.optimizer.state_pieces import copy_key
from meshloom.parameters.model import state_of
from meshloom.parameters.pipeline_ownership import held
from meshloom.parameters.replica_check import first_difference
from meshloom.parameters.shards import Shards
from meshloom.program.ir.written_parameters import named_buffers
from meshloom.replica.replica import Gradients, Replica

SCALE = "loss_scale"  # among a checkpoint's values, if the run had one


def settle(replica: Replica) -> None:
    """End a round of local steps, so that all replicas hold the same parameters."""
    if (rounds := within_round(replica.exchange)) is not None:
        rounds.settle()
        replica.updater.parameters_changed()
        replica.engine.refresh_borrowed()


def take_notes(replica: Replica) -> list[str]:
    """Notes about buffers from all ranks of the replica, each once, and what its first one has compiled."""
    mine, team, compiler = replica.scope.take_notes(), replica.context.team, replica.engine.stages.compiler
    if compiler and (team is None or team.rank == 0):
        mine += compiler.take_notes()
    everyone: list[list[str]] = collect(team, mine) if team else [mine]
    return list(dict.fromkeys(note for notes in everyone for note in notes))


def check_consistent(replica: Replica) -> None:
    """Raises `CheckpointError` if the newest step failed while parameters were being updated, or an evaluation while averages
    were in their place."""
    if replica.updating:
        raise CheckpointError(
            "The newest update, or evaluation of averages, failed in the middle, so there is no consistent state to save. Resume from a checkpoint."
        )


def check_saved(model: nn.Module) -> None:
    """Raises `CheckpointError`, before the first step of a run that saves, where a checkpoint cannot hold the model's `state_dict`."""
    if why := why_not_saved(model):
        raise CheckpointError(f"{why}. Or train without out=.")


def why_not_saved(model: nn.Module) -> str:
    """Why a checkpoint cannot hold the model's `state_dict`, in a sentence; "" if it can."""
    for name, each in model.state_dict(keep_vars=True).items():
        if not isinstance(each, Tensor):
            return (
                f"{name} is of type {type(each).__name__}, and a checkpoint holds tensors only. Let get_extra_state() and set_extra_state() of its module "
                "use a tensor, torch.frombuffer of its bytes say, or a buffer"
            )
        if why := why_not_held(name, each.dtype):
            return why
    return ""


def held_weights(replica: Replica) -> list[Piece]:
    """What this rank holds of the model's `state_dict` and saves: parameters that several ranks hold on each
    of them, slices where it holds no more, buffers on one. Raises `CheckpointError` as
    `check_consistent` does, and for what is no tensor."""
    check_consistent(replica)
    model, shards, holders = replica.model, replica.shards, replica.engine.holders
    state = model.state_dict(keep_vars=True)
    # of tied tensors one name is known
    owners = {id(each): holders[name][0] for name, each in state.items() if holders and name in holders}
    buffers = {name for name, _ in named_buffers(model, remove_duplicate=False)}
    built = {id(each) for each in (*model.parameters(), *model.buffers())} if owners else set[int]()
    sliced = slices_of(replica.exchange)
    slices: dict[int, list[Slice]] = {}
    for each in sliced.each_slice() if sliced is not None else ():
        slices.setdefault(id(each.parameter), []).append(each)
    found: list[Piece] = []
    for name, tensor in state.items():
        TensorEntry.of(name, tensor)
        shape, divided = shards.whole_shape(name, tensor), name in shards.pieces
        block = shards.pieces[name].held[shards.rank] if divided else None
        if sliced is not None and tensor.numel() and sliced.keeps(tensor):
            mine = slices.get(id(tensor), [])
            found += [Piece(name, each.data(), each.start, each.stop, shape, block) for each in mine]
            continue
        if tensor.is_meta:
            continue
        # what a hook of `state_dict` has made belongs to no stage
        owner = owners[id(tensor)] if id(tensor) in built else 0
        if replica.stage_group and owner != replica.stage_group.rank:
            continue
        if name in buffers and (replica.replicas.rank or (shards.rank and not divided)):
            continue
        found.append(Piece(name, tensor.detach().reshape(-1), 0, tensor.numel(), shape, block))
    return found


def updated_weights(replica: Replica) -> frozenset[str]:
    """Names in the model's `state_dict` of the trained parameters that nothing but an update can change: forwards do not
    see what this rank holds of them (zero=3), or run nothing of the user's that writes, or must not write to the one copy
    that replicas have of them."""
    sliced, state = slices_of(replica.exchange), replica.model.state_dict(keep_vars=True)
    hidden = {name for name, each in state.items() if sliced is not None and sliced.keeps(each)}
    if replica.engine.stages.runs_modules and replica.exchange.ownership.memory != "shared":
        return frozenset(hidden)
    trained = {id(each) for _, each in replica.named}
    return frozenset({name for name, each in state.items() if id(each) in trained} | hidden)


def run_state(replica: Replica) -> tuple[list[Piece], dict[str, Any]]:
    """What a checkpoint holds beside weights: this rank's pieces, and values. Replicas that take independent local steps are
    averaged first: parameters by ending the round, optimizer state by its mean."""
    settle(replica)
    if replica.exchange.ownership.independent:
        replica.updater.state.average(replica.replicas, replica.context.readers)
    pieces, values = replica.updater.state.save()
    if (outer := outer_of(replica.exchange)) is not None:
        pieces += outer_pieces(outer.momentum, replica.shards)
    scale = replica.sums.scale
    return pieces, {"updater": values, **({} if scale is None else {SCALE: scale.to_dict()})}


def resume(replica: Replica, directory: Path, check: Callable[[Checkpoint], None]) -> Checkpoint:
    """Load the checkpoint in `directory`, unless `check` raises on some rank: each rank its slices, or what
    rank 0 reads for all.

    Bytes that are sent go over the world's own group and are not counted as the plan's.
    """
    world = replica.context.world
    checkpoint = open_together(directory, world)
    _shape_empty_buffers(replica.model, checkpoint)
    check_together(world, lambda: check(checkpoint))
    found: list[Loader] = []
    check_together(world, lambda: found.append(loader_of(replica, checkpoint)))
    wanted = (STATE, OUTER) if outer_of(replica.exchange) is not None else STATE
    load_together(
        checkpoint,
        [key for key in checkpoint.keys() if key.startswith(wanted)],  # noqa: SIM118
        found[0],
        world,
        lambda done, of: replica.timings.counted(done, of),
    )
    return checkpoint


def _shape_empty_buffers(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Give buffers without elements, which get their shape in the first step, that of the checkpoint."""
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            shape = checkpoint.whole_shape(f"{path}.{name}" if path else name)
            if shape is not None and not buffer.numel() and shape != tuple(buffer.shape):
                module._buffers[name] = buffer.new_zeros(shape)  # pyright: ignore[reportPrivateUsage]


def each_of_state(replica: Replica, take: Callable[[str, Tensor], None]) -> None:
    """Gather every parameter and buffer, tied ones once; `take` receives the full tensors one after another
    on the replica's first rank. Of parameters that are updated as copies in another precision, those."""

    masters = replica.masters
    copied = masters.parts if masters else {}

    def mine(emit: Emit) -> None:
        for name, tensor in replicated_state(replica).items():
            if name not in copied:
                emit(name, tensor.detach())
        if (sliced := slices_of(replica.exchange)) is not None:
            sliced.each_parameter(emit, lambda name: name not in copied)
        if masters:
            masters.each(emit)

    parts: dict[str, list[Tensor]] = {}

    def put_together(name: str, tensor: Tensor) -> None:
        if name not in copied:
            take(name, tensor)
            return
        parts.setdefault(name, []).append(tensor)
        if len(parts[name]) == copied[name]:
            take(name, sum_of_parts(parts.pop(name)))

    replica.engine.gather(mine, cast(Any, put_together))


def each_average(replica: Replica, take: Callable[[str, Tensor], None]) -> None:
    """As `each_of_state`, with the averages of parameters that the job keeps in their place, once there are any. Where replicas have one
    copy of the parameters, no rank puts values there while another reads."""
    averages = replica.updater.state.averages
    if averages and averages.started:
        put_back = show_averages(replica, averages)
        each_of_state(replica, take)
        _all_have_read(replica)
        put_back()
        averages.publish()


def show_averages(replica: Replica, averages: ParameterAverages) -> Callable[[], None]:
    """`ParameterAverages.show`, once no rank reads any more what the owners put them in place of."""
    _all_have_read(replica)
    return averages.show()


def _all_have_read(replica: Replica) -> None:
    """Returns when none of those that share this rank's one copy of its parameters reads it any more. Another stage's may have a copy each."""
    if replica.exchange.ownership.memory == "shared":
        replica.replicas.barrier().wait()


def replicated_state(replica: Replica) -> dict[str, Tensor]:
    """The parameters and buffers of which every replica has a copy on this rank, tied ones once."""
    sliced = replica.exchange.ownership.memory == "sliced"
    return held(dict(named_buffers(replica.model)).items() if sliced else state_of(replica.model).items())


def full_state(replica: Replica) -> dict[str, Tensor]:
    """All of them by name, in the model's order."""
    full: dict[str, Tensor] = {}
    each_of_state(replica, full.__setitem__)
    return {name: full[name] for name in state_of(replica.model) if name in full}


def each_gradient(replica: Replica, found: Gradients, take: Callable[[str, Tensor | None], None]) -> None:
    """Gather the averaged gradient of every trainable parameter; `take` receives the full tensors one after
    another on the replica's first rank."""

    rounds = rounds_of(replica.exchange)

    def mine(emit: Emit) -> None:
        replica.exchange.gather(found.of_owned, rounds.mean(emit) if rounds is not None else emit)

    replica.engine.gather(mine, take)


def full_gradients(replica: Replica, found: Gradients) -> dict[str, Tensor | None]:
    """All of them by name, in the model's order."""
    full: dict[str, Tensor | None] = {}
    each_gradient(replica, found, full.__setitem__)
    return {name: full[name] for name in state_of(replica.model) if name in full}


def check_identical(replica: Replica, step: int) -> None:
    """Raise `TrainingError` naming the first parameter or buffer that differs between replicas."""
    found = first_difference(replicated_state(replica), replica.replicas)
    names = range(replica.plan.dp)
    equals, here = equal_slices(replica)
    if found is None and equals is not None:
        found = first_difference(here, equals)
        names = names[replica.context.place.dp % replica.plan.mesh.num_slices :: replica.plan.mesh.num_slices]
    if found is not None:
        name, number = found
        raise TrainingError(
            f"After step {step}, {name} differs between replicas dp={names[0]} and dp={names[number]}: something in the model or optimizer "
            "is not deterministic or not part of the exchange (a parameter changed outside the optimizer, a buffer written by one rank)."
        )


def equal_slices(replica: Replica) -> tuple[Group | None, dict[str, Tensor]]:
    """The slices of parameters that other replicas keep as well, and these (zero_within)."""
    exchange = slices_of(replica.exchange)
    if exchange is None or exchange.equals is None:
        return None, {}
    return exchange.equals, {each.name: each.data() for each in exchange.each_slice()}


def check_team(replica: Replica, step: int) -> None:
    """Raise `TrainingError` naming the first parameter or buffer that differs between ranks of the replica
    that hold it unsharded."""
    wrong = replica.engine.check_replicated()
    if wrong is not None:
        raise TrainingError(
            f"After step {step}, {wrong}: something in the model or optimizer is not deterministic."
        )


def loader_of(replica: Replica, checkpoint: Checkpoint) -> Loader:
    """What puts the checkpoint's tensors where this rank holds them, and restores its values."""
    take, finish_updater = replica.updater.state.loading(checkpoint.values["updater"])
    momentum: dict[str, Tensor] = {}
    keys = set(checkpoint.keys())
    take_outer = outer_loader(replica.named, replica.shards, momentum)

    def state(key: str, shape: Sequence[int], read: Callable[[int, int], Tensor]) -> None:
        take(key, shape, lambda _, start, stop: read(start, stop))
        if key.startswith(OUTER):
            take_outer(key, read(0, math.prod(shape)).view(tuple(shape)))

    def finish() -> None:
        finish_updater()
        if (masters := replica.masters) is not None:
            masters.take_parameters({name for name in masters.parts if copy_key(name, MASTER) not in keys})
        if (outer := outer_of(replica.exchange)) is not None:
            outer.momentum = momentum if len(momentum) == len(replica.named) else {}
        if replica.sums.scale is not None and SCALE in checkpoint.values:
            replica.sums.scale = LossScale.from_dict(checkpoint.values[SCALE])

    weight = replica.shards.weights_loader(replica.model)
    if (sliced := slices_of(replica.exchange)) is not None:
        weight = _loader_of_slices(replica.model, sliced, replica.shards)
    return Loader(weight=weight, state=state, finish=finish)


def _loader_of_slices(model: nn.Module, exchange: ZeroThree, shards: Shards) -> Callable[[str, Tensor], None]:
    state = {
        name: each for name, each in model.state_dict(keep_vars=True).items() if isinstance(each, Tensor)
    }

    def take(name: str, whole: Tensor) -> None:
        with torch.no_grad():
            if name not in state or state[name].is_meta:
                return
            mine = shards.take(name, whole)
            if not exchange.keep(state[name], mine):
                state[name].copy_(mine)

    return take
