"""Records what the first steps of a script compute, one file per step, and ends it then."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves, tree_map_only

from meshloom.loops.execution import Execution
from meshloom.loops.part_tensor import plain
from meshloom.verify.reference.float64_blocks import norm
from meshloom.verify.tolerances.gradient_errors import FLOOR
from meshloom.verify.tolerances.of_precision import most_tolerated

_TORCH, _MESHLOOM = str(Path(torch.__file__).parent), str(Path(__file__).parents[2])


class EnoughStepsError(BaseException):
    """Ends a script whose steps are recorded. No `except Exception` of the script takes it."""


class RecordedStep(NamedTuple):
    """A step of an optimizer, numbered by their first steps; None: a backward of a script that has no optimizer.

    gradients: before the step, by parameter. parameters: after it, those of this optimizer. buffers: after it, of all parallel
    modules. reports: what `ml.mean` and `ml.sum` returned since the step before, in order.
    """

    optimizer: int | None
    gradients: Mapping[str, Tensor | None]
    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    reports: Sequence[Tensor]


def recorded_steps(directory: Path) -> list[RecordedStep]:
    """The steps that a `ScriptRecorder` has written to `directory`."""
    paths = sorted(directory.glob("*.step"), key=lambda path: int(path.stem))
    return [RecordedStep(*torch.load(path, map_location="cpu")) for path in paths]


class ScriptRecorder:
    """A context in which steps are recorded until one optimizer has made `steps` of them.

    directory: where to; None: nowhere, as on ranks other than the main one, which take part in gathering.
    executions: the parallel modules so far and what the plan makes of them; None: a plain module.
    """

    def __init__(
        self, directory: Path | None, steps: int, executions: Mapping[nn.Module, Execution | None]
    ) -> None:
        self._directory, self._steps, self._executions = directory, steps, executions
        self._optimizers: list[Optimizer] = []  # each held, so that its identity stays its own
        self._made: dict[int | None, int] = {}  # steps of each
        self._gradients: dict[str, Tensor | None] = {}
        self._reports: list[Tensor] = []
        self._backwards = 0  # in progress: an execution may have others within one
        self._undo = ExitStack()

    def __enter__(self) -> ScriptRecorder:
        self._undo.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        self._undo.callback(register_optimizer_step_post_hook(self._after_step).remove)
        self._undo.enter_context(replaced(torch.autograd, "backward", self._recording_backward))
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def report(self, value: Any) -> None:
        """Note what the script was told of the global batch."""
        numbers = [each for each in tree_leaves(value) if isinstance(each, Tensor | float | int)]
        self._reports += [_copied(torch.as_tensor(each)) for each in numbers]

    def held(self) -> tuple[float, float]:
        """The shares of the parameters of all parallel modules, and of the optimizers' state, that this process has."""
        parameters = {id(each): each for _, each in self._names()}.values()
        states = [each for one in self._optimizers for of in one.state.values() for each in of.values()]
        states = [each for each in states if isinstance(each, Tensor) and each.dim()]
        return _share_of(parameters), _share_of(states)

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        if not any(each is optimizer for each in self._optimizers):
            self._optimizers.append(optimizer)
        names = self._names_in(optimizer)
        with self._whole(names):
            self._note_gradients(names)
            zero_rounding([each.grad for each in names.values() if each.grad is not None])

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        number = next(number for number, each in enumerate(self._optimizers) if each is optimizer)
        self._record(number, self._names_in(optimizer))

    def _recording_backward(self, backward: Any) -> Any:
        @functools.wraps(backward)
        def recording(*args: Any, **kwargs: Any) -> None:
            self._backwards += 1
            try:
                backward(*args, **kwargs)
            finally:
                self._backwards -= 1
            own = self._backwards or _is_of_a_capture(inspect.currentframe())
            if not own and not self._has_optimizer():
                names = dict(self._names())
                with self._whole(names):
                    self._note_gradients(names)
                self._record(None, names)

        return recording

    def _has_optimizer(self) -> bool:
        if not self._optimizers:
            self._optimizers += [each for each in gc.get_objects() if issubclass(type(each), Optimizer)]
        return bool(self._optimizers)

    def _names(self) -> Iterator[tuple[str, nn.Parameter]]:
        for number, module in enumerate(self._executions):
            for name, parameter in module.named_parameters():
                yield _name(number, name), parameter

    def _names_in(self, optimizer: Optimizer) -> dict[str, nn.Parameter]:
        known = {id(parameter): name for name, parameter in self._names()}
        number = next(number for number, each in enumerate(self._optimizers) if each is optimizer)
        return {
            known.get(id(parameter), f"optimizer{number}.group{group}.{at}"): parameter
            for group, settings in enumerate(optimizer.param_groups)
            for at, parameter in enumerate(settings["params"])
        }

    @contextmanager
    def _whole(self, named: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """A context in which these are whole. Those of other modules stay as a graph may have them."""
        wanted = {id(each) for each in named.values()}
        with ExitStack() as stack:
            for module, execution in self._executions.items():
                if execution is not None and any(id(each) in wanted for each in module.parameters()):
                    stack.enter_context(execution.whole())
            yield

    def _note_gradients(self, named: Mapping[str, nn.Parameter]) -> None:
        if self._directory is not None:
            self._gradients = {
                name: None if each.grad is None else _copied(each.grad) for name, each in named.items()
            }

    def _record(self, optimizer: int | None, named: Mapping[str, nn.Parameter]) -> None:
        buffers: dict[str, Tensor] = {}
        for number, (module, execution) in enumerate(self._executions.items()):
            buffers |= {_name(number, name): each for name, each in _buffers(module, execution)}
        with self._whole(named):
            if self._directory is not None:
                values = {name: _copied(each) for name, each in named.items()}
                step = RecordedStep(optimizer, self._gradients, values, buffers, self._reports)
                torch.save(tuple(step), self._directory / f"{sum(self._made.values())}.step")
        self._reports = []
        self._made[optimizer] = self._made.get(optimizer, 0) + 1
        if self._made[optimizer] >= self._steps:
            raise EnoughStepsError


@torch.no_grad()
def zero_rounding(gradients: Sequence[Tensor]) -> None:
    """Elements of a step's gradients that are no more than rounding in float64, such as of a bias before a batch norm, become 0: an optimizer that divides
    by a gradient's size would make steps of them, other ones in each run, and of all that depends on these."""
    found = [each for each in gradients if each.layout == torch.strided and each.dtype == torch.float64]
    largest = max(map(norm, found), default=0.0)
    for each in found:
        each.masked_fill_(each.abs() <= most_of_rounding(each, largest, most_tolerated(torch.float64)), 0)


def most_of_rounding(gradient: Tensor, largest: float, tolerance: float) -> float:
    """The size of elements that are no more than rounding. largest: norm of a gradient of the step."""
    return tolerance * max(norm(gradient), FLOOR * largest)


def _is_of_a_capture(frame: Any) -> bool:
    """Whether meshloom itself starts a backward, to compare what it has captured, on one rank."""
    frame = frame.f_back  # of who asks
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_MESHLOOM)


@contextmanager
def replaced(owner: Any, name: str, replace: Any) -> Iterator[None]:
    """A context in which an attribute is what `replace` makes of it."""
    before = getattr(owner, name)
    setattr(owner, name, replace(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


def _share_of(tensors: Collection[Tensor]) -> float:
    whole = sum(each.numel() for each in tensors)
    return sum(plain(each.detach()).numel() for each in tensors) / whole if whole else 1.0


def to_float64(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """A hook of a forward: what it gets. Of this file, not of the script's `__main__`, so that the module can be saved."""
    return tree_map_only(
        Tensor, lambda each: each.double() if each.is_floating_point() else each, (args, kwargs)
    )


def with_hooks(module: nn.Module, methods: Sequence[str]) -> None:
    """Calls of these methods run the module's hooks, as its own calls do."""
    written = {name: getattr(type(module), name) for name in methods}

    def taking(name: str) -> Any:
        @functools.wraps(written[name])
        def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            own = vars(self).pop("forward", None)

            def once(*args: Any, **kwargs: Any) -> Any:
                restore()
                return written[name](self, *args, **kwargs)

            def restore() -> None:
                vars(self).pop("forward", None)
                vars(self).update({} if own is None else {"forward": own})

            self.forward = once
            try:
                return self._call_impl(*args, **kwargs)  # pyright: ignore[reportPrivateUsage] # and not what takes its own calls
            finally:
                restore()

        return method

    if methods:
        kind = type(module)
        body = {"__module__": kind.__module__, **{name: taking(name) for name in methods}}
        module.__class__ = type(kind.__name__, (kind,), body)


def _buffers(module: nn.Module, execution: Execution | None) -> Iterator[tuple[str, Tensor]]:
    """The entries of the module's state dict that are no parameters, whole and merged over replicas."""
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    entries = module.state_dict().items() if execution is None else execution.tensors()
    for name, each in entries:
        if name not in parameters and isinstance(tensor := each() if execution else each, Tensor):
            yield name, _copied(tensor)


def _name(number: int, name: str) -> str:
    return f"module{number}.{name}" if number else name


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to_dense().to("cpu", copy=True)
