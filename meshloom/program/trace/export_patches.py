"""Patches of torch during an export, which change no values.

Checkpointed blocks are traced through, and count their batches twice, autograd functions become operators, distributions
do not check their arguments, the CTC loss has a shape, caches for generating text are not filled, `.data` is a
detached tensor, calls that failed are taken out, and what is cast is another tensor than what it is cast from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses import fake_impls
from torch.distributions import Distribution
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.utils import checkpoint

from meshloom.program.ir.lines import place_here
from meshloom.program.ir.replaced import replaced
from meshloom.program.operators.autograd_functions import Applied, check_products, refusal, with_operators
from meshloom.program.trace.on_cpu import fake_ctc_loss

_torch: Any = torch  # for private names
_impls: Any = fake_impls
_DATA: Any = Tensor.data
aten = torch.ops.aten
ALIAS: Any = aten.alias.default
_CASTS = frozenset(
    (Tensor.to, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.type, Tensor.type_as)
)


@contextmanager
def patched_for_export() -> Iterator[None]:
    """The patches of all but fake tensors. They hold for all threads, so there is one export at a time."""
    applied: list[Applied] = []
    repeated = RepeatedStatistics()
    generator = "_checkpoint_without_reentrant_generator"
    with (
        replaced(_torch.autograd.function._SingleLevelFunction, "apply", _apply(applied, repeated)),
        replaced(checkpoint, generator, repeated.around(getattr(checkpoint, generator))),
        replaced(_BatchNorm, "forward", repeated.forward(_BatchNorm.forward)),
        _unchecked_distributions(),
    ):
        yield
    check_products(applied)


@contextmanager
def _unchecked_distributions() -> Iterator[None]:
    before = Distribution._validate_args  # pyright: ignore[reportPrivateUsage]
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


@contextmanager
def ctc_loss_without_values() -> Iterator[None]:
    """Gives the CTC loss a fake: only the shape of what it saves for backward depends on labels."""
    table, added = _impls.op_implementations_dict, (aten._ctc_loss.default, aten._ctc_loss.Tensor)
    before = {operator: table[operator] for operator in added if operator in table}
    table.update(dict.fromkeys(added, _fake_ctc_loss))
    try:
        yield
    finally:
        for operator in added:
            del table[operator]
        table.update(before)


def take_out_failed_calls(graph: fx.Graph) -> None:
    """Erases calls that have raised an error, which the user's code has caught, as where it tries a faster way."""
    for node in list(graph.nodes):
        returns = getattr(getattr(node.target, "_schema", None), "returns", ())
        if returns and node.meta.get("val") is None and not node.users:
            graph.erase_node(node)


@contextmanager
def without_cache(model: nn.Module) -> Iterator[bool]:
    """Switches `config.use_cache` off wherever it is on in the model; whether it was."""
    configs = {id(each): each for each in (vars(module).get("config") for module in model.modules())}
    on = [vars(each) for each in configs.values() if getattr(each, "__dict__", {}).get("use_cache") is True]
    try:
        for each in on:
            each["use_cache"] = False
        yield bool(on)
    finally:
        for each in on:
            each["use_cache"] = True


def casts(function: Any, args: Sequence[Any]) -> bool:
    """Whether `function` may cast its first argument, or return it as it is where it has that precision.

    The tracer takes a returned argument for the result of the call from there on. So `h + norm(h.to(float32))` would add
    the result of the cast to it in float32, and `h` in float64: other programs, which no division fits both of. `ALIAS` of
    the tensor is cast in its place.
    """
    return function in _CASTS and isinstance(args[0], Tensor) and args[0].layout == torch.strided


def untraced(function: Any) -> Callable[..., Any] | None:
    """What is traced in place of a function that export does not see: `tensor.data`, the CTC loss, and functions of lists."""
    if function == _DATA.__get__:
        return Tensor.detach
    if function == _DATA.__set__:
        return _set_data
    if function in (torch.ctc_loss, F.ctc_loss):
        return partial(_ctc_loss, function)
    name = getattr(function, "__name__", "")
    method = getattr(Tensor, name.removeprefix("_foreach_"), None) if name.startswith("_foreach_") else None
    return partial(_each, method, name) if method is not None else None


def _set_data(tensor: Tensor, value: Tensor) -> None:
    """Of a program the values count, not their memory."""
    with torch.no_grad():
        tensor.copy_(value)


def _each(method: Callable[..., Any], name: str, tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
    """Of a list of tensors one after another. args: lists for the tensors, or one value for all."""
    results = [
        method(tensor, *(arg[number] if isinstance(arg, list | tuple) else arg for arg in args), **kwargs)
        for number, tensor in enumerate(tensors)
    ]
    return None if name.endswith("_") else results


def _apply(applied: list[Applied], repeated: RepeatedStatistics) -> Any:
    """Applies autograd functions, whose backward graphs do not show. torch's own become operators; others are
    recorded in `applied`. Patched behind `Function.apply`, of which there may be other references."""
    apply = _torch._C._FunctionBase.__dict__["apply"]

    def read(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is checkpoint.CheckpointFunction:
            runs_again = any(isinstance(each, Tensor) and each.requires_grad for each in args[2:])
            with repeated.once_more() if runs_again else nullcontext():
                return args[0](*args[2:])
        if cls.__module__.startswith("torch."):
            return apply.__get__(None, cls)(*args, **kwargs)
        here = Applied(function=cls, args=args, place=place_here(2))
        if kwargs:
            raise refusal(here)
        applied.append(here)
        return with_operators(here)

    return classmethod(read)


class RepeatedStatistics:
    """Batch norms in checkpointed blocks, whose forward runs once more in the backward, in blocks in blocks more often:
    each run counts the batch."""

    def __init__(self) -> None:
        self._depth = 0

    @contextmanager
    def once_more(self) -> Iterator[None]:
        """Inside of a checkpointed block."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def forward(self, run: Any) -> Any:
        """The forward of batch norms."""

        def forward(norm: Any, x: Tensor) -> Tensor:
            y = run(norm, x)
            if norm.training and norm.track_running_stats and torch.is_grad_enabled():
                with torch.no_grad():
                    for _ in range(self._depth):
                        run(norm, x.detach())
            return y

        return forward

    def around(self, generator: Any) -> Any:
        """The generator around a block that is checkpointed without a backward of its own."""

        def generated(*args: Any, **kwargs: Any) -> Iterator[None]:
            inner = generator(*args, **kwargs)
            next(inner)
            try:
                with self.once_more():
                    yield
            except BaseException as error:
                inner.throw(error)
                raise
            next(inner, None)

        return generated


def _ctc_loss(
    function: Callable[..., Tensor],
    scores: Tensor,
    targets: Tensor,
    scores_lengths: Any,
    target_lengths: Any,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Converts lengths in lists to tensors, which the CTC loss would do where they cannot be traced."""
    lengths = (
        each if isinstance(each, Tensor) else torch.tensor(each) for each in (scores_lengths, target_lengths)
    )
    return function(scores, targets, *lengths, *args, **kwargs)


def _fake_ctc_loss(mode: Any, operator: Any, *args: Any, **named: Any) -> tuple[Tensor, Tensor]:
    with mode:
        return fake_ctc_loss(*args)
