"""A watched script: its names with their values, and which of them is the model, the optimizer, the loader."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from meshloom.adopt.watching.draws import tensors_of
from meshloom.adopt.watching.iterated import Iterated
from meshloom.adopt.watching.route import Loop, Refusal, UntranslatedError, WayToBackward
from meshloom.adopt.watching.source import bound, calls, dotted, method, roots, used
from meshloom.adopt.watching.watch import MicroBatch, Watched

TALK = ("print", "logging", "logger", "log", "wandb", "writer", "tqdm", "pbar", "warnings", "sys", "time")
NO_CHANGE = (
    "train",
    "eval",
    "zero_grad",
    "to",
    "cuda",
    "cpu",
    "parameters",
    "state_dict",
    "item",
    "backward",
    "step",
)


@dataclass
class Script:
    """What was seen of a script, and what is found out of it. reasons: (line, text) of each change.

    values: of all names on the way, the innermost last; setup_values: of those that the set-up binds. loader: an expression.
    sums: whether the loss is a sum over the batch. whole: names of tensors all of whose rows every step is of.
    """

    watched: Watched
    route: WayToBackward
    reasons: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    left_out: list[Refusal] = field(default_factory=list[Refusal])

    def __post_init__(self) -> None:
        frames = self.watched.frames
        self.values: dict[str, Any] = {}
        for frame in frames:
            self.values |= frame.globals | frame.values
        self.iterated = Iterated(self.route, self.values, self.watched.loader)
        self.setup_values: dict[str, Any] = {}
        for line in self.route.setup:
            for name in bound(line.node):
                if name in frames[line.frame].values:
                    self.setup_values[name] = frames[line.frame].values[name]
        self.model = self._name_of(self.watched.model)
        self.optimizer = self._name_of(self.watched.optimizers[0])
        self.loader = self.expression_of(self.watched.loader)
        self.sums = False
        self.whole: list[str] = []

    def take_whole(self, names: list[str]) -> None:
        """Let all rows of these tensors be the batch of every step."""
        self.whole = names
        for each in (batch for step in self.watched.steps for batch in step):
            each.batch = tuple(self.setup_values[name] for name in names)

    def expression_of(self, value: Any) -> str | None:
        """An expression of the set-up's names for an object."""
        return self._name_of(value) or self._item_of(value)

    def _name_of(self, value: Any) -> str | None:
        if value is None:
            return None
        return next((name for name, each in self.setup_values.items() if each is value), None)

    def _item_of(self, value: Any) -> str | None:
        """`loaders["train"]` of a dict that the set-up names."""
        dicts = [(name, each) for name, each in self.setup_values.items() if isinstance(each, dict)]
        found = [
            f"{name}[{key!r}]"
            for name, each in dicts
            for key, one in each.items()
            if one is value is not None
        ]
        return found[0] if found else None

    @property
    def model_names(self) -> set[str]:
        """All names of the model on the way."""
        return {name for name, each in self.values.items() if each is self.watched.model}

    @property
    def schedulers(self) -> list[str]:
        """Names of learning-rate schedulers that the set-up makes."""
        return [name for name, each in self.setup_values.items() if isinstance(each, LRScheduler | ReduceLROnPlateau)]  # fmt: skip

    @property
    def micro_batches(self) -> int:
        """Calls of `backward()` in a step."""
        return len(self.watched.steps[0])

    @property
    def first(self) -> MicroBatch:
        return self.watched.steps[0][0]

    @property
    def data_loop(self) -> Loop | None:
        """The loop over the data loader."""
        loops = [
            each
            for each in self.route.loops
            if isinstance(each.node, ast.For) and self.is_loader(each.node.iter)
        ]
        return loops[-1] if loops else None

    @property
    def step_loop(self) -> Loop:
        """The innermost loop that has the optimizer's step."""
        for loop in reversed(self.route.loops):
            inside = [
                call for node in self.statements_of(loop) for call in calls(node) if method(call) == "step"
            ]
            objects = [
                self.evaluate(each)
                for call in inside
                if isinstance(call.func, ast.Attribute)
                for each in [call.func.value, *call.args]
            ]
            if any(each is one for each in objects for one in self.watched.optimizers):
                return loop
        return self.route.loops[-1]

    def statements_of(self, loop: Loop) -> list[ast.stmt]:
        """The loop's statements, and those on the way in functions that it calls."""
        called = {each.function for each in self.watched.frames[loop.frame + 1 :]}
        inside = [*loop.node.body, *(each for each in self.route.functions if each.name in called)]
        owner = self.route.owner
        names = set[str]().union(*(used(each) for each in inside)) - called
        hooks = owner.methods_in(names) if owner is not None else []
        return [*inside, *(each for each in hooks if each.name not in called)]

    def is_loader(self, node: ast.expr) -> bool:
        """Whether a loop over it is one over the data loader that trains."""
        inner = self.iterated.unwrapped(node)
        if self.watched.loader is None:
            return False
        value = self.evaluate(inner)
        value = getattr(value, "iterable", value)  # of a progress bar
        return value is self.watched.loader or (
            isinstance(inner, ast.Call)
            and method(inner) == ("DataLoader" if self.watched.zipped is None else "zip")
            and self.loader is None
        )

    def evaluate(self, node: ast.AST) -> Any:
        """The value of a name, an attribute, an item or a constant; None of anything else."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return self.values.get(node.id)
        if isinstance(node, ast.Attribute):
            return getattr(self.evaluate(node.value), node.attr, None)
        if isinstance(node, ast.Subscript):
            try:
                return self.evaluate(node.value)[self.evaluate(node.slice)]
            except (TypeError, KeyError, IndexError):
                return None
        return None

    def because(self, line: int, text: str) -> None:
        """Note why a line changes."""
        if (line, text) not in self.reasons:
            self.reasons.append((line, text))

    def holds_modules(self, name: str) -> bool:
        """Whether a name's value is a part of the model, or a list of parts."""
        return any(
            isinstance(each, nn.Module) and self._is_part(each)
            for each in _items(self.setup_values.get(name))
        )

    def holds_parameters(self, name: str) -> bool:
        """Whether a name's value is parameters, or groups of them."""
        if name in self.model_names or isinstance(self.setup_values.get(name), nn.Module):
            return False
        return any(isinstance(each, nn.Parameter) for each in _items(self.setup_values.get(name), 4))

    def _is_part(self, module: nn.Module) -> bool:
        own = {id(each) for each in self.watched.model.modules()}
        return id(module) in own

    def device_names(self) -> set[str]:
        """Names of the device."""
        return {name for name, each in self.values.items() if isinstance(each, torch.device)}

    def is_device(self, node: ast.AST) -> bool:
        """Whether it is a device, or the name of one."""
        value = self.evaluate(node)
        if value is None and isinstance(node, ast.Call) and method(node) in ("device", "get_device"):
            return True
        return isinstance(value, torch.device) or (
            isinstance(value, str) and value.partition(":")[0] in ("cpu", "cuda", "mps")
        )

    def rows_of_batch(self, target: ast.AST) -> str | None:
        """The name in a loop's target of a tensor with one row for each sample."""
        samples = self.first.samples
        count = len(samples) if samples is not None else len(tensors_of(self.first.batch)[0])
        names = [each.id for each in ast.walk(target) if isinstance(each, ast.Name)]
        return next(
            (
                name
                for name in names
                if isinstance(self.values.get(name), Tensor) and len(self.values[name]) == count
            ),
            None,
        )


def is_talk(node: ast.stmt) -> bool:
    """Whether a statement only tells of something: `print(...)`, `logger.info(...)`."""
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return False
    names = roots(node.value.func)
    return bool(names & set(TALK)) or method(node.value) in (
        "summary",
        "watch",
        "add_scalar",
        "set_description",
    )


def seeds(node: ast.stmt) -> bool:
    """Whether a statement seeds generators."""
    return isinstance(node, ast.Expr) and any("seed" in method(each).lower() for each in calls(node.value))


def configures(node: ast.stmt) -> bool:
    """Whether a statement sets something in torch, as `torch.backends.cudnn.benchmark = True`."""
    if isinstance(node, ast.Assign):
        return any(
            dotted(each).startswith(("torch.", "os.environ", "np.", "sys.")) for each in node.targets
        ) or any(
            isinstance(each, ast.Subscript) and dotted(each.value) == "os.environ" for each in node.targets
        )
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        name = dotted(node.value.func)
        return name.startswith(("torch.set_", "torch.use_", "torch.backends.", "sys.path.", "warnings."))
    return False


def one_refusal(script: Script, line: int, text: str) -> UntranslatedError:
    """Of a line of the innermost file."""
    return UntranslatedError(Refusal(script.route.sources[-1].path.name, line, text))


def uses(node: ast.AST, names: set[str]) -> bool:
    """Whether a node reads one of the names."""
    return bool(used(node) & names)


def _items(value: Any, depth: int = 2) -> list[Any]:
    if depth and isinstance(value, list | tuple):
        return [one for each in value for one in _items(each, depth - 1)]
    if depth and isinstance(value, dict):
        return [one for each in value.values() for one in _items(each, depth - 1)]
    return [value]
