"""A trace of a loss below autograd, in which the gradients that the loss takes itself are operators like others.

`torch.export` traces above autograd, where a gradient taken inside the loss leaves no operators. `make_fx` traces below
it: composite operators are decomposed, and what autograd runs for `torch.autograd.grad` or `torch.func` is recorded
like a forward. Autograd puts one thing into such a trace that is wrong in it: where it saves an operator's result for
its backward (tanh, exp, softmax), it detaches it, and links it to the graph again by itself. In the trace nothing
links it, and gradients of the loss would be missing a term. So these detaches are taken out; those of the user stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import PythonKeyTracer, make_fx

from meshloom.program.gradients.decompositions import decompositions
from meshloom.program.ir.contexts import Context
from meshloom.program.ir.lines import place_here
from meshloom.program.ir.replaced import replaced

_torch: Any = torch  # for private names
_DETACH = torch.ops.aten.detach.default
_USERS = "meshloom_users_detach"


@dataclass(frozen=True, kw_only=True)
class GradientTrace:
    """A traced module, with the contexts, lines and module paths that `program/trace/export.py` reads from nodes.

    graph: placeholders, ATen calls (with in-place operators), outputs.
    parameters, buffers: placeholder -> name in the module. constants: placeholder -> its tensor.
    inputs: placeholders of the inputs, in order.
    """

    graph: fx.Graph
    parameters: dict[str, str]
    buffers: dict[str, str]
    constants: dict[str, Tensor]
    inputs: list[str]


def trace_with_gradients(module: nn.Module, inputs: Sequence[Tensor], *, meta: str) -> GradientTrace:
    """Trace `module(*inputs)`, which returns a flat tuple. The module is unchanged afterwards.

    meta: the key of a node's context and place in `node.meta`.
    """
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    state = [*parameters.values(), *buffers.values()]
    places = _Places(paths={id(vars(each)): path for path, each in module.named_modules()}, meta=meta)

    def run(*given: Tensor) -> Any:
        fakes = {id(real): fake for real, fake in zip(state, given, strict=False)}
        with _holding(module, fakes), places.recorded():
            return module(*given[len(state) :])

    traced = make_fx(
        run, tracing_mode="fake", decomposition_table=decompositions(), _allow_non_fake_inputs=True
    )(*state, *inputs)
    graph: fx.Graph = traced.graph
    _without_detaches_of_autograd(graph)
    given = [node.name for node in graph.nodes if node.op == "placeholder"]
    constants = _constants_as_placeholders(traced)
    first_buffer, first_input = len(parameters), len(state)
    return GradientTrace(
        graph=graph,
        parameters=dict(zip(given[:first_buffer], parameters, strict=True)),
        buffers=dict(zip(given[first_buffer:first_input], buffers, strict=True)),
        constants=constants,
        inputs=given[first_input:],
    )


@contextmanager
def _holding(module: nn.Module, instead: dict[int, Tensor]) -> Iterator[None]:
    """Puts other tensors into a module, tied ones in all their places, and takes them out on exit."""
    held: list[tuple[Any, str, Tensor]] = [
        (owner, name, tensor)
        for owner in module.modules()
        for kind in ("_parameters", "_buffers")
        for name, tensor in vars(owner)[kind].items()
        if tensor is not None
    ]
    try:
        for owner, name, tensor in held:
            # not into the dict directly: recurrent layers keep a list of their weights
            setattr(owner, name, instead[id(tensor)])
        yield
    finally:
        for owner, name, tensor in held:
            setattr(owner, name, tensor)


@dataclass
class _Places:
    """What nodes are created by: the module, the line and the grad mode, and whether the user detaches.

    A node of a backward belongs to the module of the node that it is the backward of: autograd numbers its nodes in
    the order in which forwards create them.
    """

    paths: dict[int, str]
    meta: str
    stack: list[str] = field(default_factory=lambda: [""])
    path_of: dict[int, str] = field(default_factory=dict[int, str])  # by autograd's numbers
    numbered: int = 0
    detaching: bool = False

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Records nodes that are created inside."""
        self.numbered = _torch.autograd._get_sequence_nr()
        with ExitStack() as around:
            patches = [
                (PythonKeyTracer, "create_node", self._creating(PythonKeyTracer.create_node)),
                (nn.Module, "__call__", self._calling(nn.Module.__call__)),
                (Tensor, "detach", self._detaching(Tensor.detach)),
                (torch, "detach", self._detaching(torch.detach)),
                (Tensor, "data", property(self._detaching(_torch._C.TensorBase.data.__get__), _set_data)),
            ]
            for owner, name, value in patches:
                around.enter_context(replaced(owner, name, value))
            yield

    def _creating(self, create: Callable[..., fx.Node]) -> Any:
        def creating(*args: Any, **kwargs: Any) -> fx.Node:
            node = create(*args, **kwargs)
            running, now = _torch._C._current_autograd_node(), _torch.autograd._get_sequence_nr()
            path = self.stack[-1] if running is None else self.path_of.get(running._sequence_nr(), "")
            for number in range(self.numbered, now):
                self.path_of[number] = path
            self.numbered = now
            node.meta[self.meta] = {"context": Context(grad=torch.is_grad_enabled()), "place": place_here(2)}
            node.meta["nn_module_stack"] = {path: (path, "")}
            if self.detaching:
                node.meta[_USERS] = True
            return node

        return creating

    def _calling(self, call: Callable[..., Any]) -> Any:
        def calling(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self.stack.append(self.paths.get(id(vars(module)), self.stack[-1]))
            try:
                return call(module, *args, **kwargs)
            finally:
                self.stack.pop()

        return calling

    def _detaching(self, detach: Callable[..., Tensor]) -> Any:
        def detaching(*args: Any, **kwargs: Any) -> Tensor:
            self.detaching = True
            try:
                return detach(*args, **kwargs)
            finally:
                self.detaching = False

        return detaching


def _set_data(tensor: Tensor, value: Tensor) -> None:
    _torch._C.TensorBase.data.__set__(tensor, value)


def _without_detaches_of_autograd(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.target is _DETACH and _USERS not in node.meta:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _constants_as_placeholders(traced: fx.GraphModule) -> dict[str, Tensor]:
    """Turns attributes of the traced module into placeholders of its graph: name -> tensor."""
    graph = traced.graph
    first = next(iter(graph.nodes))
    placeholders: dict[str, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op == "get_attr":
            target = str(node.target)
            if target not in placeholders:
                with graph.inserting_before(first):
                    placeholders[target] = graph.placeholder(f"c_{target.strip('_')}")
            node.replace_all_uses_with(placeholders[target])
            graph.erase_node(node)
    return {node.name: getattr(traced, target).detach().clone() for target, node in placeholders.items()}
