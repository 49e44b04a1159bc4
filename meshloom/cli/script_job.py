"""The job that a script shows at its first backward: a parallel module, the arguments of its calls, its optimizers, and as much of the loss as the module
computes."""

from __future__ import annotations

import argparse
import gc
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

import meshloom
from meshloom.cli.verb_run import execute
from meshloom.core.errors import JobError, PlanError, first_line
from meshloom.core.job import Job
from meshloom.core.job_functions import NamedParameters
from meshloom.core.plan import Plan
from meshloom.core.random import preserved_draws, seed_script
from meshloom.core.units import format_count
from meshloom.launch.environment import script_seed
from meshloom.loops import parallel as loops_parallel
from meshloom.loops.captured_forward import autocast_here
from meshloom.loops.ranks import check_of_loops, leave_ranks, ranks
from meshloom.program.ir.leaves import leaves_of
from meshloom.verify.scripts.recorder import EnoughStepsError, replaced

_STEPS = 1000  # of a script it is not known how many it makes
_CHOSEN = "precision=float32,recompute=none"  # by scripts themselves, in plans for a cluster
_CALL = "meshloom"  # in what autograd's nodes carry: the call whose results they compute


class ScriptJob(NamedTuple):
    """notes: what the user is told of it, in lines."""

    job: Job
    notes: list[str]


@contextmanager
def job_of_script(arguments: argparse.Namespace) -> Iterator[ScriptJob]:
    """Run a script in this process up to its first backward. Within the context `__main__` is the script's.

    What it prints goes to standard error; what it writes until then stays. Raises `PlanError` for options that scripts cannot have, and `JobError` where
    no backward goes through a parallel module.
    """
    _check_options(arguments)
    before = sys.modules["__main__"]
    with patch.object(sys, "path", [*sys.path]), preserved_draws():
        try:
            with redirect_stdout(sys.stderr), _FirstBackward() as first:
                seed_script(script_seed())
                found = first.shown_by(arguments.target, arguments.words)
            known = vars(sys.modules["__main__"])
            for name, each in known.items():
                if isinstance(each, Tensor) and each.grad_fn is not None:  # which holds all activations
                    known[name] = each.detach()
            if vars(arguments).get("cluster"):
                found.notes.append(f"GPU-hours and dollars are of {_STEPS:,} steps")
            yield found
        finally:
            sys.modules["__main__"] = before


def _check_options(arguments: argparse.Namespace) -> None:
    options = vars(arguments)
    if options.get("try"):
        raise PlanError(
            f"--try trains a job in processes, and {arguments.target} is a script. Leave it out, or time meshloom run under each plan."
        )
    for text in (options["plan"], options.get("fix"), *(options.get("compare") or ())):
        check_of_loops(Plan.parse(text) if text else Plan())
    if arguments.verb == "describe":
        arguments.transport = "gloo"  # under which replicas have copies of their own, as those of loops do
    if options.get("cluster"):
        arguments.fix = ",".join(filter(None, [arguments.fix, _CHOSEN]))


class _Told(NamedTuple):
    """What `ml.parallel` was told of a module."""

    leaves: Sequence[str]
    buffers: Mapping[str, Any]
    batch: Mapping[str, Any]


@dataclass(kw_only=True, eq=False)
class _Call:
    """Of a parallel module. autocast: the dtype, where it was on. results: those of its tensors by name that a backward goes through, and whether each is a
    scalar."""

    number: int
    module: nn.Module
    arguments: dict[str, Any]
    autocast: torch.dtype | None
    results: dict[str, bool] = field(default_factory=dict[str, bool])


class _FirstBackward:
    """A context that ends a script where it begins its first backward."""

    def __init__(self) -> None:
        self._made: dict[nn.Module, _Told] = {}
        self._calls = 0
        self._dim = 0  # of samples, as `ml.share` was told
        self._roots: list[Tensor] = []
        self._step: tuple[nn.Module, Any, Callable[[Any, Any], Any]] | None = None  # of `ml.train_step`
        self._undo = ExitStack()

    def __enter__(self) -> _FirstBackward:
        ranks(Plan())  # one process, whatever the environment says
        self._undo.callback(leave_ranks, well=True)
        for owner, name, replace in (
            (meshloom, "parallel", self._parallel),
            (loops_parallel, "parallel", self._parallel),  # of adapters
            (meshloom, "share", self._share),
            (meshloom, "train_step", lambda _: self._train_step),
            (torch.autograd, "backward", lambda _: self._backward),
            (torch, "compile", lambda _: lambda *given, **_: given[0] if given else lambda each: each),
        ):
            self._undo.enter_context(replaced(owner, name, replace))
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def shown_by(self, script: str, words: Sequence[str]) -> ScriptJob:
        """The job of the script. Raises `JobError`."""
        own = "" if words else " Its own words follow --."
        try:
            execute(script, words)
        except EnoughStepsError as stopped:
            try:
                return self._shown(script)
            except JobError as error:
                raise error from stopped  # by whose line the user finds it
        except SystemExit as leaving:
            if leaving.code:
                raise JobError(
                    f"{script} left before its first backward (exit code {leaving.code}).{own}"
                ) from leaving
        except Exception as error:
            said = f"{type(error).__name__}: {first_line(error)}"
            raise JobError(f"{script} failed before its first backward ({said}).{own}") from error
        raise JobError(f"{script} ended without a backward, so there is no step to describe.{own}")

    def _parallel(self, before: Any) -> Any:
        def parallel(
            module: Any, plan: object = None, *, leaves: Any = (), buffers: Any = None, batch: Any = None, **_: Any
        ) -> nn.Module:  # fmt: skip
            module = before(module)
            self._made[module] = _Told(leaves, buffers or {}, batch or {})
            # a function, which copies of the module share
            hook = module.register_forward_hook(lambda *given: self._note(*given), with_kwargs=True)
            self._undo.callback(hook.remove)
            return module

        return parallel

    def _share(self, before: Any) -> Any:
        def share(x: Any, dim: Any = 0) -> Any:
            self._dim = dim if isinstance(dim, int) else self._dim
            return before(x, dim)

        return share

    def _note(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        """After a forward: the nodes of its results carry the call, for as long as they live."""
        if module not in self._made:  # a copy
            return
        self._calls += 1
        given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        call = _Call(number=self._calls, module=module, arguments=given, autocast=_autocast())
        for name, each in leaves_of(result).tensors.items():
            node: Any = each.grad_fn
            if node is not None:
                node.metadata.setdefault(_CALL, {})[each.output_nr] = call, name, each.ndim == 0

    def _train_step(self, model: nn.Module, batch: Any, loss: Callable[[Any, Any], Any]) -> None:
        dtype = _autocast()

        def lowered(model: Any, batch: Any) -> Any:
            with torch.autocast("cpu", dtype):
                return loss(model, batch)

        self._step = model, batch, lowered if dtype else loss
        raise EnoughStepsError

    def _backward(self, tensors: Tensor | Sequence[Tensor], *_: object, **__: object) -> None:
        self._roots = [tensors] if isinstance(tensors, Tensor) else [*tensors]
        raise EnoughStepsError

    def _shown(self, script: str) -> ScriptJob:
        calls = _calls_behind(self._roots)
        passed = [self._step[0]] if self._step else [each.module for each in calls]
        if not any(each in self._made for each in passed):
            raise JobError(
                f"The first backward of {script} goes through no call of a module that ml.parallel() returned. Make the module parallel that trains, and call it."
            )
        module = max(passed, key=_size)
        name, told, optimizers = type(module).__name__, self._made[module], _optimizers_of(module)
        dims: dict[int, Any] = {}  # of tensors that `ml.parallel(batch=...)` names
        calls = [each for each in calls if each.module is module]
        if self._step:
            _, given, loss = self._step
        else:
            arguments, loss = [each.arguments for each in calls], _loss_of(calls)
            given = arguments[0] if len(calls) == 1 else arguments
            for key, value in ((key, each[key]) for each in arguments for key in each.keys() & told.batch):
                dims |= dict.fromkeys(map(id, leaves_of(value).tensors.values()), told.batch[key])
        batch = _Samples(given, lambda each: dims.get(id(each), self._dim))
        if not batch.count:
            raise JobError(
                f"No argument of {name} in the first backward of {script} is a tensor with samples along dim {self._dim}, so there is no batch size to describe."
            )
        kinds = ", ".join(type(each).__name__ for each in optimizers) or "no optimizer, as if it kept nothing"
        notes = [f"the first backward of {script}: {name}, {format_count(batch.count, 'sample')}, {kinds}"]
        if others := [
            f"{type(each).__name__} ({_size(each):,})" for each in self._made if each is not module
        ]:
            notes.append(
                f"not described: {', '.join(others)}; {name} ({_size(module):,} parameters) is the largest parallel module that this backward goes through"
            )
        if not all(each for call in calls for each in call.results.values()):
            notes.append("the loss outside of the module is not counted: the mean of its results stands in")
        job = Job(
            model=_model_of(module), loss=loss, optimizer=_optimizer_of(module, optimizers), data=lambda: range(batch.count), collate=batch.rows,
            batch_size=batch.count, steps=_STEPS, shuffle=False, leaves=told.leaves, buffers=told.buffers,
        )  # fmt: skip
        return ScriptJob(job, notes)


class _Samples:
    """A batch that was seen, whose samples are given again by their numbers. dim_of: that of the samples in a tensor; else than an int: it has none. count: 0
    where no tensor has samples."""

    def __init__(self, batch: Any, dim_of: Callable[[Tensor], Any]) -> None:
        self._leaves = leaves_of(batch)
        self._tensors: list[tuple[Tensor, int | None]] = []
        for each in self._leaves.tensors.values():
            dim = dim_of(each)
            has_dim = isinstance(dim, int) and -each.ndim <= dim < each.ndim
            self._tensors.append((each.detach().cpu(), dim if has_dim else None))
        self.count = next((each.shape[dim] for each, dim in self._tensors if dim is not None), 0)

    def rows(self, numbers: Sequence[int]) -> Any:
        """The batch of these samples, with all else that it has."""
        index = torch.tensor(numbers) % self.count
        return self._leaves.rebuild(
            [
                each if dim is None or each.shape[dim] != self.count else each.index_select(dim, index)
                for each, dim in self._tensors
            ]
        )


def _autocast() -> torch.dtype | None:
    """The dtype of the context that this runs in, a GPU's before the CPU's; None: of none."""
    return next((dtype for _, dtype in reversed(autocast_here())), None)


def _calls_behind(roots: Sequence[Tensor]) -> list[_Call]:
    """The calls whose results a backward goes through first, in order, each with these results."""
    edges: list[Any] = [(each.grad_fn, each.output_nr) for each in roots]
    seen, found = set[Any](), set[_Call]()
    while edges:
        node, number = edge = edges.pop()
        if node is None or edge in seen:
            continue
        seen.add(edge)
        if result := node.metadata.get(_CALL, {}).get(number):
            call, name, is_scalar = result
            call.results[name] = is_scalar
            found.add(call)
        else:
            edges += node.next_functions
    return sorted(found, key=lambda each: each.number)


def _size(module: nn.Module) -> int:
    return sum(each.numel() for each in module.parameters())


def _loss_of(calls: Sequence[_Call]) -> Callable[[Any, Any], Tensor]:
    """Of the module and the arguments of these calls."""
    known = [([*each.results], each.autocast) for each in calls]

    def loss(model: Any, batch: Any) -> Tensor:
        parts: list[Tensor] = []
        for (names, dtype), given in zip(known, batch if len(known) > 1 else [batch], strict=True):
            bound = inspect.BoundArguments(inspect.signature(model.forward), given)
            with torch.autocast("cpu", dtype) if dtype else nullcontext():
                results = leaves_of(model(*bound.args, **bound.kwargs)).tensors
            parts += [results[each] if results[each].ndim == 0 else results[each].mean() for each in names]
        return reduce(torch.add, parts)

    return loss


def _optimizers_of(module: nn.Module) -> list[Optimizer]:
    """Those that have parameters of it, and are not around another one."""
    gc.collect()
    own = {id(each) for each in module.parameters()}
    return [
        each
        for each in gc.get_objects()
        if issubclass(type(each), Optimizer)
        and not any(isinstance(one, Optimizer) for one in vars(each).values())
        and any(id(one) in own for group in each.param_groups for one in group["params"])
    ]


def _optimizer_of(module: nn.Module, seen: Sequence[Optimizer]) -> Callable[[NamedParameters], Any]:
    """A function that makes optimizers like these of other parameters of the same names."""
    names = {id(each): name for name, each in module.named_parameters()}
    made: list[Any] = []
    for each in seen:
        takes = inspect.signature(type(each)).parameters
        defaults = {key: value for key, value in each.defaults.items() if key in takes}
        groups = [
            ({key: value for key, value in group.items() if key not in ("params", "param_names")}, [names.get(id(one)) for one in group["params"]])
            for group in each.param_groups
        ]  # fmt: skip
        made.append((type(each), groups, defaults))

    def optimizer(named: NamedParameters) -> list[Optimizer]:
        known = dict(named)
        if not made:
            return [torch.optim.SGD([*known.values()])]
        return [
            kind([{**settings, "params": of} for settings, names in groups if (of := [known[each] for each in names if each in known])], **defaults)
            for kind, groups, defaults in made
        ]  # fmt: skip

    return optimizer


def _model_of(module: nn.Module) -> Callable[[], nn.Module]:
    """Of which jobs make copies: without the graph of what a forward has left on it."""
    for attributes in map(vars, module.modules()):
        for name, value in attributes.items():
            if any(isinstance(each, Tensor) and each.grad_fn for each in tree_leaves(value)):
                attributes[name] = tree_map_only(Tensor, Tensor.detach, value)
    return lambda: module
