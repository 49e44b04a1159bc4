"""The one optimizer path: clip what this rank owns, step the user's optimizers on it, step their schedulers.

The user's function gets named parameters of full shape, so that groups by name or ndim mean what they mean on one device. Where several
ranks own slices, only `group["params"]` changes afterwards: to slices for an optimizer that updates each element by itself, to whole
parameters divided among the ranks for one that looks at a whole parameter (`elementwise.py` finds out which). The optimizer
objects stay, because schedulers hold them.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer, SparseAdam
from torch.optim.lr_scheduler import ReduceLROnPlateau

from meshloom.comm.turns import Steps
from meshloom.errors import CheckpointError, JobError
from meshloom.exchange.exchange import Exchange
from meshloom.job import Job, NamedParameters
from meshloom.state.checkpoint import Piece
from meshloom.state.clipping import clip
from meshloom.state.elementwise import Reach, reach
from meshloom.state.json_values import NotPlainError, from_json, to_json
from meshloom.state.optimizer_state import Held, load_settings, load_state, settings, state_pieces
from meshloom.state.whole import WholeParameters, divide


class Updater:
    """Updates what this rank owns, once a step.

    named_parameters: every trainable parameter by name, each once. A parameter that the user's function gives to no optimizer is not
    updated. `job.elementwise` overrides the trial: True updates slices, False whole parameters; None finds out.
    Raises `JobError` for optimizers or schedulers that cannot be used.
    """

    def __init__(self, job: Job, named_parameters: NamedParameters, exchange: Exchange) -> None:
        self._job = job
        self._exchange = exchange
        self._names = {id(parameter): name for name, parameter in named_parameters}
        self._device = named_parameters[0][1].device
        made = _call(job, named_parameters)
        self._optimizers = _check(made, self._names)
        reaches: list[Reach] = [reach(each, elementwise=job.elementwise) if exchange.owners else "element" for each in self._optimizers]
        self._schedulers = _schedulers(job, made)
        self._held: list[list[Held]] = []  # by optimizer
        self._targets: list[nn.Parameter | None] = [None] * len(exchange.owned)  # whose .grad an owned slice's gradient becomes
        self._kept: list[nn.Parameter] = []  # whole parameters that this rank updates although it owns only slices
        self._whole: WholeParameters | None = None
        if exchange.owners is None:
            self._targets = [slice_.parameter for slice_ in exchange.owned]
            self._held = [[self._hold(parameter) for group in each.param_groups for parameter in group["params"]] for each in self._optimizers]
        else:
            self._divide(reaches)

    def update(self, gradients: Sequence[Tensor | None], loss: float) -> Steps[float | None]:
        """Clip and step; the gradient's norm before clipping, None if the job does not clip.

        gradients: what `Exchange.finish` returned: of each owned slice, flat; None was not used. Clipping scales them in place.
        loss: mean over the global batch, for schedulers that look at it.
        """
        norm = None
        if self._job.clip_grad_norm is not None:
            norm = yield from clip(gradients, self._job.clip_grad_norm, self._exchange.owners, self._device)
        before = [(target, target.grad) for target in (*self._targets, *self._kept) if target is not None]
        for target, gradient in zip(self._targets, gradients, strict=True):
            if target is not None:
                target.grad = None if gradient is None else gradient.view(target.shape)
        if self._whole:
            yield from self._whole.fetch(gradients)
        for optimizer in self._optimizers:
            optimizer.step()
        for target, gradient in before:
            target.grad = gradient  # it is the exchange's
        if self._whole:
            yield from self._whole.give_back()
        for scheduler in self._schedulers:
            scheduler.step(loss) if isinstance(scheduler, ReduceLROnPlateau) else scheduler.step()
        return norm

    def learning_rates(self) -> list[float]:
        """Of every group of every optimizer that has one."""
        return [float(group["lr"]) for optimizer in self._optimizers for group in optimizer.param_groups if "lr" in group]

    def bytes_per_step(self) -> dict[str, int]:
        """Bytes that one `update` hands to each kind of collective. What whole parameters need is known after the first."""
        total: dict[str, int] = {}
        if self._exchange.owners and self._job.clip_grad_norm is not None:
            total["all_reduce"] = 8
        if self._whole:
            total["all_to_all"] = self._whole.bytes_per_step()
        return total

    def bytes_once(self) -> dict[str, int]:
        """Bytes that the first `update` hands over besides."""
        return {"all_gather": self._whole.bytes_once()} if self._whole else {}

    def state(self) -> tuple[list[Piece], dict[str, Any]]:
        """This rank's pieces of the state's tensors, and JSON values that are equal on all ranks."""
        pieces = [piece for optimizer, held in zip(self._optimizers, self._held, strict=True) for piece in state_pieces(optimizer, held)]
        return pieces, {
            "optimizers": [settings(optimizer) for optimizer in self._optimizers],
            "schedulers": [_scheduler_values(scheduler) for scheduler in self._schedulers],
        }

    def load(self, read: Callable[[str, int, int], Tensor], shapes: Mapping[str, Sequence[int]], values: Mapping[str, Any]) -> None:
        """Restore what `state` gave on all ranks together, saved under any division.

        read: of (key, start, stop), elements of a saved tensor, flat. shapes: every saved key and the full shape behind it.
        """
        for what, here in (("optimizers", self._optimizers), ("schedulers", self._schedulers)):
            if len(values[what]) != len(here):
                raise CheckpointError(
                    f"The checkpoint has {len(values[what])} {what} and the job {len(here)}. Resume with what was saved, or start a new run."
                )
        for optimizer, held, saved in zip(self._optimizers, self._held, values["optimizers"], strict=True):
            load_state(optimizer, held, read, shapes)
            load_settings(optimizer, saved)
        for scheduler, saved in zip(self._schedulers, values["schedulers"], strict=True):
            scheduler.load_state_dict(from_json(saved))

    def _hold(self, parameter: nn.Parameter, *, speaks: bool = True) -> Held:
        return Held(self._names[id(parameter)], parameter, 0, parameter.numel(), tuple(parameter.shape), speaks)

    def _divide(self, reaches: Sequence[Reach]) -> None:
        """Give every optimizer what this rank updates of its parameters: slices or whole ones."""
        owners = self._exchange.owners
        assert owners is not None
        whole: list[nn.Parameter] = []
        everywhere: set[int] = set()
        for optimizer, how in zip(self._optimizers, reaches, strict=True):
            if how != "element":
                mine = [parameter for group in optimizer.param_groups for parameter in group["params"]]
                whole += mine
                everywhere |= {id(parameter) for parameter in mine} if how == "optimizer" else set()
        shared = [parameter for parameter in whole if id(parameter) not in everywhere]
        keeper = dict(zip(map(id, shared), divide([parameter.numel() for parameter in shared], owners.size), strict=True))
        keepers = [(keeper[id(parameter)],) if id(parameter) in keeper else tuple(range(owners.size)) for parameter in whole]
        kept = {id(parameter): ranks for parameter, ranks in zip(whole, keepers, strict=True) if owners.rank in ranks}
        self._kept = [parameter for parameter in whole if id(parameter) in kept]
        for optimizer, how in zip(self._optimizers, reaches, strict=True):
            if how == "element":
                self._held.append(_replace(optimizer, self._slices))
            else:
                one = lambda parameter: [self._hold(parameter, speaks=kept[id(parameter)][0] == owners.rank)] if id(parameter) in kept else []  # noqa: E731
                self._held.append(_replace(optimizer, one))
        if whole:
            self._whole = WholeParameters(whole, keepers, self._exchange.owned, owners)

    def _slices(self, parameter: nn.Parameter) -> list[Held]:
        held: list[Held] = []
        for index, slice_ in enumerate(self._exchange.owned):
            if slice_.parameter is parameter:
                # A slice that is all of its parameter keeps the shape, so that a 0-dim parameter's state looks the same everywhere.
                data = slice_.data().view(parameter.shape) if slice_.whole else slice_.data()
                target = nn.Parameter(data, requires_grad=parameter.requires_grad)
                self._targets[index] = target
                held.append(Held(slice_.name, target, slice_.start, slice_.stop, tuple(parameter.shape)))
        return held


def _replace(optimizer: Optimizer, by: Callable[[nn.Parameter], list[Held]]) -> list[Held]:
    """Put what this rank updates in the place of each parameter, with the state that the optimizer has made for it (Adagrad does)."""
    all_held: list[Held] = []
    for group in optimizer.param_groups:
        parameters: list[nn.Parameter] = list(group["params"])
        held = [by(parameter) for parameter in parameters]
        for parameter, pieces in zip(parameters, held, strict=True):
            state = optimizer.state.pop(parameter, None)
            for piece in pieces if state is not None else []:
                optimizer.state[piece.tensor] = {key: _cut(value, parameter, piece) for key, value in (state or {}).items()}
        group["params"][:] = [piece.tensor for pieces in held for piece in pieces]
        if "param_names" in group:
            group["param_names"] = [name for name, pieces in zip(group["param_names"], held, strict=True) for _ in pieces]
        all_held += [piece for pieces in held for piece in pieces]
    return all_held


def _cut(value: Any, parameter: nn.Parameter, piece: Held) -> Any:
    if not isinstance(value, Tensor) or piece.tensor is parameter:
        return value
    if value.ndim == 0 or value.shape != parameter.shape:
        return value.clone()
    return value.reshape(-1)[piece.start : piece.stop].clone().view(piece.tensor.shape)


def _call(job: Job, named_parameters: NamedParameters) -> Any:
    try:
        return job.optimizer(list(named_parameters))
    except ValueError as error:
        if "empty parameter list" in str(error):
            raise JobError("The optimizer function gave an optimizer no parameters. Give each at least one, or leave that optimizer out.") from error
        raise


def _check(made: Any, names: Mapping[int, str]) -> list[Optimizer]:
    optimizers: list[Any] = list(made) if isinstance(made, list | tuple) else [made]
    if not optimizers:
        raise JobError("The optimizer function returned an empty list. Return one torch.optim.Optimizer, or several over disjoint parameters.")
    owner: dict[int, int] = {}
    for index, optimizer in enumerate(optimizers):
        if not isinstance(optimizer, Optimizer):
            raise JobError(
                f"The optimizer function returned a {type(optimizer).__name__}, not a torch.optim.Optimizer. Return one, or a list of several "
                "over disjoint parameters."
            )
        if isinstance(optimizer, LBFGS):
            raise JobError(
                "LBFGS evaluates the loss several times in a step, which is not supported. Use one that steps once per gradient, such as AdamW."
            )
        if isinstance(optimizer, SparseAdam):
            raise JobError("SparseAdam needs sparse gradients, and gradients are exchanged dense. Use Adam, and sparse=False in embeddings.")
        parameters: list[nn.Parameter] = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if not parameters:
            raise JobError(f"{type(optimizer).__name__} (optimizer {index}) has no parameters. Give it at least one, or leave it out.")
        for parameter in parameters:
            if id(parameter) not in names:
                raise JobError(
                    f"{type(optimizer).__name__} holds a parameter of shape {list(parameter.shape)} that is not a trainable parameter of the model. "
                    "Build it from the named parameters that the optimizer function receives."
                )
            if owner.setdefault(id(parameter), index) != index:
                raise JobError(
                    f"{names[id(parameter)]} is in two optimizers, {type(optimizers[owner[id(parameter)]]).__name__} and {type(optimizer).__name__}. "
                    "Give each parameter to one of them."
                )
    return optimizers


def _schedulers(job: Job, made: Any) -> list[Any]:
    if job.scheduler is None:
        return []
    returned = job.scheduler(made)
    schedulers: list[Any] = list(returned) if isinstance(returned, list | tuple) else [returned]
    for scheduler in schedulers:
        if not all(callable(getattr(scheduler, name, None)) for name in ("step", "state_dict", "load_state_dict")):
            raise JobError(
                f"The scheduler function returned a {type(scheduler).__name__}. Return a scheduler, like lambda optimizer: "
                "CosineAnnealingLR(optimizer, 100), or a list of them."
            )
        _scheduler_values(scheduler)  # find out now rather than at the first checkpoint
    return schedulers


def _scheduler_values(scheduler: Any) -> Any:
    """A scheduler's state as JSON. Functions are left out: the job's own function builds the scheduler with the same ones."""
    code = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)
    state = {key: value for key, value in scheduler.state_dict().items() if not isinstance(value, code)}
    try:
        return to_json(state)
    except NotPlainError as error:
        raise JobError(
            f"{type(scheduler).__name__} cannot be saved: {error}. Keep numbers, strings, small tensors and lists of them in its state_dict()."
        ) from None
