"""What all ranks of a script must have alike is compared in its first steps and now and then, and named where it is not."""

from __future__ import annotations

import hashlib
import pickle
import random
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from meshloom.comm.objects import agree, collect
from meshloom.core.errors import TrainingError
from meshloom.core.modules.compiled import not_compiled
from meshloom.loops.execution import Execution
from meshloom.loops.loop_lines import say
from meshloom.loops.made_parts import check_elementwise
from meshloom.loops.means import mean
from meshloom.loops.part_tensor import PartTensor
from meshloom.loops.ranks import LoopRanks, reached
from meshloom.loops.taken_shares import bound, first_whole, tensors_in
from meshloom.parameters.digest import digest

FIRST_STEPS, EVERY_STEPS, FIRST_CALLS = 3, 50, 3


class Agreement:
    """Of the ranks of a script."""

    def __init__(self, ranks: LoopRanks) -> None:
        self._ranks, self._steps, self._calls, self._evaluations = ranks, 0, 0, 0
        self._team = next(each for each in ranks.plan.mesh.teams() if ranks.own.rank in each)
        self._watched: list[tuple[str, weakref.ref[Execution], weakref.ref[nn.Module]]] = []
        self._concerns: weakref.WeakKeyDictionary[
            torch.optim.Optimizer, list[tuple[str, weakref.ref[Execution]]]
        ] = weakref.WeakKeyDictionary()
        self._hooks = (
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        )

    def watch(self, module: nn.Module, execution: Execution) -> None:
        """What the plan makes of the module's calls."""
        self._watched.append((type(module).__name__, weakref.ref(execution), weakref.ref(module)))

    def called(self, name: str, execution: Execution, inputs: Any) -> None:
        """A module of this class is called in grad mode."""
        self._calls += 1
        if self._calls > FIRST_CALLS:
            return
        given = _given(inputs)
        facts = {"the module that is called": name, "inputs": given, "batches": first_whole()}
        collected, mesh = collect(self._ranks.everyone, facts), self._ranks.plan.mesh
        for rank, theirs in enumerate(collected):
            if theirs.get("the module that is called") != name:
                raise TrainingError(
                    f"Rank {rank} does not call {name} in training here, as others do. Every rank must do the same: `if ml.main:` goes around what prints and writes."
                )
            if any(
                one != other for one, other in zip(theirs["batches"], collected[0]["batches"], strict=False)
            ):
                raise TrainingError(
                    f"Rank {rank} takes its share of another batch than rank 0. The order, a sampler, a stream and what ml.share is given may not depend on the process: "
                    "give generators of the script's own a seed, as in numpy.random.default_rng(0)."
                )
        everyone = [each["inputs"] for each in collected]
        first = {mesh.place(rank).dp: each for rank, each in reversed([*enumerate(everyone)])}
        for rank, theirs in enumerate(everyone):
            if theirs != first[mesh.place(rank).dp]:
                raise _unlike_inputs(name, rank)
        alike = len({str(each) for each in first.values()}) == 1
        if given and mesh.dp > 1 and alike and self._calls == FIRST_CALLS:
            say(
                f"all {mesh.dp} replicas call {name} with the same inputs, and compute the same {mesh.dp} times: ml.loader and ml.share give each its share"
            )
        if self._calls == FIRST_CALLS:  # what no optimizer of torch's updates is compared here alone
            way_out = (
                f"This was seen before call {self._calls} of modules. Change parameters alike on every rank, and update them by .grad, which is the global "
                "batch's after backward(): torch.autograd.grad by parameters is this share's, for which there is ml.mean()."
            )
            agree(self._ranks.everyone, _digests([(name, execution)]), way_out, TrainingError)

    def evaluates(self, name: str, inputs: Any) -> None:
        """A module of this class, which ranks of a replica divide, is called without gradients."""
        self._evaluations += 1
        team = self._ranks.own.team
        if team is None or self._evaluations > FIRST_CALLS:
            return
        everyone = collect(team, _given(inputs))
        if unlike := [place for place, theirs in enumerate(everyone) if theirs != everyone[0]]:
            raise _unlike_inputs(name, self._team[unlike[0]])

    def loads(self, name: str, state: Mapping[str, Any]) -> None:
        """A module of this class loads these entries of a state dict, of which ranks may keep parts."""
        way_out = "Every rank loads the same: leave `if ml.main:` out, and let no name of a file depend on the rank or the time."
        tensors = {
            f"{key}, which {name} loads,": _digest(each)
            for key, each in state.items()
            if isinstance(each, Tensor) and each.layout == torch.strided and not isinstance(each, PartTensor)
        }
        agree(self._ranks.everyone, tensors, way_out, TrainingError)

    @not_compiled
    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        if not (executions := self._concerned(optimizer)):
            return None
        reached()
        self._compare(optimizer, executions)
        # an optimizer with a closure decides by what that returns
        if len(args) > 1 and args[1] is not None:
            return (args[0], _of_the_batch(optimizer, args[1]), *args[2:]), kwargs
        closure = kwargs.get("closure")
        return (args, {**kwargs, "closure": _of_the_batch(optimizer, closure)}) if closure else None

    @not_compiled
    def _after_step(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        for _, each in self._concerned(optimizer):
            each.stepped()

    def _concerned(self, optimizer: torch.optim.Optimizer) -> list[tuple[str, Execution]]:
        """The modules whose parameters it updates. Others may be gone on one rank, and not yet on another."""
        if optimizer not in self._concerns:
            updated = {id(each) for group in optimizer.param_groups for each in group["params"]}
            self._concerns[optimizer] = [
                (name, found)
                for name, found, of in self._watched
                if (module := of()) and any(id(each) in updated for each in module.parameters())
            ]
        return [(name, each) for name, found in self._concerns[optimizer] if (each := found()) is not None]

    def _compare(self, optimizer: torch.optim.Optimizer, executions: list[tuple[str, Execution]]) -> None:
        for _, each in executions:
            each.check_complete()
            for note in each.take_notes():
                say(note)
        step = self._steps
        self._steps += 1
        if step >= FIRST_STEPS and step % EVERY_STEPS:
            return
        # within a call they are the replica's
        generators = {} if any(each.running for _, each in executions) else _generators()
        facts: dict[str, Any] = {
            "the number of steps": step,
            "the number of calls of modules": self._calls,
            "the number of backwards": sum(each.backwards for _, each in executions),
            "the share of the newest call": list(share.sizes) if (share := bound()) else [],
            "the learning rates": [float(group["lr"]) for group in optimizer.param_groups if "lr" in group],
            "the optimizer's state": _progress(optimizer) if self._ranks.plan.pp == 1 else None,
            **{f"the state of {name}'s generator": state for name, state in generators.items()},
            **_digests(executions),
        }  # fmt: skip
        way_out = f"This was seen before step {step} of the script's optimizers. Every rank must do the same: decide by ml.mean(), draw for the whole batch."
        agree(self._ranks.everyone, facts, way_out, TrainingError)


def _given(inputs: Any) -> list[int]:
    return [int(digest(each)) for each in tensors_in(inputs) if each.layout == torch.strided]


def _unlike_inputs(name: str, rank: int) -> TrainingError:
    return TrainingError(
        f"Ranks of one replica call {name} with different inputs: rank {rank} has others than the first of its replica. What the script draws or "
        "reads may not depend on the process (seed random and numpy as torch; ml.loader and ml.share give ranks of a replica the same)."
    )


def _digests(executions: list[tuple[str, Execution]]) -> dict[str, str]:
    """Of the tensors that all ranks have alike."""
    return {f"{kind}.{name}": _digest(each) for kind, one in executions for name, each in one.alike()}


def _digest(tensor: Tensor) -> str:
    return f"values with digest {int(digest(tensor.detach())) % 2**64:016x}"


def _progress(optimizer: torch.optim.Optimizer) -> str:
    """How many parameters have a state, and of how many steps it is."""
    states = [each for each in optimizer.state.values() if isinstance(each, dict)]
    steps = [float(each["step"]) for each in states if "step" in each]
    return f"of {len(optimizer.state)} parameters, after {max(steps, default=0.0):g} steps"


def _of_the_batch(optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
    """The same, with the loss of the global batch in place of that of this replica's share, where it returns one."""

    def of_the_batch() -> Any:
        loss = closure()
        check_elementwise(optimizer)  # the closure's first call may have divided its parameters
        return None if loss is None else mean(loss)

    return of_the_batch


def _generators() -> dict[str, str]:
    """A digest of the state of each generator that scripts draw from."""
    states = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "random": pickle.dumps(random.getstate()),
        "numpy": pickle.dumps(numpy.random.get_state(legacy=True)),
    }
    return {name: hashlib.blake2b(each, digest_size=8).hexdigest() for name, each in states.items()}


_OF: list[Agreement] = []


def agreement_of(ranks: LoopRanks) -> Agreement:
    """Of the ranks of this process's script."""
    if not _OF:
        _OF.append(Agreement(ranks))
    return _OF[0]
