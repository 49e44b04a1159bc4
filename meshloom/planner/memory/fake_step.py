"""A training step on fake tensors: the most bytes that it would allocate at one time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import SparseAdam
from torch.utils._python_dispatch import TorchDispatchMode

from meshloom.core.errors import MeshloomError
from meshloom.core.job import NamedParameters
from meshloom.core.job_functions import as_list, without_averages
from meshloom.optimizer.bfloat16.lowered import has_masters
from meshloom.optimizer.reach import expected_state_bytes, is_known
from meshloom.pipeline.schedules.schedule import Action
from meshloom.pipeline.stages.stages import cut_into_stages
from meshloom.planner.memory.dry_run import DryStages
from meshloom.planner.memory.storages import Storages, bytes_of, most_of
from meshloom.program.cost.cost_fake import (
    fake_buffers,
    fake_constants,
    fake_parameters,
    fake_tensors,
    tensors_in,
)
from meshloom.program.ir.program import Program


class NeedsValuesError(MeshloomError):
    """The job's optimizer needs the values of parameters."""


class FakeStep:
    """Bytes of a step in which the optimizer already has its state. Peaks are without parameters, buffers,
    batch and optimizer state.

    optimizer: the job's function; None: no update is made. microbatches: chunks, one after another. bucketed: a
    gradient is copied into an existing bucket as soon as it is computed. master_gradients: bytes of gradients in the precision of
    masters during an update; masters count as the optimizer's state. guessed: classes of optimizers that are not on the lists
    (`reach.py`), which are not stepped: their state is taken as `OPTIMIZER_FACTOR` times their parameters. peaks, temporaries: phase -> most bytes
    at one time, and how many of them are neither saved activations nor gradients.
    """

    def __init__(
        self,
        program: Program,
        optimizer: Callable[[NamedParameters], Any] | None,
        *,
        microbatches: int = 1,
        bucketed: bool = False,
    ) -> None:
        self._bucketed = bucketed
        self.master_gradients = 0
        self.guessed: list[str] = []
        self.peaks: dict[str, int] = {}
        self.temporaries: dict[str, int] = {}
        stages = cut_into_stages(program, {node.name: 0 for node in program.nodes}, 1)
        actions = [Action(0, kind, number) for number in range(microbatches) for kind in ("F", "B")]
        chunks = DryStages(gradients="leave" if bucketed else "stay").chunks(stages, actions)
        self.kept_bytes, self.gradient_bytes = chunks.kept, chunks.gradients
        for kind, phase in (("F", "forward"), ("B", "backward")):
            self._note(phase, *chunks.peaks[kind])
        with fake_tensors():
            parameters = fake_parameters(program)
            trainable = [(name, each) for name, each in parameters.items() if each.requires_grad]
            self.parameter_bytes = bytes_of(parameters.values())
            # of each, in the model's order
            self.trainable_bytes = [each.nbytes for _, each in trainable]
            self.buffer_bytes = bytes_of(fake_buffers(program).values())
            self.constant_bytes = bytes_of(fake_constants(program).values())
            used = {ref.name for node in program.nodes for ref in node.operands()}
            for name, each in trainable:
                each.grad = torch.empty_like(each) if program.parameters[name].value in used else None
            try:
                self.optimizer_bytes = self._update(optimizer, trainable) if optimizer else 0
            except Exception as error:
                first = (str(error).strip() or "no message").splitlines()[0]
                raise NeedsValuesError(
                    f"the optimizer cannot be made or stepped without values ({type(error).__name__}: {first})"
                ) from error

    def _update(
        self, optimizer: Callable[[NamedParameters], Any], trainable: list[tuple[str, Tensor]]
    ) -> int:
        """Runs two steps, of which the first creates the state. Returns the state's bytes."""
        masters = _masters_of(trainable) if has_masters(optimizer) else {}
        given: Any = [(name, masters.get(name, each)) for name, each in trainable]
        returned, decay = without_averages(optimizer(list(given)))
        made = as_list(returned)
        averages = [torch.empty_like(each) for _, each in trainable] if decay is not None else []
        optimizers = [
            each for each in made if is_known(each) and type(each) is not SparseAdam
        ]  # gradients are dense here
        others = [each for each in made if each not in optimizers]
        self.guessed = [type(each).__name__ for each in others if not is_known(each)]
        gradients = [each.grad for _, each in trainable if each.grad is not None]
        with _Numbers():
            _take_gradients(masters, trainable)
            for each in optimizers:
                each.step()
            states = {
                id(tensor): tensor
                for each in optimizers
                for state in each.state.values()
                for tensor in tensors_in(state)
            }
            states |= {id(each): each for each in (*masters.values(), *averages)}
            self.master_gradients = sum(each.nbytes for each in masters.values() if each.grad is not None)
            for each in masters.values():
                each.grad = None

            def update() -> None:
                _take_gradients(masters, trainable)
                for each in optimizers:
                    each.step()

            standing = [*(each for _, each in trainable), *gradients, *states.values()]
            most, _ = most_of(Storages(standing).followed(update))
        there = 0 if self._bucketed else self.gradient_bytes
        self._note("update", there + most, most)
        return bytes_of(states.values()) + sum(map(expected_state_bytes, others))

    def _note(self, phase: str, peak: int, temporaries: int) -> None:
        if peak >= self.peaks.get(phase, 0):
            self.peaks[phase], self.temporaries[phase] = peak, temporaries


def _masters_of(trainable: Sequence[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {
        name: each.detach().float().requires_grad_()
        for name, each in trainable
        if each.dtype == torch.bfloat16
    }


def _take_gradients(masters: Mapping[str, Tensor], trainable: Sequence[tuple[str, Tensor]]) -> None:
    for name, each in trainable:
        if name in masters and each.grad is not None:
            masters[name].grad = each.grad.to(masters[name].dtype)


class _Numbers(TorchDispatchMode):
    """Fake tensors that are asked for a number (a count of steps) return 2. In-place writes are not
    computed."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 2.0 if args[0].is_floating_point() else 2
        if _is_in_place(func) and args and isinstance(args[0], Tensor):
            return args[0]
        return func(*args, **(kwargs or {}))


@cache
def _is_in_place(func: Any) -> bool:
    """Whether a call writes values into its first operand, gives just that, and changes no shape. An
    optimizer is mostly such calls."""
    schema = func._schema
    own = schema.arguments[0].alias_info if schema.arguments else None
    given = schema.returns[0].alias_info if len(schema.returns) == 1 else None
    changes_shape = torch.Tag.inplace_view in func.tags or schema.name.endswith("resize_")
    others = [each.alias_info for each in schema.arguments[1:]]
    others_stay = not any(each is not None and each.is_write for each in others)
    writes_own = own is not None and own.is_write and given is not None and given.is_write
    return writes_own and others_stay and not changes_shape
