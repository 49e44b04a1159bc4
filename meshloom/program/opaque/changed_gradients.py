"""Whether code that runs once for each of its calls changes gradients as it does where it runs once.

    h = clipped(self.embed(x))            its backward: g / 2 if g.norm() > 4 else g
    h = h + self.block(h)                 one run: the sum of both gradients is clipped
    return self.head(h)                   a run for each call: each gradient is, by itself

Torch's own operators are linear in the gradient, so that it does not matter to them. An own `autograd.Function` and a hook on a
tensor may be anything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import tree_leaves

from meshloom.core.errors import CaptureError
from meshloom.program.opaque.gradient_hooks import node_hooks_seen, saving_hooks_seen, tensor_hooks_seen

_Place = tuple[Any, int]  # of a tensor in autograd's graph: what made it, which of its results it is


@dataclass(frozen=True, kw_only=True)
class _Hook:
    """node: with the hook, or whose result has it. number: of the result; None: the node has it. calls: of modules, before it was registered.
    within: whether a module that the code calls registered it."""

    node: Any
    number: int | None
    calls: int
    within: bool


class ChangedGradients:
    """Hooks that are registered on gradients while code runs."""

    def __init__(self) -> None:
        self._found: list[_Hook] = []
        self._calls, self._is_within, self._saves = 0, False, False

    @property
    def has_hooked(self) -> bool:
        """Whether the code itself has registered one."""
        return any(not each.within for each in self._found)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A run of the code."""
        with (
            tensor_hooks_seen(lambda each: self._note(each.grad_fn, each.output_nr)),
            node_hooks_seen(lambda node: self._note(node, None)),
            saving_hooks_seen(self._note_saving),
        ):
            yield

    @contextmanager
    def calling(self) -> Iterator[None]:
        """A call of a module."""
        self._is_within = True
        try:
            yield
        finally:
            self._is_within = False
            self._calls += 1

    def _note(self, node: Any, number: int | None) -> None:
        node = None if hasattr(node, "variable") else node  # it adds to a parameter's gradient
        self._found.append(_Hook(node=node, number=number, calls=self._calls, within=self._is_within))

    def _note_saving(self) -> None:
        self._saves |= not self._is_within

    def check_own(self, given: Any) -> None:
        """Raise `CaptureError` where code has hooked a gradient of what it was `given`, of a parameter, or of what made these: elsewhere
        other code may use them as well, and the hook sees what all of it adds up to."""
        before = {node for node, _ in _reached(given, set())} if self._found else set[Any]()
        if any(each.node is None or each.node in before for each in self._found):
            raise CaptureError("it hooks a gradient of what it is given, or of a parameter")

    def check(self, calls: Sequence[tuple[Any, Any]]) -> None:
        """Raise `CaptureError` where a gradient that is changed comes from several runs of the code, or from one that
        ends before the hook is there.

        calls: arguments and results of each; the last one, of what the code returns and nothing.
        """
        if self._saves and len(calls) > 1:
            raise CaptureError("it changes what is saved for backward, of what it calls as well")
        runs: defaultdict[Any, set[int]] = defaultdict(
            set
        )  # place, or node of the code -> runs that reach it
        returned: set[_Place] = set()
        for number, (given, result) in enumerate(calls):
            for place in _reached(given, returned):
                runs[place].add(number)
                if place not in returned:
                    runs[place[0]].add(number)
            # a module that returns its argument made nothing
            returned |= _places(result) - _places(given)
        for node, found in runs.items():
            if isinstance(node, BackwardCFunction) and len(found) > 1:
                name = type(node).__name__.removesuffix("Backward")
                raise CaptureError(f"gradients of several of its calls come together in {name}")
        for hook in self._found:
            place = hook.node if hook.number is None else (hook.node, hook.number)
            if hook.within and (hook.node is None or place in returned):
                continue  # the module's own
            found = runs[place]
            # of a node that no run of the code comes to, a module's results are made
            is_elsewhere = hook.number is None and not hook.within and not found and len(calls) > 1
            if (
                hook.node is None
                or is_elsewhere
                or len(found) > 1
                or min(found, default=hook.calls) < hook.calls
            ):
                raise CaptureError(
                    "it hooks a gradient that comes from several of its calls, from one before the hook is there, from within a module, or to a parameter"
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
