"""`meshloom.parallel()`: a module of a script computes as a part of the global batch's, and stays the module that it is."""

from __future__ import annotations

import copyreg
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshloom.core.buffer_rules import BufferRule
from meshloom.core.errors import JobError
from meshloom.core.job import LossFunction
from meshloom.core.modules.compiled import not_compiled
from meshloom.core.plan import Plan
from meshloom.loops.agreement import agreement_of
from meshloom.loops.call_weight import Weight, counted
from meshloom.loops.execution import Cutting, Execution, StepLoss
from meshloom.loops.loop_lines import say, say_that_it_evaluates
from meshloom.loops.means import mean
from meshloom.loops.module_copies import ModuleCopies
from meshloom.loops.part_tensor import PartTensor, whole_tensor
from meshloom.loops.ranks import LoopRanks, check_accelerator, ranks, reached
from meshloom.loops.start_values import start_alike
from meshloom.loops.taken_shares import shares_of
from meshloom.loops.whole_steps import Stepping, with_whole_steps

M = TypeVar("M", bound=nn.Module)
_MADE: list[weakref.ref[nn.Module]] = []
_HELD = "_meshloom_execution"  # in a module's __dict__


def parallel(
    module: M, plan: Plan | str | None = None, *, leaves: Sequence[str] = (), buffers: Mapping[str, BufferRule] | None = None,
    batch: Mapping[str, Cutting] | None = None, methods: Sequence[str] = (), divide: Sequence[str] | None = None, weight: Weight | None = None,
) -> M:  # fmt: skip
    """Make `module` compute on many devices, in place, and return it.

    Every rank runs the whole script. The module is called with this replica's share of the global batch (`ml.loader`, `ml.share`), and after
    `backward()` its parameters have the gradient of the global batch. It stays the same object, with its parameters and their names; its
    class becomes a subclass of its own.

    plan: None takes the launcher's (`meshloom run --plan`); with one process nothing happens. leaves: names of modules within that run as
    written where the plan reads the module. buffers: patterns of names -> what becomes of buffers that replicas have changed
    (`ml.ema(0.99)`, "sum", "last"; docs/contract.md). batch: where pp cuts the batch into microbatches, inputs of the forward by name -> the dim of
    the batch (0 for others); None: whole in each; "part": a number of the whole batch, of which each has its share, such as a count that the
    forward divides by. methods: names of other methods that train, whose calls are as the module's own. divide: where tp and pp divide not the module
    itself but modules within it, their names, or "outermost" for those that are called outermost; the rest runs as written, whole on every rank.
    weight: where losses are means over something else than samples, such as tokens: a function that gets what a call gets and returns how many there are,
    a number above 0 or a tensor without dims (None: samples). Replicas' gradients and `ml.mean` count by it, and so do microbatches, of which pp joins
    results without rows by their mean. All replicas then make the same calls, in evaluation, too.

    Raises `PlanError` for a plan that this script cannot run under, `JobError` for a module that cannot be made parallel.
    """
    module = _unwrapped(module)
    found = ranks(plan)
    if found.plan.mesh.size > 1:
        check_accelerator()
        _check(module)
        start_alike(module, found)
        execution = _execution(module, found, leaves, buffers or {}, batch or {}, divide)
        if weight and divide is not None and found.plan.pp > 1 and found.plan.microbatches > 1:
            raise JobError(
                f"parallel(weight=..., divide=...) under {found.plan}: the weight is of the module's own call, and a pipeline cuts those of modules within it. Leave "
                "one of them out, or use microbatches=1."
            )
        execution.weight = weight
        _take_calls(module, execution, methods)
        agreement_of(found).watch(module, execution)
    _MADE.append(weakref.ref(module))
    return module


def modules() -> list[nn.Module]:
    """Those that a script has made parallel, in order; with one process, too."""
    return [found for each in _MADE if (found := each()) is not None]


def _take_calls(module: nn.Module, execution: Execution, methods: Sequence[str]) -> None:
    """The module's calls are the execution's from now on: its class becomes a subclass that libraries read as the author's."""
    original = type(module)
    module.__dict__[_HELD] = execution
    body = {
        **{name: _taken(original, name) for name in methods},
        "__call__": _call,
        "__reduce_ex__": _reduce,
        "_load_from_state_dict": _load,
        "__module__": original.__module__,
        "__doc__": original.__doc__,
    }
    made = type(original.__name__, (original,), body)
    made.__qualname__ = original.__qualname__
    module.__class__ = made


def was_made(module: nn.Module) -> bool:
    """Whether it is one of them."""
    return any(each is module for each in modules())


def is_parallel(module: Any) -> bool:
    """Whether its calls are an execution's."""
    return _HELD in vars(module)


def execution_of(module: nn.Module) -> Execution:
    """What the plan makes of a parallel module's calls."""
    return module.__dict__[_HELD]


def train_step(model: nn.Module, batch: Any, loss: LossFunction) -> Tensor:
    """Computes `loss(model, batch)` and its gradients, as `backward()` leaves them, and returns the mean over the global batch, without a graph.

    Under pp its microbatches follow the plan's `schedule`, so that ranks wait less and keep less than in a call of the model and a backward; otherwise
    it is the same as those.

    model: parallel. batch: this replica's share, tensors in any structure. loss: of (model, batch); a mean over samples, or (sum, count) for a mean
    over something else.

    Raises `CaptureError` where a pipeline cannot capture the loss, or cut the batch.
    """
    found: StepLoss | None = None
    if is_parallel(model):
        execution = execution_of(model)
        agreement_of(ranks()).called(type(model).__name__, execution, batch)
        found = execution.step(loss, batch)
    if found is None:
        returned = loss(model, batch)
        value = mean(*returned) if isinstance(returned, tuple) else mean(returned)
    else:
        value = mean(found.total / found.weight) if found.is_mean else mean(found.total, found.weight)
    value.backward()
    return value.detach()


@contextmanager
def accumulate(*modules: nn.Module) -> Iterator[None]:
    """A context whose backwards need not leave complete gradients: the first backward after it sends the sum of all. It saves time; without it
    results are the same."""
    with ExitStack() as stack:
        for each in modules:
            if is_parallel(each):
                stack.enter_context(execution_of(each).accumulating())
        yield


@overload
def whole(of: nn.Module) -> AbstractContextManager[None]: ...
@overload
def whole(of: Tensor) -> Tensor: ...
@overload
def whole(of: Stepping) -> Stepping: ...
def whole(of: nn.Module | Tensor | Optimizer) -> AbstractContextManager[None] | Tensor | Optimizer:
    """Of a module, a context in which its parameters and gradients are whole on every rank; what is written to them is kept. Of a parameter, a gradient
    or an optimizer's state, the whole tensor. All ranks call it together, and leave the context together.

    Of an optimizer that looks at whole parameters (Muon, Shampoo) or at all at once (LBFGS), itself, whose steps have them whole: on every rank, and so
    is its state. What it computes is one device's. Schedulers are made of it afterwards, else a `JobError` says so.
    """
    if isinstance(of, Optimizer):
        return with_whole_steps(of, _updated_by) if ranks().plan.mesh.size > 1 else of
    if isinstance(of, Tensor):
        return whole_tensor(of) if isinstance(of, PartTensor) else of
    return execution_of(of).whole() if is_parallel(of) else nullcontext()


def _updated_by(optimizer: Optimizer) -> list[Execution]:
    updated = {id(each) for group in optimizer.param_groups for each in group["params"]}
    found = (each for each in modules() if is_parallel(each))
    return [execution_of(each) for each in found if not updated.isdisjoint(map(id, each.parameters()))]


@contextmanager
def as_written() -> Iterator[None]:
    """A context in which modules are of their authors' classes, without what a plan has put on them, as a file holds them."""
    held = [(each, type(each), each.__dict__.pop(_HELD)) for each in modules() if is_parallel(each)]
    within = [vars(each) for module, *_ in held for each in module.modules()]
    hooks = [(each[kind], dict(each[kind])) for each in within for kind in ("_forward_pre_hooks", "_forward_hooks")]  # fmt: skip
    for found, all_of_them in hooks:
        for key, hook in all_of_them.items():
            if isinstance(getattr(hook, "__self__", None), Execution):
                del found[key]
    parameters = (vars(each) for module, *_ in held for each in module.parameters())
    places = [(each, each.pop("place")) for each in parameters if "place" in each]
    for module, made, _ in held:
        module.__class__ = made.__mro__[1]
    try:
        yield
    finally:
        for of_parameter, place in places:
            of_parameter["place"] = place
        for found, all_of_them in hooks:
            found.clear()
            found.update(all_of_them)
        for module, made, execution in held:
            module.__class__, module.__dict__[_HELD] = made, execution


def _call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return _called(self, "forward", partial(_original(self).__call__, self), args, kwargs)


def _taken(original: type[nn.Module], name: str) -> Callable[..., Any]:
    """The method, whose calls are the execution's."""
    written = getattr(original, name, None)
    if not callable(written):
        raise JobError(
            f"parallel(methods=[{name!r}]): {original.__name__} has no such method. Name methods of its class."
        )

    @wraps(inspect.unwrap(written))  # libraries look behind one wrapper, at its arguments
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _called(self, name, partial(written, self), args, kwargs)

    return not_compiled(method)


def _called(
    module: nn.Module, method: str, written: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:  # fmt: skip
    execution = execution_of(module)
    if execution.running:
        return written(*args, **kwargs)
    if nn.parallel.DistributedDataParallel._active_ddp_module is not None:  # pyright: ignore[reportPrivateUsage]
        raise _parallel_already("DistributedDataParallel")
    reached()
    if not module.training and any(len(share.sizes) > 1 for share in shares_of((args, kwargs))):
        say_that_it_evaluates()
    if torch.is_grad_enabled():
        agreement_of(ranks()).called(type(module).__name__, execution, (args, kwargs))
    elif not execution.is_whole:
        agreement_of(ranks()).evaluates(type(module).__name__, (args, kwargs))
    execution.running = True
    try:
        with counted(execution.weight, ranks(), args, kwargs):
            return execution.call(written, args, kwargs, method)
    finally:
        execution.running = False


not_compiled(_call)


def _load(self: nn.Module, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
    own = {name: each for name, each in state_dict.items() if name.startswith(prefix)}
    agreement_of(ranks()).loads(type(self).__name__, own)
    _original(self)._load_from_state_dict(self, state_dict, prefix, *args, **kwargs)  # pyright: ignore[reportPrivateUsage]


def _original(module: nn.Module) -> type[nn.Module]:
    return type(module).__mro__[1]


def _reduce(self: nn.Module, protocol: Any) -> Any:
    """A copy, or what a pickle gives, is a module of the author's class."""
    make, arguments, *state = super(type(self), self).__reduce_ex__(protocol)
    if make is copyreg.__newobj__:  # which is for objects of the class itself  # pyright: ignore[reportAttributeAccessIssue]
        make, arguments = copyreg._reconstructor, (_original(self), object, None)  # pyright: ignore[reportAttributeAccessIssue]
    if state and isinstance(state[0], dict):
        state[0] = {name: each for name, each in state[0].items() if name != _HELD}
    return (make, arguments, *state)


def _execution(
    module: nn.Module,
    found: LoopRanks,
    leaves: Sequence[str],
    rules: Mapping[str, BufferRule],
    batch: Mapping[str, Cutting],
    divide: Sequence[str] | None,
) -> Execution:
    plan = found.plan
    if plan.tp > 1 or plan.pp > 1:
        from meshloom.loops.divided_module import DividedModule
        from meshloom.loops.divided_within import DividedWithin
        from meshloom.loops.pipelined_module import PipelinedModule

        kind = PipelinedModule if plan.pp > 1 else DividedModule
        if divide is not None:
            make = partial(kind, ranks=found, leaves=leaves, batch=batch)
            return DividedWithin(module, found, divide, make, rules)
        return kind(module, found, leaves, rules, batch)
    if plan.zero:
        from meshloom.loops.sharded_module import ShardedModule

        return ShardedModule(module, found.replicas, zero=plan.zero, rules=rules, joined=found.joined)
    return ModuleCopies(module, found, rules)


def _unwrapped(module: Any) -> Any:
    """The module that torch.compile was given."""
    if not isinstance(module, nn.Module):
        raise JobError(f"meshloom.parallel() takes an nn.Module, not a {type(module).__name__}.")
    inner = getattr(module, "_orig_mod", None)
    if isinstance(inner, nn.Module):
        say("torch.compile around a parallel module is left out: it runs as written")
        return inner
    return module


def _check(module: nn.Module) -> None:
    name = type(module).__name__
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    if found := next((type(each).__name__ for each in module.modules() if isinstance(each, wrappers)), None):
        raise _parallel_already(found)
    if isinstance(module, torch.jit.ScriptModule):
        raise JobError(
            f"{name} is a script of torch.jit, whose class is fixed. Give meshloom.parallel() the module that it was made from."
        )
    if not any(True for _ in module.parameters()):
        raise JobError(
            f"No parameters are registered in {name}, so there is nothing to train together. Modules in a Python list are not found: use nn.ModuleList."
        )
    for each in modules():
        if {id(one) for one in each.parameters()} & {id(one) for one in module.parameters()}:
            raise JobError(
                f"{name} has parameters of {type(each).__name__}, which is parallel already. Make the module parallel that has them all, once."
            )


def _parallel_already(wrapper: str) -> JobError:
    return JobError(
        f"{wrapper} is parallel already. Give meshloom.parallel() the module within it (.module), and leave {wrapper} out of the script."
    )
