"""The one optimizer path: clip what this rank owns, step the user's optimizers on it, step their schedulers.

The user's function gets named parameters of full shape, so that groups by name or ndim mean what they mean on
one device. Where several ranks own slices (along dp) or hold parts (along tp), only `group["params"]` changes
afterwards: to slices of parts for an optimizer that updates each element by itself, to whole parameters
divided among the ranks for one that looks at a whole parameter (`elementwise.py` finds out which). The
optimizer objects stay, because schedulers hold them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from meshloom.checkpoint.checkpoint import Piece
from meshloom.checkpoint.json_values import from_json
from meshloom.checkpoint.tensor_file import Stream
from meshloom.comm.group import Group
from meshloom.comm.steps import Steps
from meshloom.core.errors import CheckpointError, JobError
from meshloom.core.job import Job, NamedParameters
from meshloom.core.mesh import Axis
from meshloom.exchange.exchange import Ownership
from meshloom.optimizer.average_state import average_state
from meshloom.optimizer.clipping import clip
from meshloom.optimizer.elementwise import Reach
from meshloom.optimizer.state import (
    OwnedSlice,
    Read,
    StatePart,
    load_settings,
    settings,
    state_loader,
    state_pieces,
)
from meshloom.optimizer.user_optimizer import Made, make_optimizers, make_schedulers, scheduler_values
from meshloom.optimizer.whole import WholeParameters, divide
from meshloom.optimizer.whole_from_parts import GatheredParameter, WholeFromParts
from meshloom.optimizer.whole_state import whole_pieces
from meshloom.parameters.shards import Shards
from meshloom.telemetry.traffic import ExpectedBytes, Traffic


class Updater:
    """Updates what this rank owns, once a step.

    named_parameters: every trainable parameter by name, each once, whole. A parameter that the user's
    function gives to no optimizer is not updated. `job.elementwise` overrides the trial: True updates slices,
    False whole parameters; None finds out.
    shards, parts: where parameters are divided over tp, how, and what the model holds of them now under the
    same names; `exchange` is over these. stages: the ranks along pp, each of which updates other parameters:
    those in `parts`.
    made: what the job's optimizer function has made of the named parameters, if it was called already.
    Parameters that every rank of tp holds whole are updated by each of them, from gradients with the same
    bits.
    Raises `JobError` for optimizers or schedulers that cannot be used.
    """

    def __init__(
        self,
        job: Job,
        named_parameters: NamedParameters,
        exchange: Ownership,
        shards: Shards | None = None,
        parts: NamedParameters | None = None,
        stages: Group | None = None,
        made: Made | None = None,
    ) -> None:
        self._job = job
        self._stages = stages
        self._here = {name for name, _ in parts} if parts is not None and stages is not None else None
        self._exchange = exchange
        self._shards = shards or Shards({}, None)
        self._device = named_parameters[0][1].device
        names = {id(parameter): name for name, parameter in named_parameters}
        made = made or make_optimizers(job, named_parameters)
        self._optimizers = made.optimizers
        divided = exchange.owners is not None or bool(self._shards.pieces) or stages is not None
        reaches: list[Reach] = made.reaches if divided else ["element"] * len(self._optimizers)
        if stages is not None and "optimizer" in reaches:
            kind = type(self._optimizers[reaches.index("optimizer")]).__name__
            raise JobError(
                f"{kind} looks at all parameters at once, and with pp={stages.size} no rank has them all. Use pp=1, an optimizer that updates each "
                "parameter by itself, or Job(elementwise=True) if it does."
            )
        self._schedulers = make_schedulers(job, made.returned)
        self._held: list[list[OwnedSlice]] = []  # by optimizer
        # whose .grad an owned slice's gradient becomes
        self._targets: list[nn.Parameter | None] = [None] * len(exchange.owned)
        # whole parameters that this rank updates although it owns only slices or parts
        self._kept: list[nn.Parameter] = []
        self._whole: WholeParameters | None = None
        self._from_parts: WholeFromParts | None = None
        self._saved = Traffic()  # for the state in checkpoints so far
        self._counted = (
            self._spoken_for() if self._shards.size > 1 and job.clip_grad_norm is not None else None
        )
        if not divided:
            self._targets = [slice_.parameter for slice_ in exchange.owned]
            held = lambda parameter: OwnedSlice(  # noqa: E731
                names[id(parameter)], parameter, 0, parameter.numel(), tuple(parameter.shape)
            )
            self._held = [
                [held(parameter) for group in each.param_groups for parameter in group["params"]]
                for each in self._optimizers
            ]
        else:
            self._divide(names, dict(named_parameters if parts is None else parts), reaches)

    def update(
        self, gradients: Sequence[Tensor | None], loss: float, *, rate: float = 1.0
    ) -> Steps[float | None]:
        """Clip and step; the gradient's norm before clipping, None if the job does not clip.

        gradients: what `Exchange.finish` returned: of each owned slice, flat; None was not used. Clipping
            scales them in place.
        loss: mean over the global batch, for schedulers that look at it. rate: what the learning rates are
            multiplied by in this update.
        """
        norm = None
        if self._job.clip_grad_norm is not None:
            holders = [
                group
                for group in (self._shards.group if self._counted is not None else None, self._stages)
                if group is not None
            ]
            norm = yield from clip(
                gradients,
                self._job.clip_grad_norm,
                self._exchange.owners,
                self._device,
                holders=holders,
                counted=self._counted,
            )
        before = [(target, target.grad) for target in (*self._targets, *self._kept) if target is not None]
        for target, gradient in zip(self._targets, gradients, strict=True):
            if target is not None:
                target.grad = (
                    gradient
                    if gradient is None or gradient.layout != torch.strided
                    else gradient.view(target.shape)
                )
        if self._whole:
            yield from self._whole.fetch(gradients)
        if self._from_parts:
            yield from self._from_parts.fetch()
        for optimizer in self._optimizers:
            with _scaled(optimizer, rate):
                optimizer.step()
        for target, gradient in before:
            target.grad = gradient  # it is the exchange's
        if self._from_parts:
            yield from self._from_parts.give_back()
        if self._whole:
            yield from self._whole.give_back()
        for scheduler in self._schedulers:
            scheduler.step(loss) if isinstance(scheduler, ReduceLROnPlateau) else scheduler.step()
        return norm

    def forget(self) -> None:
        """Parameters have new values that no update made."""
        if self._from_parts:
            self._from_parts.forget()

    def average_state(self, group: Group, talk: Group) -> Steps[None]:
        """Replicas that have taken independent steps get the same state. Arguments: of `average_state`."""
        for optimizer, held in zip(self._optimizers, self._held, strict=True):
            self._saved += yield from average_state(optimizer, held, group, talk)

    def learning_rates(self) -> list[float]:
        """Of every group of every optimizer that has one."""
        return [
            float(group["lr"])
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            if "lr" in group
        ]

    def notes(self) -> list[str]:
        """What the user should know of how schedulers are stepped, before the first step."""
        looking = [scheduler for scheduler in self._schedulers if isinstance(scheduler, ReduceLROnPlateau)]
        return [
            f"ReduceLROnPlateau is stepped after every step, with that step's training loss: patience={scheduler.patience} are steps, not epochs or "
            "evaluations. Choose its patience and threshold for that, or a scheduler that goes by steps alone."
            for scheduler in looking[:1]
        ]

    def expected_bytes(self) -> ExpectedBytes:
        """Bytes that this rank hands over: in a step for the norm and for whole parameters, so far for saved
        state."""
        expected = ExpectedBytes(so_far=self._saved)
        divided: dict[Axis, Any] = {"dp": self._exchange.owners, "tp": self._counted, "pp": self._stages}
        for axis, over in divided.items():
            if over is not None and self._job.clip_grad_norm is not None:
                expected += ExpectedBytes(per_step=Traffic.along(axis, all_reduce=8))
        for through in (self._whole, self._from_parts):
            if through:
                expected += through.expected_bytes()
        return expected

    def state(
        self, world: Group, *, by_itself: bool = False
    ) -> Steps[tuple[list[Piece], list[Stream], dict[str, Any]]]:
        """This rank's pieces of the state's tensors, where those come from that are divided over tp, and JSON
        values that are equal on all ranks.

        by_itself: with all that it needs to load them again.

        Every rank of `world` calls it; with tp=1 nothing is sent.
        """
        pieces: list[Piece] = []
        streams: list[Stream] = []
        parts: list[StatePart] = []
        for optimizer, held in zip(self._optimizers, self._held, strict=True):
            ready, divided = state_pieces(optimizer, held, by_itself=by_itself)
            pieces += ready
            parts += divided
        if self._shards.pieces:
            gathered = yield from whole_pieces(
                parts, self._shards, self._exchange.owners, world, self._device, self._here
            )
            pieces += gathered.pieces
            streams.append(gathered.stream)
            self._saved += gathered.traffic
        return (
            pieces,
            streams,
            {
                "optimizers": [settings(optimizer) for optimizer in self._optimizers],
                "schedulers": [scheduler_values(scheduler) for scheduler in self._schedulers],
            },
        )

    def load(self, read: Read, shapes: Mapping[str, Sequence[int]], values: Mapping[str, Any]) -> None:
        """Restore what `state` gave on all ranks together, saved under any division.

        read: of (key, start, stop), elements of a saved tensor, flat. shapes: every saved key and the full
            shape behind it.
        """
        take, finish = self.loading(values)
        for key, shape in shapes.items():
            take(key, shape, read)
        finish()

    def loading(
        self, values: Mapping[str, Any]
    ) -> tuple[Callable[[str, Sequence[int], Read], None], Callable[[], None]]:
        """`load` key by key: what takes each, of the arguments of `state_loader`, and what is to be called
        after the last one."""
        for what, here in (("optimizers", self._optimizers), ("schedulers", self._schedulers)):
            if len(values[what]) != len(here):
                raise CheckpointError(
                    f"The checkpoint has {len(values[what])} {what} and the job {len(here)}. Resume with what was saved, or start a new run."
                )

        def finish() -> None:
            for optimizer, saved in zip(self._optimizers, values["optimizers"], strict=True):
                load_settings(optimizer, saved)
            self.forget()
            for scheduler, saved in zip(self._schedulers, values["schedulers"], strict=True):
                scheduler.load_state_dict(from_json(saved))

        return state_loader(list(zip(self._optimizers, self._held, strict=True))), finish

    def _divide(
        self, names: Mapping[int, str], parts: Mapping[str, nn.Parameter], reaches: Sequence[Reach]
    ) -> None:
        """Give every optimizer what this rank updates of its parameters: slices of parts, or whole ones.

        names: of the whole parameters, by id. A whole parameter has keepers along dp, to which slices of its
        parts come (`WholeParameters`), and if it is divided over tp keepers among those along tp, to which
        the parts come (`WholeFromParts`).
        """
        owners, shards, one_copy = self._exchange.owners, self._shards, self._exchange.one_copy
        assert not (one_copy and "optimizer" in reaches), "every rank would update the one copy"
        num_owners, here = (self._exchange.num_owners, owners.rank) if owners else (1, 0)
        whole: dict[str, nn.Parameter] = {}
        everywhere: set[str] = set()
        for optimizer, how in zip(self._optimizers, reaches, strict=True):
            if how != "element":
                mine = {
                    names[id(parameter)]: parameter
                    for group in optimizer.param_groups
                    for parameter in group["params"]
                }
                # others are of other stages
                mine = {name: parameter for name, parameter in mine.items() if name in parts}
                whole |= mine
                everywhere |= mine.keys() if how == "optimizer" else set()
        keepers = _keepers(
            {name: each.numel() for name, each in whole.items()}, everywhere, shards, num_owners
        )
        speaks = {
            name: along_dp[0] == here and along_tp[0] == shards.rank
            for name, (along_dp, along_tp) in keepers.items()
        }

        def one(parameter: nn.Parameter) -> list[OwnedSlice]:
            name = names[id(parameter)]
            if name not in keepers:
                return []
            along_dp, along_tp = keepers[name]
            if here not in along_dp or shards.rank not in along_tp:
                return []
            self._kept.append(parameter)
            return [OwnedSlice(name, parameter, 0, parameter.numel(), tuple(parameter.shape), speaks[name])]

        for optimizer, how in zip(self._optimizers, reaches, strict=True):
            if how == "element":
                self._held.append(
                    _replace(
                        optimizer,
                        lambda parameter: self._slices(names[id(parameter)], parts, parameter.shape),
                    )
                )
            else:
                self._held.append(_replace(optimizer, one))
        if not whole:
            return
        if owners is not None:
            self._whole = WholeParameters(
                [parts[name] for name in whole],
                [keepers[name][0] for name in whole],
                self._exchange.owned,
                owners,
                one_copy=one_copy,
            )
            self._kept += [
                parts[name] for name in whole if here in keepers[name][0] and name in shards.pieces
            ]
        else:
            self._targets = [
                slice_.parameter if slice_.name in whole else target
                for slice_, target in zip(self._exchange.owned, self._targets, strict=True)
            ]
        # on all ranks or on none, so that all wait equally often
        if any(name in shards.pieces for name in whole):
            at_hand = [name for name in whole if name in shards.pieces and here in keepers[name][0]]
            held = {each.name for per_optimizer in self._held for each in per_optimizer}
            self._from_parts = WholeFromParts(
                [
                    GatheredParameter(
                        name=name,
                        part=parts[name],
                        keepers=keepers[name][1],
                        whole=whole[name] if name in held else None,
                    )
                    for name in at_hand
                ],
                shards,
            )

    def _slices(self, name: str, parts: Mapping[str, nn.Parameter], shape: torch.Size) -> list[OwnedSlice]:
        """What this rank owns of its part of a parameter [shape]; nothing if it is of another stage."""
        if name not in parts:
            return []
        part = parts[name]
        shards = self._shards if name in self._shards.pieces else None
        held: list[OwnedSlice] = []
        for index, slice_ in enumerate(self._exchange.owned):
            if slice_.parameter is part:
                # A slice that is all of its parameter keeps the shape, so that a 0-dim parameter's state
                # looks the same everywhere.
                data = slice_.data().view(part.shape) if slice_.whole else slice_.data()
                target = (
                    nn.Parameter(data, requires_grad=part.requires_grad) if self._exchange.owners else part
                )
                self._targets[index] = target
                held.append(OwnedSlice(name, target, slice_.start, slice_.stop, tuple(shape), shards=shards))
        return held

    def _spoken_for(self) -> list[Tensor | bool]:
        """Which elements of each owned slice this rank counts in the norm."""
        counted: list[Tensor | bool] = []
        for slice_ in self._exchange.owned:
            which = self._shards.speaks_for(slice_.name)
            counted.append(
                which if isinstance(which, bool) else which[slice_.start : slice_.stop].to(self._device)
            )
        return counted


@contextmanager
def _scaled(optimizer: Optimizer, rate: float) -> Iterator[None]:
    """With the learning rates multiplied by `rate`; schedulers do not see it."""
    own = [(group, group["lr"]) for group in optimizer.param_groups if "lr" in group and rate != 1.0]
    for group, learning_rate in own:
        group["lr"] = learning_rate * rate
    try:
        yield
    finally:
        for group, learning_rate in own:
            group["lr"] = learning_rate


def _keepers(
    sizes: Mapping[str, int], everywhere: set[str], shards: Shards, num_owners: int
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """The ranks along dp and, of those, along tp that update all of a parameter: one rank, or all that look
    at everything.

    Those that every rank of tp holds whole are kept by all of these.
    """
    everyone = tuple(range(num_owners)), tuple(range(shards.size))
    keepers = dict.fromkeys(everywhere, everyone)
    undivided = [name for name in sizes if name not in everywhere and name not in shards.pieces]
    for name, rank in zip(undivided, divide([sizes[name] for name in undivided], num_owners), strict=True):
        keepers[name] = (rank,), everyone[1]
    divided = [name for name in sizes if name not in everywhere and name in shards.pieces]
    for name, rank in zip(
        divided, divide([sizes[name] for name in divided], num_owners * shards.size), strict=True
    ):
        keepers[name] = (rank // shards.size,), (rank % shards.size,)
    return keepers


def _replace(optimizer: Optimizer, by: Callable[[nn.Parameter], list[OwnedSlice]]) -> list[OwnedSlice]:
    """Put what this rank updates in the place of each parameter, with the state that the optimizer has made
    for it (Adagrad does)."""
    all_held: list[OwnedSlice] = []
    for group in optimizer.param_groups:
        parameters: list[nn.Parameter] = list(group["params"])
        held = [by(parameter) for parameter in parameters]
        for parameter, pieces in zip(parameters, held, strict=True):
            state = optimizer.state.pop(parameter, None)
            for piece in pieces if state is not None else []:
                optimizer.state[piece.tensor] = {
                    key: _cut(value, parameter, piece) for key, value in (state or {}).items()
                }
        group["params"][:] = [piece.tensor for pieces in held for piece in pieces]
        if "param_names" in group:
            group["param_names"] = [
                name for name, pieces in zip(group["param_names"], held, strict=True) for _ in pieces
            ]
        all_held += [piece for pieces in held for piece in pieces]
    return all_held


def _cut(value: Any, parameter: nn.Parameter, piece: OwnedSlice) -> Any:
    if not isinstance(value, Tensor) or piece.tensor is parameter:
        return value
    if value.ndim == 0 or value.shape != parameter.shape:
        return value.clone()
    return piece.cut(value)
