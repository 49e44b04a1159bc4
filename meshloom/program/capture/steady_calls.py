"""Whether code calls the same modules whatever values there are.

    x = self.encoder(x)
    if x.abs().max() > 3:                 other answers: the same calls
        x = x * 0.5
    for _ in range(int(length.max())):    other answers: more calls
        x = self.cell(x)

No module runs: each returns what it returned, with other values, or the code gets another answer where it asks a tensor for
its value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map_only

from meshloom.core.errors import CaptureError
from meshloom.core.job import LossFunction
from meshloom.core.moments.branches import branches_as_written
from meshloom.core.random import preserved_draws
from meshloom.program.capture.opaque_runs import CallMeter, MoreCallsError, negated, turned
from meshloom.program.capture.restored import restored
from meshloom.program.ir.leaves import Leaves
from meshloom.program.opaque.call import plain_text_of, split_arguments
from meshloom.program.opaque.loss_code import numbers_as_tensors
from meshloom.program.opaque.stand_ins import intercepted

MOST_ASKED = 32  # questions that get another answer
MOST_RUN = 30_000  # operators in all runs; loops over values would take minutes, for each shape of a batch
_QUESTIONS = ("__bool__", "item", "__float__", "__int__", "__index__")
_CHANGES = (negated, turned, lambda each: _times(each, 100.0), lambda each: _times(each, 0.01))


def check_calls_are_steady(
    model: nn.Module,
    loss: LossFunction,
    leaves: Leaves,
    paths: Sequence[str],
    calls: Sequence[tuple[str | None, Any, Any]],
) -> None:
    """Raise `CaptureError` where values decide what code calls of the modules at `paths`, or gives them besides values.

    calls: (path, arguments, result) of each, and (None, what the loss returned, None). A run that fails with other values tells
    nothing.
    """
    wanted = [(path, _layout(given)) for path, given, _ in calls]
    left = MOST_RUN

    def run(change: Any, asked: _Asked) -> None:
        nonlocal left
        at = 0

        def come_to(path: str | None, given: Any) -> None:
            nonlocal at
            if wanted[at] != (path, _layout(given)):
                raise _OtherCallError
            at += 1

        def handle(
            path: str, module: nn.Module, method: str, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:
            with asked.paused():
                come_to(path, (args, kwargs))
                return tree_map_only(Tensor, lambda each: _alike(each, change(each)), calls[at - 1][2])

        with restored(model), preserved_draws(), intercepted(model, paths, handle):
            batch = leaves.rebuild([change(each) for each in leaves.tensors.values()])
            with suppress(Exception), branches_as_written(), CallMeter(left) as meter:
                try:
                    with asked:
                        returned = loss(model, batch)
                    come_to(None, numbers_as_tensors(returned, split_arguments((batch,), {})[2]))
                finally:
                    left -= meter.calls

    try:
        for change in _CHANGES:
            run(change, _Asked())
        run(_copied, as_they_are := _Asked())
        for number, answer in enumerate(as_they_are.answers[:MOST_ASKED]):
            for other in _other_answers(answer):
                run(_copied, _Asked({number: other}))
    except MoreCallsError as error:
        raise CaptureError(f"trying it with other values takes more than {MOST_RUN} operators") from error
    except _OtherCallError as error:
        raise CaptureError("what it calls, or the shapes of what it gives, may depend on values") from error


class _OtherCallError(BaseException):
    """Code calls what it did not call. It is none of the errors that this code may catch."""


class _Asked(TorchFunctionMode):
    """The answers where code asks tensors for values. others: number of a question -> what it is told instead."""

    def __init__(self, others: Mapping[int, Any] | None = None) -> None:
        super().__init__()
        self.answers: list[Any] = []
        self._others, self._is_paused = others or {}, False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which others ask."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        answer = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") not in _QUESTIONS or self._is_paused:
            return answer
        self.answers.append(answer)
        return self._others.get(len(self.answers) - 1, answer)


def _other_answers(answer: Any) -> list[Any]:
    if isinstance(answer, bool):
        return [not answer]
    if isinstance(answer, int):
        return [answer + 1, answer - 1, answer + 1000, answer - 1000]
    far = 1000 * (1 + abs(answer)) if isinstance(answer, float) else 0
    return [answer + far, answer - far] if far else []


def _alike(tensor: Tensor, value: Tensor) -> Tensor:
    """`value` as what a call made; code hooks its gradient only where it has one."""
    return value.requires_grad_().clone() if tensor.requires_grad else value


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _times(tensor: Tensor, factor: float) -> Tensor:
    return tensor.detach() * factor if tensor.is_floating_point() else tensor.clone()


def _layout(value: Any) -> Any:
    leaves, spec = tree_flatten(value)
    tensors = [(tuple(each.shape), each.dtype) for each in leaves if isinstance(each, Tensor)]
    return spec, plain_text_of(leaves), tensors
