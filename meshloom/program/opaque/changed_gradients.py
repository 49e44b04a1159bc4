"""Whether code that runs once for each of its calls changes gradients as it does where it runs once.

    h = clipped(self.embed(x))            its backward: g / 2 if g.norm() > 4 else g
    h = h + self.block(h)                 one run: the sum of both gradients is clipped
    return self.head(h)                   a run for each call: each gradient is, by itself

Torch's own operators are linear in the gradient, so that it does not matter to them. An own `autograd.Function` and a hook on a
tensor may be anything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from meshloom.core.errors import CaptureError

_Place = tuple[Any, int]  # of a tensor in autograd's graph: what made it, which of its results it is


@dataclass(frozen=True, kw_only=True)
class _Hook:
    """calls: of modules, before it was registered. within: whether a module that the code calls registered it."""

    place: _Place
    calls: int
    within: bool


class ChangedGradients(TorchFunctionMode):
    """Hooks that are registered on gradients of tensors while code runs."""

    def __init__(self) -> None:
        super().__init__()
        self._found: list[_Hook] = []
        self._calls, self._is_within = 0, False

    @property
    def has_hooked(self) -> bool:
        """Whether the code itself has registered one."""
        return any(not each.within for each in self._found)

    @contextmanager
    def calling(self) -> Iterator[None]:
        """A call of a module."""
        self._is_within = True
        try:
            yield
        finally:
            self._is_within = False
            self._calls += 1

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.register_hook:
            place = args[0].grad_fn, args[0].output_nr
            self._found.append(_Hook(place=place, calls=self._calls, within=self._is_within))
        return func(*args, **(kwargs or {}))

    def check(self, calls: Sequence[tuple[Any, Any]]) -> None:
        """Raise `CaptureError` where a gradient that is changed comes from several runs of the code, or from one that
        ends before the hook is there.

        calls: arguments and results of each; the last one, of what the code returns and nothing.
        """
        runs: defaultdict[Any, set[int]] = defaultdict(set)  # place, or own function -> runs that reach it
        returned: set[_Place] = set()
        for number, (given, result) in enumerate(calls):
            for place in _reached(given, returned):
                runs[place].add(number)
                if place not in returned and isinstance(place[0], BackwardCFunction):
                    runs[place[0]].add(number)
            # a module that returns its argument made nothing
            returned |= _places(result) - _places(given)
        several = [each for each, found in runs.items() if len(found) > 1 and not isinstance(each, tuple)]
        if several:
            name = type(several[0]).__name__.removesuffix("Backward")
            raise CaptureError(f"gradients of several of its calls come together in {name}")
        for hook in self._found:
            if hook.within and (hook.place in returned or hook.place[0] is None):
                continue  # the module's own
            found = runs[hook.place]
            if hook.place[0] is None or len(found) > 1 or min(found, default=hook.calls) < hook.calls:
                raise CaptureError(
                    "it hooks a gradient that comes from several of its calls, from one before the hook is there, or to a parameter"
                )


def _places(value: Any) -> set[_Place]:
    tensors = [each for each in tree_leaves(value) if isinstance(each, Tensor)]
    return {(each.grad_fn, each.output_nr) for each in tensors if each.grad_fn is not None}


def _reached(given: Any, until: Set[_Place]) -> set[_Place]:
    """The places that gradients of what is `given` come to, not beyond `until`."""
    found: set[_Place] = set()
    ahead = list(_places(given))
    while ahead:
        place = ahead.pop()
        if place in found:
            continue
        found.add(place)
        if place not in until:
            ahead += [
                (function, number) for function, number in place[0].next_functions if function is not None
            ]
    return found
