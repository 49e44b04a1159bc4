"""Exports a loss with `torch.export`, as a flat graph whose nodes have their contexts and the user's lines.

`torch.export` turns autocast and grad-mode regions into higher-order nodes, splits nested ones wrongly, and
loses grad modes set inside of autocast. So these regions are hidden from it: entering and leaving them is
recorded here, and every node gets the context in which it was created. The same hook records the line.
"""

from __future__ import annotations

import io
import logging
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten

from meshloom.core.errors import CaptureError
from meshloom.core.modules.module_caches import no_tensors_kept
from meshloom.core.modules.named_leaves import is_function, shown
from meshloom.program.gradients.gradient_trace import trace_with_gradients
from meshloom.program.ir.contexts import Autocast, Context
from meshloom.program.ir.leaves import copy_of
from meshloom.program.ir.lines import WAY_OUT, WAYS_OUT, SourceLine, SourcePlace, place_here, place_of_error
from meshloom.program.opaque.stand_ins import Recorded, standing_in
from meshloom.program.trace.attributes import attributes_restored, containers_kept
from meshloom.program.trace.block_calls import SHORTCUTS, ShortcutError, Shortcuts
from meshloom.program.trace.export_patches import (
    ALIAS,
    casts,
    ctc_loss_without_values,
    patched_for_export,
    take_out_failed_calls,
    untraced,
    without_cache,
)
from meshloom.program.trace.folding import Folding
from meshloom.program.trace.inner_gradients import (
    InnerGradientError,
    InnerGradients,
    accumulation_refused,
    hooks_of_autograd_refused,
    transforms_ended,
)

_torch: Any = torch  # for private names
META = "custom"  # the one key of node.meta that export carries through all of its passes


@dataclass(frozen=True, kw_only=True)
class Exported:
    """An exported loss.

    graph: placeholders, ATen calls (with in-place operators), outputs.
    parameters, buffers: placeholder -> name in the user's module.
    constants: placeholder -> its tensor.
    inputs: placeholders of the batch's leaves, in order.
    out_spec: structure of the outputs.
    switched: a module that the forward switched between training and evaluation; None: it did not.
    """

    graph: fx.Graph
    parameters: dict[str, str]
    buffers: dict[str, str]
    constants: dict[str, Tensor]
    inputs: list[str]
    out_spec: TreeSpec
    switched: str | None


def export(
    model: nn.Module,
    loss: Callable[[nn.Module], Any],
    leaves: Sequence[Tensor],
    shortcuts: Shortcuts = SHORTCUTS[-1],
    recorded: Recorded | None = None,
) -> Exported:
    """Export `loss(model, leaves)`. recorded: calls of opaque modules, which become operators.

    Raises `CaptureError`; `ShortcutError` if a shortcut was taken, as that may be the cause.
    """
    # a call is traced by itself where functions may be leaves inside
    fold = shortcuts.fold and not any(map(is_function, recorded or ()))
    folding = Folding() if fold else None
    with without_cache(model) if shortcuts.no_cache else nullcontext(False) as switched:
        try:
            return _exported(model, loss, leaves, folding, recorded or {})
        except ValuesDecideError:
            raise  # with fewer shortcuts they would, too
        except InnerGradientError as error:
            return _traced(model, loss, leaves, recorded or {}, error)
        except CaptureError as error:
            if switched or (folding is not None and folding.count):
                raise ShortcutError(str(error)) from error
            raise


def _exported(
    model: nn.Module,
    loss: Callable[[nn.Module], Any],
    leaves: Sequence[Tensor],
    folding: Folding | None,
    recorded: Recorded,
) -> Exported:
    seen = _Seen(folding=folding, recorded=recorded)
    wrapper = _Loss(model, loss, seen)
    with _for_tracing(), containers_kept(model), no_tensors_kept():
        try:
            exported = torch.export.export(wrapper, _copies(leaves), strict=False)
        except CaptureError:
            raise
        except Exception as error:
            seen.gradients.check()
            seen.gradients.check_error(error)
            raise _explained(error) from error
    seen.gradients.check(exported.graph_module.graph)
    return _from_exported(exported, seen)


def _traced(
    model: nn.Module,
    loss: Callable[[nn.Module], Any],
    leaves: Sequence[Tensor],
    recorded: Recorded,
    taken: InnerGradientError,
) -> Exported:
    """The loss with the gradients that it takes itself, which export does not see."""
    if recorded:
        raise CaptureError(
            f"{str(taken).removesuffix('.')}, beside the leaf {', '.join(map(shown, recorded))}, and what is traced with its gradients has no leaves. "
            f"Take the gradient inside of the leaf, or write the leaf with torch operators. {WAY_OUT}"
        )
    seen = _Seen(traced=True)
    wrapper = _Loss(model, loss, seen)
    with _for_tracing():
        try:
            found = trace_with_gradients(wrapper, _copies(leaves), meta=META)
        except CaptureError:
            raise
        except Exception as error:
            raise _explained(error) from error
    assert seen.out_spec is not None
    take_out_failed_calls(found.graph)
    names = (
        {value: name.removeprefix("model.") for value, name in each.items()}
        for each in (found.parameters, found.buffers)
    )
    parameters, buffers = names
    return Exported(
        graph=found.graph, parameters=parameters, buffers=buffers, constants=found.constants, inputs=found.inputs,
        out_spec=seen.out_spec, switched=seen.switched,
    )  # fmt: skip


def _copies(leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The same tensor twice becomes two."""
    return tuple(map(copy_of, leaves))


@contextmanager
def _for_tracing() -> Iterator[None]:
    with (
        warnings.catch_warnings(),
        patched_for_export(),
        ctc_loss_without_values(),
        _quiet(),
        transforms_ended(),
    ):
        warnings.simplefilter("ignore")  # about attributes, which are checked here
        yield


def context_of(node: fx.Node) -> Context:
    """The context in which a node was created."""
    return node.meta.get(META, {}).get("context", Context())


def line_of(node: fx.Node) -> SourceLine | None:
    """The user's line that created a node."""
    place = node.meta.get(META, {}).get("place")
    return place.line if place else None


def path_of(node: fx.Node) -> str:
    """Name of the module whose forward created a node; '' for the model itself and the loss function."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    return path.removeprefix("model").removeprefix(".")


def describe_place(node: fx.Node) -> str:
    """Where a node was created, for an error."""
    return str(node.meta.get(META, {}).get("place", SourcePlace(None, None)))


@dataclass
class _Seen:
    """Findings of the forward besides the graph, outside of modules, whose attributes export restores."""

    out_spec: TreeSpec | None = None
    switched: str | None = None
    gradients: InnerGradients = field(default_factory=InnerGradients)
    traced: bool = False  # with the gradients that the loss takes
    folding: Folding | None = None
    recorded: Recorded = field(default_factory=dict[str, Any])


class _Loss(nn.Module):
    """The loss as a module of the batch's leaves, with the model as its submodule `model`."""

    def __init__(self, model: nn.Module, loss: Callable[..., Any], seen: _Seen) -> None:
        super().__init__()
        self.training = model.training
        self.model = model
        self._loss = loss
        self._seen = seen

    def forward(self, *leaves: Tensor) -> tuple[Any, ...]:
        before = [(path, each, each.training) for path, each in self.model.named_modules()]
        with (
            _recorded(self.model, self._seen.folding),
            attributes_restored(self.model),
            standing_in(self.model, self._seen.recorded),
            _written_buffers(self.model),
            hooks_of_autograd_refused(),
            accumulation_refused(self.model) if self._seen.traced else self._seen.gradients.recorded(),
        ):
            value = self._loss(self.model, leaves)
        self._seen.switched = next((path for path, each, mode in before if each.training != mode), None)
        flat, self._seen.out_spec = tree_flatten(value)
        return tuple(flat)


@contextmanager
def _recorded(model: nn.Module, folding: Folding | None) -> Iterator[None]:
    """Records context and line of every node, hides regions from the graph, and folds identical calls."""
    modes = _torch.overrides._get_current_function_mode_stack()
    mode: Any = next((each for each in modes if isinstance(each, PreDispatchTorchFunctionMode)), None)
    if mode is None:  # export also runs some modules without tracing
        yield
        return
    regions: list[Autocast] = []
    count = 0
    contexts: dict[tuple[tuple[Autocast, ...], bool], Context] = {}

    def function(
        self: Any, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        nonlocal count
        if func is _torch.amp.autocast_mode._enter_autocast:
            device, dtype, enabled, cache = args
            regions.append(Autocast(number=count, device=device, dtype=dtype, enabled=enabled, cache=cache))
            count += 1
            return None
        if func is _torch.amp.autocast_mode._exit_autocast:
            regions.pop()
            return None
        if func is _torch._C._set_grad_enabled:
            with _torch._C.DisableTorchFunction():
                return func(*args)
        traced = untraced(func)
        if traced is not None:
            return traced(*args, **(kwargs or {}))
        if casts(func, args):
            args = recorded(ALIAS, kinds, args[:1]), *args[1:]
        return recorded(func, kinds, args, kwargs)

    def create(*args: Any, **kwargs: Any) -> fx.Node:
        node = create_node(*args, **kwargs)
        key = tuple(regions), torch.is_grad_enabled()
        context = contexts.setdefault(key, Context(autocast=key[0], grad=key[1]))
        node.meta[META] = {"context": context, "place": place_here(2)}
        return node

    recorded, create_node = mode.__torch_function__, mode.tracer.create_node
    caching = torch.is_autocast_cache_enabled()
    mode.__torch_function__ = types.MethodType(function, mode)
    mode.tracer.create_node = create
    torch.set_autocast_cache_enabled(True)  # disabled while tracing, but regions record it

    def around() -> Any:
        opened = tuple((each.device, each.dtype, each.enabled, each.cache) for each in regions)
        return opened, torch.is_grad_enabled()

    try:
        with folding.folded_inside(model, around) if folding is not None else nullcontext():
            yield
    finally:
        torch.set_autocast_cache_enabled(caching)
        del mode.__torch_function__, mode.tracer.create_node


@contextmanager
def _written_buffers(model: nn.Module) -> Iterator[None]:
    """Turns the replacement of a buffer by another tensor into a write to it at the end of the forward."""
    before = [
        (module, name, buffer, buffer.shape)
        for module in model.modules()
        for name, buffer in vars(module).get("_buffers", {}).items()  # none of a traced one
        if buffer is not None
    ]
    yield
    for module, name, buffer, shape in before:
        now = vars(module)["_buffers"].get(name)
        if now is buffer and now.shape == shape:
            continue
        where = f"the buffer {name} of {type(module).__name__}"
        if now is None or now.shape != shape:
            other = "nothing" if now is None else f"one of shape {list(now.shape)}"
            raise CaptureError(
                f"The forward replaces {where}, of shape {list(shape)}, by {other}, and a program keeps its shape. {WAYS_OUT}"
            )
        with torch.no_grad():
            buffer.copy_(now)
        vars(module)["_buffers"][name] = buffer


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences what export prints and logs about graphs that it could not finish."""
    loggers = [
        logging.getLogger(name)
        for name in ("torch.export", "torch.fx.experimental", "torch._dynamo", "torch._subclasses")
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _from_exported(exported: ExportedProgram, seen: _Seen) -> Exported:
    assert seen.out_spec is not None
    graph = exported.graph_module.graph
    take_out_failed_calls(graph)
    result = Exported(
        graph=graph, parameters={}, buffers={}, constants={}, inputs=[],
        out_spec=seen.out_spec, switched=seen.switched,
    )  # fmt: skip
    for spec in exported.graph_signature.input_specs:
        name = spec.arg.name
        target = (spec.target or "").removeprefix("model.")
        if spec.kind is InputKind.PARAMETER:
            result.parameters[name] = target
        elif spec.kind is InputKind.BUFFER:
            result.buffers[name] = target
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            constant: Any = exported.constants[spec.target or ""]
            result.constants[name] = constant.detach().clone()
        elif spec.kind is InputKind.USER_INPUT:
            result.inputs.append(name)
        else:
            raise CaptureError(
                f"The loss uses {spec.target}, which is neither a tensor nor a number, so it cannot be captured. {WAY_OUT}"
            )
    for node in graph.nodes:
        if node.op == "get_attr" or isinstance(node.target, _torch._ops.HigherOrderOperator):
            raise CaptureError(
                f"{node.target} at {describe_place(node)} is control flow or a kernel that a program cannot represent. {WAYS_OUT}"
            ).at(path_of(node))
    return result


class ValuesDecideError(CaptureError):
    """A loss of which values in the batch decide what runs."""


def _explained(error: Exception) -> CaptureError:
    place = place_of_error(error.__traceback__)
    kind = type(error).__name__
    text = str(error).strip()
    first = text.splitlines()[0].rstrip(".") if text else kind
    of_values = "GuardOnDataDependentSymNode", "UserError", "DataDependentOutputException", "UserErrorType"
    if kind in of_values or "data-dependent" in text or text.startswith(".numpy()"):
        return ValuesDecideError(
            f"What runs depends on the values in the batch at {place}, so no one program computes it: {first[:160]}. "
            "Write a choice with torch.where, and functions of meshloom.step(), which is a tensor here, with torch's (torch.cos, not math.cos); leave out what "
            f"only checks values: training stops at what is not finite. {WAYS_OUT}"
        )
    return CaptureError(
        f"The loss could not be captured at {place}: {kind}: {first[:200]}. Write it with torch operators. {WAYS_OUT}"
    )
