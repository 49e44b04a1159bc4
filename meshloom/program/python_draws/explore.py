"""Finds all paths of a loss: it runs once for each, with the outcomes of its tests given."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from meshloom.core.errors import CaptureError
from meshloom.core.job import LossFunction
from meshloom.core.moments.current_step import Moment
from meshloom.program.ir.lines import WAY_OUT, describe_line, is_users, place_of_error
from meshloom.program.python_draws.following import MAX_WAYS, Follower, check_followed
from meshloom.program.python_draws.paths import Path

EXAMPLE = Moment(0, 0)  # of the values that paths are found with
_TELLING = {"random", "step"}


class DrawnBatch(dict[str, Any]):
    """A batch, and the inputs that its chunk's draws are. loss: of the path that it goes."""

    def __init__(self, loss: LossFunction, batch: Any, drawn: Sequence[Tensor]) -> None:
        super().__init__(batch=batch, drawn=list(drawn))
        self.loss = loss


def loss_of_path(loss: LossFunction, path: Path) -> LossFunction:
    """The loss of a `DrawnBatch` that goes this path."""
    return partial(_followed, loss, path.text)


def _followed(loss: LossFunction, text: str, model: nn.Module, batch: DrawnBatch) -> Any:
    path = Path.parse(text)
    follower = Follower(EXAMPLE, path.outcomes, batch["drawn"])
    with follower.following():
        found = loss(model, batch["batch"])
    check_followed(follower, path)
    return found


def explore(run: Callable[[], Any]) -> list[Path]:
    """All paths of what `run` runs, the one with the most operators first; none if it draws nothing.

    Raises `CaptureError` if there are too many, or a draw is used in a way that cannot be followed.
    """
    waiting: list[tuple[Any, ...]] = [()]
    found: dict[Path, int] = {}
    while waiting:
        forced = waiting.pop()
        follower = Follower(EXAMPLE, forced)
        try:
            with follower.following():
                run()
        except CaptureError:
            raise
        except Exception as error:
            if not follower.events:
                return []  # whoever captures it says what is wrong
            if not forced:
                raise _without_values(error) from error
            continue  # what is drawn may never lead here
        if not follower.events:
            return []
        found[follower.path] = follower.calls
        if len(found) > MAX_WAYS:
            raise CaptureError(
                f"What is drawn at {describe_line(follower.lines[0])} decides what runs, in more than "
                f"{MAX_WAYS} ways, and each is a program of its own. Multiply by the outcome instead, so that it becomes an input: "
                f"x + float_of * layer(x), with float_of = torch.tensor(random.random()) >= p. {WAY_OUT}"
            )
        outcomes = follower.path.outcomes
        for number in range(len(forced), len(outcomes)):
            waiting += [(*outcomes[:number], other) for other in follower.alternatives[number]]
    return sorted(found, key=lambda each: -found[each])


def _without_values(error: Exception) -> CaptureError:
    first = next(iter(str(error).strip().splitlines()), "").rstrip(".")
    return CaptureError(
        f"The loss draws with random or numpy, or asks for meshloom.step(), and what it runs could not be found without values at "
        f"{place_of_error(error.__traceback__)}: {type(error).__name__}: {first[:160]}. {WAY_OUT}"
    )


def may_draw(loss: LossFunction, model: nn.Module) -> bool:
    """Whether the code of the loss and the model may name `random`, `numpy.random` or `meshloom.step`."""
    functions = _closed_over(loss)
    names = {getattr(each, "__module__", None) for each in functions}
    names |= {type(each).__module__ for each in (*functions, *model.modules())}
    return any(map(_draws, functions)) or any(map(_module_draws, _with_users(filter(None, names))))


def _closed_over(loss: Any) -> list[Any]:
    """The loss and the callables that it wraps or closes over, which no module may name."""
    waiting, found = [loss], list[Any]()
    while waiting:
        each = waiting.pop()
        if not callable(each) or any(each is other for other in found):
            continue
        found.append(each)
        if isinstance(each, partial):
            waiting += [each.func, *each.args, *each.keywords.values()]
        function = _undecorated(getattr(each, "__func__", each))
        if isinstance(function, FunctionType):
            cells = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
            waiting += [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return found


def _with_users(names: Iterator[str]) -> list[ModuleType]:
    """The modules of these names, and the user's modules that they use."""
    waiting = [sys.modules[each] for each in names if each in sys.modules]
    found: dict[str, ModuleType] = {}
    while waiting:
        module = waiting.pop()
        if module.__name__ in found or module.__name__.split(".")[0] in ("torch", "meshloom", "builtins"):
            continue
        found[module.__name__] = module
        for value in list(vars(module).values()):
            name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
            used = sys.modules.get(name) if isinstance(name, str) else None
            if used is not None and is_users(getattr(used, "__file__", None) or "<>"):
                waiting.append(used)
    return list(found.values())


def _module_draws(module: ModuleType) -> bool:
    for value in list(vars(module).values()):
        own = list(vars(value).values()) if isinstance(value, type) else [value]
        for each in own:
            if _draws(each):
                return True
    return False


def _draws(value: Any) -> bool:
    function = _undecorated(getattr(value, "__func__", value))
    return isinstance(function, FunctionType) and not _TELLING.isdisjoint(_names(function.__code__))


def _undecorated(function: Any) -> Any:
    """What `torch.no_grad()` and the like are put around."""
    while isinstance(function, FunctionType) and "__wrapped__" in vars(function):
        function = vars(function)["__wrapped__"]
    return function


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names(each)
