"""A loss function's own code as operators: it runs as written, and calls of the model's modules in it are read.

    def loss(model, batch):
        y = model(batch["x"])                                   read
        wrong = (y - batch["y"]).square()
        return wrong.mean() if wrong.max() > 3 else wrong.sum() as written

    y = (the model's program)
    loss = opaque(batch, y)         runs `loss` with a model that returns y when it is called

Where the arguments of a call are computed by the code itself, an operator before it runs the code up to the call. The code
of a module that cannot be read is part of it where the modules that it calls can be:

    def forward(self, x):
        x = self.encoder(x)                                     read
        x = x * 0.5 if x.abs().max() > 3 else x                 as written
        return self.head(x)                                     read
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten, treespec_loads

from meshloom.core.errors import CaptureError
from meshloom.core.job import LossFunction
from meshloom.core.modules.class_code import has_batch_norms
from meshloom.program.ir.encoding import decoded, encoded, encoded_structure
from meshloom.program.ir.nodes import Node, with_parents
from meshloom.program.opaque.call import ChangedCallError, OpaqueCall, plain_text_of
from meshloom.program.opaque.module_tensors import ModuleTensors
from meshloom.program.opaque.operator import OPAQUE, is_opaque
from meshloom.program.opaque.stand_ins import intercepted

LOSS = "the loss function"  # its own code; modules that it calls are read
WHOLE = "the loss function with the model"
METHOD = "loss"
_OWN = "the own code of "


def own_code_of(path: str) -> str:
    """The part that is a module's own code, with that of the modules around it and of the loss function; what they call
    is read."""
    return f"{_OWN}{path or 'the model'}"


def is_code(part: str) -> bool:
    """Whether a part is code that calls modules, and no module."""
    return part in (LOSS, WHOLE) or part.startswith(_OWN)


def modules_entered(part: str) -> tuple[str, ...]:
    """The modules whose own code is a part, the innermost first.

    >>> modules_entered(own_code_of("net.body")), modules_entered(own_code_of("")), modules_entered(LOSS)
    (('net.body', 'net', ''), ('',), ())
    """
    if not part.startswith(_OWN):
        return ()
    path = part.removeprefix(_OWN)
    return tuple(with_parents("" if path == "the model" else path))


class ReachedCallError(Exception):
    """The code has come to the call whose arguments were wanted."""

    def __init__(self, arguments: Any) -> None:
        super().__init__()
        self.arguments = arguments


def modules_of(node: Node) -> tuple[str, ...]:
    """The modules that a node runs as written; none if it is read."""
    if not is_opaque(node):
        return ()
    part = str(node.args[2])
    if part == WHOLE:
        return ("",)
    return () if is_code(part) else (part,)


@dataclass(frozen=True, kw_only=True)
class PlayedCall:
    """A call of a module whose result is given. leaves: of what it returns: numbers of operands, or plain values in
    a list of one."""

    path: str
    spec: TreeSpec
    leaves: tuple[Any, ...]

    @staticmethod
    def of(path: str, returned: Any, number_of: Callable[[Tensor], int]) -> PlayedCall:
        """number_of: the operand that a tensor is. Raises `CaptureError` for results without a name on other
        ranks."""
        leaves, spec = tree_flatten(returned)
        if encoded_structure(spec) is None:
            raise CaptureError(
                f"{path or 'the model'} returns {' '.join(str(spec).split())[:160]}, which has no name on another rank"
            )
        plain = [number_of(each) if isinstance(each, Tensor) else [encoded(each)] for each in leaves]
        return PlayedCall(path=path, spec=spec, leaves=tuple(plain))

    def text(self) -> str:
        """The call as text."""
        return json.dumps([self.path, encoded_structure(self.spec), list(self.leaves)])

    @staticmethod
    def from_text(text: str) -> PlayedCall:
        """Inverse of `text`."""
        path, spec, leaves = json.loads(text)
        return PlayedCall(path=path, spec=treespec_loads(spec), leaves=tuple(leaves))

    def result(self, operands: Sequence[Tensor]) -> Any:
        """What the call returns."""
        leaves = [operands[each] if isinstance(each, int) else decoded(each[0]) for each in self.leaves]
        return tree_unflatten(leaves, self.spec)


def numbers_as_tensors(returned: Any, operands: Sequence[Tensor]) -> Any:
    """What a loss function returns, with a tensor for each number: a weight that it has counted depends on values."""
    device = operands[0].device if operands else None

    def made(leaf: Any) -> Any:
        is_number = isinstance(leaf, int | float) and not isinstance(leaf, bool)
        return torch.tensor(float(leaf), dtype=torch.float64, device=device) if is_number else leaf

    return tree_map(made, returned)


def modules_called(model: nn.Module, part: str) -> list[str]:
    """The modules whose calls in the code of a part are none of it."""
    own = modules_entered(part)
    return [
        path
        for path, each in (model.named_modules() if part != WHOLE else ())
        if path not in own and not isinstance(each, torch.jit.ScriptModule)
    ]


class OpaqueLoss:
    """A loss function's own code as the target of a node: up to the call after those that are played, or to its end.
    part: with the code of which modules."""

    _schema = OPAQUE._schema

    def __init__(self, loss: LossFunction, model: nn.Module, part: str, call: OpaqueCall) -> None:
        self.opaque_call = call
        self._loss, self._model, self._part = loss, model, part
        self._played = [PlayedCall.from_text(each) for each in call.played]
        self._tensors = ModuleTensors(model, call.state)
        # all modules: another one may be called now, of which this rank has no parameters
        self._paths = modules_called(model, part)
        self.has_batch_norms = has_batch_norms(model.modules())

    def __str__(self) -> str:
        return str(OPAQUE)

    def __call__(
        self, inputs: Sequence[Tensor], state: Sequence[Tensor], path: str, text: str
    ) -> list[Tensor]:
        """The tensors of the next call's arguments, or of what the loss returns."""
        call = self.opaque_call
        # what is hooked is this run's alone
        inputs = [each.view_as(each) if each.requires_grad else each for each in inputs]
        (batch,), _ = call.arguments(inputs)
        following = iter(self._played)

        def handle(
            path: str, module: nn.Module, method: str, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:
            known = next(following, None)
            if known is None:
                raise ReachedCallError((args, kwargs))
            if known.path != path:
                raise self._changed(
                    f"called {path or 'the model'} for this batch where it called {known.path or 'the model'} when it was captured: it depends on values"
                )
            return known.result(inputs)

        with self._tensors.running_on(state, call.written), intercepted(self._model, self._paths, handle):
            try:
                found = numbers_as_tensors(self._loss(self._model, batch), inputs)
            except ReachedCallError as reached:
                found = reached.arguments
        leaves = tree_leaves(found)
        if plain_text_of(leaves) != call.returned:
            raise self._changed(
                "gave a module other numbers for this batch than when it was captured: they depend on values"
            )
        results = [leaves[place] for place in call.places if place < len(leaves)]
        shapes = [tuple(each.shape) if isinstance(each, Tensor) else None for each in results]
        wanted = [each.shape for each in call.results]
        if len(leaves) != call.num_leaves or shapes != wanted:
            raise self._changed(
                f"made tensors of shapes {shapes} for this batch, and of {wanted} when it was captured: they depend on values"
            )
        return results

    def _changed(self, what: str) -> ChangedCallError:
        own = modules_entered(self._part)
        way_out = (
            f"Make {own[0] or 'the model'} opaque, with what it calls, by Job(opaque=...)."
            if own
            else "Put the choice into the model, or give it a tensor in place of a number."
        )
        return ChangedCallError(self._part, f"{self._part[0].upper()}{self._part[1:]} {what}. {way_out}")
