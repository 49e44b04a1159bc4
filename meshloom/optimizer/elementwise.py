"""A trial on small tensors that finds out what the update of an element depends on: on that element alone, on
its whole parameter, or on all parameters.

It decides what a rank may update without the others: a slice of a parameter, a full parameter, or only all of
them. The same optimizer, with the settings of each of its groups, takes the same steps with the same
gradients twice: once with full small parameters, and once as several ranks would, each with pieces of them
and one with none.

    one device   [ a a a a a a ] [ b b b b ]         elements of a and b
    rank 0       [ a a ]         [ b b b b ]         equal within rounding: "element"
    rank 1             [ a a a a ]
    rank 2       (nothing)

The user's optimizer is not touched: the trial runs on a copy in which small float64 parameters replace the
real ones. Step hooks, and a `step` that was put in place of the optimizer's, are part of it; they are tried as copies, with copies of
what they refer to. What cannot be copied so, or reaches the parameters in another way than through the optimizer, is taken to look at
all of them.
"""

from __future__ import annotations

import copy
import io
import math
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam

from meshloom.core.device.optimizer_copies import make_copies_step
from meshloom.core.modules.function_copies import copied_function
from meshloom.core.random import preserved_draws
from meshloom.optimizer.offload.windows import step_in_windows, windows_of

Reach = Literal["element", "parameter", "optimizer"]

# Gradients of several sizes, so that a limit on an update's norm takes effect, and enough steps for what
# starts late (a warm-up, a preconditioner).
_SCALES = (1.0, 1e-3, 1e3, 1.0, 30.0, 1e-2, 1.0, 1e2, 1.0, 1e-1, 1.0, 1.0)
_LEARNING_RATE = 0.01  # not the user's: a schedule may start at 0, and nothing would move
_TOLERANCE = 1e-9  # of the largest movement; float64 rounding over twelve steps stays below 1e-12


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether each element is updated from that element's own value, gradients and state alone.

    True for SGD, Adam and the like; False for optimizers that look at a whole matrix (Muon, Adafactor, LAMB)
    and for any that fails when it is given a slice. A trial sees small tensors and a dozen steps: set
    `Job(elementwise=False)` for an optimizer whose rule differs for large tensors or later steps.

    >>> parameter = nn.Parameter(torch.ones(4, 4))
    >>> is_elementwise(torch.optim.AdamW([parameter])), is_elementwise(torch.optim.Adafactor([parameter]))
    (True, False)
    """
    return reach(optimizer) == "element"


def reach(optimizer: Optimizer, *, elementwise: bool | None = None) -> Reach:
    """What the update of an element depends on: "element", "parameter", or "optimizer" (all parameters, or
    unknown).

    elementwise: the answer to `is_elementwise`, if the user gave one.
    """
    # it accepts no dense gradients, and updates each used element independently
    if elementwise or isinstance(optimizer, SparseAdam):
        return "element"
    with _undisturbed(optimizer):
        try:
            toys = _toys(optimizer)
            whole = _run(optimizer, [[_Piece(toy, 0, toy.start.numel()) for toy in toys]])
        except Exception:  # a user's optimizer may raise anything when given other parameters
            return "optimizer"
        if not all(math.isfinite(moved) and moved > 0 for moved in whole.movements()):
            return "optimizer"
        ways: list[tuple[Reach, list[list[_Piece]]]] = [("parameter", _by_parameter(toys))]
        if elementwise is None and whole.sliceable():
            ways.insert(0, ("element", _by_element(toys)))
        for way, ranks in ways:
            if _agrees(optimizer, ranks, whole):
                return way
        return "optimizer"


def own_step(optimizer: Optimizer) -> Callable[..., Any] | None:
    """The function that the user has put in place of the optimizer's `step`, below that of a scheduler, if there is one."""
    step: Any = vars(optimizer).get("step")
    if step is None or not hasattr(step, "_wrapped_by_lr_sched"):
        return step
    inner = getattr(step, "__wrapped__", None)  # a scheduler's own is of the class's
    return None if inner in (None, type(optimizer).step) else MethodType(inner, optimizer)


def step_hooks(optimizer: Any) -> list[Callable[..., Any]]:
    """What is called before and after each step of this optimizer."""
    return [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]


def steps_in_windows(optimizer: Optimizer) -> bool:
    """Whether one update may be made by several calls of `step`, each for some of the parameters
    (`step_in_windows`): a trial has the same bits, settings and plain attributes as with one call."""
    if step_hooks(optimizer) or own_step(optimizer) is not None:
        return False  # what is called once a step would be called several times
    if isinstance(optimizer, SparseAdam):  # it takes no dense gradients
        return True
    with _undisturbed(optimizer):
        try:
            pieces = [_Piece(toy, 0, toy.start.numel()) for toy in _toys(optimizer)]
            one = _run(optimizer, [pieces])
            several = _run(optimizer, [pieces], lambda each: step_in_windows(each, windows_of(each, 0)))
            return all(
                torch.equal(several.ends[number], end) for number, end in one.ends.items()
            ) and _all_settings(several.optimizers[0]) == _all_settings(one.optimizers[0])
        except Exception:  # see above
            return False


@dataclass(frozen=True)
class _Toy:
    """A small parameter in place of those of `ndim` dims in one group; `model` is one of them."""

    number: int
    group: int
    model: nn.Parameter
    start: Tensor
    gradients: list[Tensor]


@dataclass(frozen=True)
class _Piece:
    """Elements `begin` to `end` of a toy, as a rank holds them: in its shape if these are all, else flat."""

    toy: _Toy
    begin: int
    end: int

    def cut(self, tensor: Tensor) -> Tensor:
        flat = tensor.reshape(-1)[self.begin : self.end].clone()
        return flat.view(self.toy.start.shape) if flat.numel() == self.toy.start.numel() else flat


@dataclass
class _Outcome:
    """The final values of the toys, by number, and each rank's optimizer."""

    toys: dict[int, _Toy]
    ends: dict[int, Tensor]
    optimizers: list[Optimizer]

    def movements(self) -> list[float]:
        return [float((self.ends[number] - toy.start).abs().max()) for number, toy in self.toys.items()]

    def sliceable(self) -> bool:
        """Whether all state is one value per element, or one for all."""
        states = [
            (held, value)
            for optimizer in self.optimizers
            for held, state in optimizer.state.items()
            if isinstance(held, Tensor)  # other keys belong to no parameter
            for value in state.values()
        ]
        return all(
            _plain(value)
            if not isinstance(value, Tensor)
            else value.numel() == 1 or value.shape == held.shape
            for held, value in states
        )


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _toys(optimizer: Optimizer) -> list[_Toy]:
    generator = torch.Generator().manual_seed(1)
    toys: list[_Toy] = []
    for index, group in enumerate(optimizer.param_groups):
        for model in {parameter.ndim: parameter for parameter in reversed(group["params"])}.values():
            shape = (
                ()
                if model.ndim == 0
                else (15,)
                if model.ndim == 1
                else (5, 3, *(2 + dim % 2 for dim in range(model.ndim - 2)))
            )
            for _ in range(2):

                def draw(
                    scale: float, shape: tuple[int, ...] = shape, device: torch.device = model.device
                ) -> Tensor:
                    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(device)

                toys.append(_Toy(len(toys), index, model, draw(1.0), [draw(scale) for scale in _SCALES]))
    return toys


def _by_element(toys: Sequence[_Toy]) -> list[list[_Piece]]:
    ranks: list[list[_Piece]] = [[], [], []]
    for toy in toys:
        n = toy.start.numel()
        # every other toy is kept whole, as most parameters of a model are
        at = n // 3 if toy.number % 2 == 0 else n
        ranks[0] += [_Piece(toy, 0, at)] if at else []
        ranks[1] += [_Piece(toy, at, n)] if at < n else []
    return ranks


def _by_parameter(toys: Sequence[_Toy]) -> list[list[_Piece]]:
    return [
        [_Piece(toy, 0, toy.start.numel()) for toy in toys if toy.number % 2 == rank] for rank in range(2)
    ] + [[]]


def _agrees(optimizer: Optimizer, ranks: list[list[_Piece]], whole: _Outcome) -> bool:
    """Whether ranks that hold these pieces end with the values and group settings of one device."""
    try:
        parts = _run(optimizer, ranks)
        reference = [_settings(group) for group in whole.optimizers[0].param_groups]
        limits = {
            number: _TOLERANCE * moved for number, moved in zip(whole.ends, whole.movements(), strict=True)
        }
        return all(
            float((parts.ends[number] - end).abs().max()) <= limits[number]
            for number, end in whole.ends.items()
        ) and all([_settings(group) for group in each.param_groups] == reference for each in parts.optimizers)
    except Exception:  # see above
        return False


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    return {key: value.tolist() if isinstance(value, Tensor) else value for key, value in settings.items()}


def _all_settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Of its groups, and plain attributes."""
    attributes = {key: value for key, value in vars(optimizer).items() if _plain(value)}
    return [*(_settings(group) for group in optimizer.param_groups), attributes]


def _run(
    optimizer: Optimizer,
    ranks: Sequence[Sequence[_Piece]],
    update: Callable[[Optimizer], object] = lambda each: each.step(),
) -> _Outcome:
    toys = {piece.toy.number: piece.toy for pieces in ranks for piece in pieces}
    outcome = _Outcome(toys, {number: toy.start.clone() for number, toy in toys.items()}, [])
    for pieces in ranks:
        held = [(piece, nn.Parameter(piece.cut(piece.toy.start))) for piece in pieces]
        stand_in = _copy(optimizer, held)
        for step in range(len(_SCALES)):
            for piece, parameter in held:
                parameter.grad = piece.cut(piece.toy.gradients[step])
            update(stand_in)
        for piece, parameter in held:
            outcome.ends[piece.toy.number].view(-1)[piece.begin : piece.end] = parameter.detach().reshape(-1)
        outcome.optimizers.append(stand_in)
    return outcome


def _copy(optimizer: Optimizer, held: Sequence[tuple[_Piece, nn.Parameter]]) -> Optimizer:
    """An optimizer of the same class and settings over `held`. The constructor is not called, because its
    arguments are not known."""
    state: defaultdict[Tensor, Any] = defaultdict(dict)
    for piece, parameter in held:
        if piece.toy.model in optimizer.state:
            state[parameter] = {
                key: _shrink(value, piece) for key, value in optimizer.state[piece.toy.model].items()
            }
    # The memo makes every reference inside the copy consistent: an optimizer that wraps another shares its
    # groups, one that keeps a list of parameters of its own finds bystanders there, does not move the toys,
    # and is found out.
    bystanders = {
        id(parameter): nn.Parameter(torch.zeros_like(parameter[:0] if parameter.ndim else parameter))
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    stand_in = copy_with(optimizer, bystanders, state)
    for index, group in enumerate(stand_in.param_groups):
        group["params"][:] = [parameter for piece, parameter in held if piece.toy.group == index]
        if "param_names" in group:
            group["param_names"] = [f"toy{piece.toy.number}" for piece, _ in held if piece.toy.group == index]
        if "lr" in group:
            group["lr"] = (
                torch.full_like(group["lr"], _LEARNING_RATE)
                if isinstance(group["lr"], Tensor)
                else _LEARNING_RATE
            )
    _copy_calls(optimizer, stand_in)
    return stand_in


def _copy_calls(optimizer: Any, stand_in: Any) -> None:
    """Gives a copy the hooks around the optimizer's step, and the step in its place."""
    step = own_step(optimizer)
    if step is None and not step_hooks(optimizer):
        return
    memo: dict[int, Any] = {id(optimizer): stand_in}
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        for key, hook in vars(optimizer)[name].items():
            vars(stand_in)[name][key] = copied_function(hook, memo, parameters)
    if step is not None:
        stand_in.step = copied_function(step, memo, parameters)


def copy_with(
    optimizer: Optimizer, parameters: Mapping[int, nn.Parameter], state: Mapping[Any, Any]
) -> Optimizer:
    """A copy of an optimizer, made without its constructor, without hooks and with this state. parameters: by the
    id of those that they replace."""
    stand_in: Optimizer = object.__new__(type(optimizer))
    memo: dict[int, Any] = {id(optimizer): stand_in, id(optimizer.state): state, **parameters}
    for name, value in vars(optimizer).items():
        if name != "step":  # a scheduler puts its own there, bound to the original
            vars(stand_in)[name] = (
                OrderedDict[Any, Any]() if name.endswith("_hooks") else copy.deepcopy(value, memo)
            )
    make_copies_step(memo.values())
    return stand_in


def _shrink(value: Any, piece: _Piece) -> Any:
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    if value.shape != piece.toy.model.shape or value.ndim == 0:
        return value.clone()
    flat = value.detach().reshape(-1)
    n = piece.toy.start.numel()
    resized = (
        flat[torch.arange(n, device=flat.device) % max(flat.numel(), 1)]
        if flat.numel()
        else flat.new_zeros(n)
    )
    return piece.cut(resized.double() if resized.is_floating_point() else resized)


@contextmanager
def _undisturbed(optimizer: Optimizer) -> Iterator[None]:
    """Preserves random generators and warnings; what hooks print is not shown."""
    devices = {
        parameter.device
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.device.type == "cuda"
    }
    with ExitStack() as around:
        around.enter_context(preserved_draws())
        if devices:
            around.enter_context(
                torch.random.fork_rng(devices=[device.index for device in devices], device_type="cuda")
            )
        around.enter_context(redirect_stdout(io.StringIO()))
        around.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        yield
