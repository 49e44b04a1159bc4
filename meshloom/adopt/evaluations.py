"""The evaluation of a script as `Evaluate` of a job: metrics from what a pass over held-out data adds up."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler, SubsetRandomSampler

from meshloom.adopt.counters import steps_of_epoch, total_steps
from meshloom.adopt.data.zipped_loader import ZippedCollate
from meshloom.adopt.improvement import Improvement, improvement_of
from meshloom.adopt.loop_pieces import names_of_loop
from meshloom.adopt.metric_functions import MetricFunctions, function_name, wraps
from meshloom.adopt.setup_pieces import JobFunction
from meshloom.adopt.totals import Scheduled, Total
from meshloom.adopt.watching.averaged import copy_of
from meshloom.adopt.watching.passes import SeenPass
from meshloom.adopt.watching.route import Line, Loop, Refusal, UntranslatedError, follow
from meshloom.adopt.watching.script import Script, one_refusal
from meshloom.adopt.watching.source import used
from meshloom.adopt.watching.watch import MicroBatch


@dataclass(frozen=True, kw_only=True)
class WrittenEvaluation:
    """A script's evaluation in the job. totals: by metric. pieces: functions of the job. argument: of `ml.Job`. line, file: of its loop.
    lowered: whether it runs under autocast. notes: why totals are no metrics. done: statements that are translated. scheduled: schedulers that are
    stepped with a metric after each evaluation, with its name."""

    seen: SeenPass
    totals: Mapping[str, Total]
    pieces: Sequence[JobFunction]
    argument: str
    line: int
    file: str
    lowered: bool
    notes: Sequence[Refusal] = ()
    done: Sequence[Line] = field(default_factory=list[Line])
    scheduled: Sequence[Scheduled] = ()


def evaluation_of(script: Script, without: Collection[str]) -> WrittenEvaluation | None:
    """None where the script was not seen to evaluate. without: metrics that are left out. Raises `UntranslatedError`."""
    seen = _chosen(script)
    if seen is None:
        return None
    if any(each.function.startswith("<") and each.function != "<module>" for each in seen.frames):
        last = seen.frames[-1]
        raise _left(
            script, last.path.name, last.line, "it is added up in an expression. Write a loop, `for x, y in loader:`"
        )  # fmt: skip
    route = follow(seen.frames, script.route.sources)
    last_batch = MicroBatch(seen.samples, None, "", script.first.draws, 0.0, ("", 0))
    evaluating = Script(
        replace(
            script.watched,
            frames=seen.frames,
            loader=seen.loader,
            model=seen.module,
            steps=[[last_batch]],
        ),
        route,
    )
    return _Evaluation(script, evaluating, seen).written(without)


def _chosen(script: Script) -> SeenPass | None:
    """The pass that evaluates the average, if there is one, or the first that evaluates the model."""
    model, average = script.watched.model, script.watched.average
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    training = [script.watched.loader, *(script.watched.zipped.loaders if script.watched.zipped else [])]
    passes = [each for each in script.watched.passes if all(each.loader is not one for one in training)]
    of_average = [
        each for each in passes if average is not None and each.module is not model and copy_of(each.module, model, trained)
    ]  # fmt: skip
    of_model = [each for each in passes if each.module is model or wraps(each.module, model)]
    return next(iter([*of_average, *of_model]), None)


def evaluates_average(script: Script, seen: SeenPass) -> bool:
    """Whether the values of the pass were those of the script's average, which has not changed since."""
    average, model = script.watched.average, script.watched.model
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    own = copy_of(average.holder, model, trained) if average is not None else None
    state = {name.removeprefix("module."): each for name, each in seen.state.items()}
    return own is not None and all(torch.equal(each.cpu(), state[name]) for name, each in own.items())


def _left(script: Script, file: str, line: int, why: str) -> UntranslatedError:
    error = one_refusal(script, line, f"this evaluation is left out: {why}.")
    error.refusals = [replace(each, file=file) for each in error.refusals]
    return error


class _Evaluation:
    """evaluating: the script as it was at the end of the pass."""

    def __init__(self, script: Script, evaluating: Script, seen: SeenPass) -> None:
        self._script, self._evaluating, self._seen = script, evaluating, seen
        route = evaluating.route
        loop = evaluating.data_loop
        last = seen.frames[-1]
        if loop is None or loop is not route.loops[-1] or not isinstance(loop.node, ast.For):
            raise _left(script, last.path.name, last.line, "no loop over its data loader was found. Loop over it as `for x, y in loader:`")  # fmt: skip
        self._loop: Loop = loop
        self._file = loop.source.path.name
        self._functions = MetricFunctions(script, evaluating, seen, loop, self._left)

    def written(self, without: Collection[str]) -> WrittenEvaluation | None:
        script = self._script
        loader = self._loader()
        depends = self._functions.totals
        if not depends:
            raise self._left(
                "nothing was found that it adds up of each batch (`total += ...`, `values.append(...)`, a meter's update)"
            )
        improvement = improvement_of(self._evaluating, {each.name: each.name for each in depends})
        names = self._names(depends, improvement)
        depends, pieces, refused = self._pieces(depends, names, without)
        if not pieces:
            return None
        metrics = ", ".join(f'"{names[each.name]}": {function_name(names[each.name])}' for each in depends)
        settings = [f"data=lambda: {self._data(loader)}", f"metrics={{{metrics}}}", f"every={self._every()}"]  # fmt: skip
        metric, _, which = (improvement.best or "").rpartition(":")
        kept = metric in [each.name for each in depends]
        if kept:
            settings.append(f'best="{names[metric]}:{which}"')
            script.because(improvement.lines[0].at, "the best checkpoint is kept in OUT/best by the run itself")  # fmt: skip
        if kept and improvement.patience is not None:
            settings.append(f"patience={improvement.patience}")
            script.because(
                improvement.lines[-1].at,
                "training stops after so many evaluations in a row without a better one",
            )
        script.because(
            self._loop.node.lineno,
            "held-out data is evaluated by all ranks together: a metric is a function of the model and one batch, and its mean over all of the data is reported",
        )
        return WrittenEvaluation(
            seen=self._seen, totals={names[each.name]: each for each in depends}, pieces=pieces, line=self._loop.node.lineno, file=self._file,
            argument="ml.Evaluate(\n" + "".join(f"        {each},\n" for each in settings) + "    )", done=improvement.lines if kept else [],
            notes=refused, lowered=bool(self._functions.contexts),
            scheduled=[
                replace(each, metric=names[each.metric]) for each in improvement.scheduled
                if each.metric in [one.name for one in depends] and (each.metric not in improvement.curved or (each.of and each.of.divided))
            ],
        )  # fmt: skip

    def _pieces(
        self, totals: Sequence[Total], names: Mapping[str, str], without: Collection[str]
    ) -> tuple[list[Total], list[JobFunction], list[Refusal]]:
        """The totals that become metrics, their functions, and why others do not. Raises if none does but for `without`."""
        kept: list[Total] = []
        pieces: list[JobFunction] = []
        refused: list[Refusal] = []
        for each in totals:
            if names[each.name] in without:
                continue
            try:
                pieces.append(self._functions.metric(names[each.name], each))
                kept.append(each)
            except UntranslatedError as error:
                refused += error.refusals
        if refused and not pieces:
            raise UntranslatedError(*refused)
        return kept, pieces, refused

    # --- What is evaluated, and when

    def _loader(self) -> str:
        loader, script = self._seen.loader, self._script
        name = script.expression_of(loader)
        if name is None:
            raise self._left("its DataLoader has no name in the set-up. Make it there, before the loop")
        if isinstance(loader.dataset, IterableDataset):
            raise self._left("its dataset is iterable, and a job evaluates one with __len__ and __getitem__")
        if loader.batch_size is None or loader.drop_last:
            raise self._left("its DataLoader leaves samples out, or has a batch_sampler. Use one with batch_size=..., without drop_last")  # fmt: skip
        if not isinstance(loader.sampler, SequentialSampler | RandomSampler | SubsetRandomSampler):
            raise self._left(f"its DataLoader draws by {type(loader.sampler).__name__}, and a job evaluates each sample once")  # fmt: skip
        of_training = script.watched.loader.collate_fn
        of_training = of_training.functions[0] if isinstance(of_training, ZippedCollate) else of_training
        if loader.collate_fn != of_training:
            raise self._left("its collate_fn is another one than that of training, and a job has one. Use the same")  # fmt: skip
        return name

    def _data(self, loader: str) -> str:
        """The dataset's samples that the loader of this name evaluates."""
        if isinstance(self._seen.loader.sampler, SubsetRandomSampler):
            return f"Subset({loader}.dataset, {loader}.sampler.indices)"
        return f"{loader}.dataset"

    def _every(self) -> str:
        """An expression of steps."""
        script, route = self._script, self._evaluating.route
        around = {id(each.node) for each in route.loops[:-1]}
        training = [each for each in script.route.loops if id(each.node) in around]
        if not training:
            return total_steps(script)[0]
        own = {id(each) for each in [training[-1].node]}
        inner = id(script.step_loop.node) in own or (
            script.data_loop is not None and id(script.data_loop.node) in own
        )
        if inner and script.data_loop is None and script.watched.loader is not None:
            inner = any(id(each.node) in own for each in script.route.loops[-1:])
        interval = self._interval(training, inner)
        if inner:
            return interval or "1"
        epoch = steps_of_epoch(script) or "1"
        if interval is None:
            return epoch
        return f"{interval} * ({epoch})" if "//" in epoch else f"{interval} * {epoch}"

    def _interval(self, training: Sequence[Loop], inner: bool) -> str | None:
        """N of `if step % N == 0:` around the evaluation. inner: whether steps are counted, rather than epochs."""
        numbers = names_of_loop(self._script)
        for line in self._evaluating.route.branches:
            assert isinstance(line.node, ast.If)
            counted = used(line.node.test) & numbers
            counted = {name for name in counted if type(self._evaluating.values.get(name)) is int}
            if not counted:
                continue
            found = [each for each in ast.walk(line.node.test) if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Mod)]  # fmt: skip
            if not found:
                raise self._left(f"it depends on {min(counted)!r} in another way than `{min(counted)} % N`", line.at)  # fmt: skip
            seen = [each[name] for each in self._script.watched.numbers for name in counted if name in each]
            if inner and any(later - first != 1 for first, later in pairwise(seen)):
                raise self._left(f"{min(counted)!r} does not count optimizer steps", line.at)
            return line.source.segment(found[0].right)
        return None

    def _names(self, totals: Sequence[Total], improvement: Improvement) -> dict[str, str]:
        """The name of each total's metric: what the script calls the result, if that is a plain name."""
        found: dict[str, str] = {}
        for total in totals:
            texts = [text for text, metric in improvement.names.items() if metric == total.name]
            plain = [match[1] for text in texts if (match := re.fullmatch(r"(?:\w+\[['\"])?([A-Za-z_]\w*)(?:['\"]\])?", text))]  # fmt: skip
            name = plain[0] if plain and total.name not in improvement.curved else total.name
            found[total.name] = total.name if name in found.values() else name
        return found

    def _left(self, why: str, line: int | None = None) -> UntranslatedError:
        return _left(self._script, self._file, line or self._loop.node.lineno, why)


def evaluates(written: WrittenEvaluation, line: Line) -> bool:
    """Whether a statement is one that calls the evaluation, or is a part of it that is translated."""
    if any(each.node is line.node for each in written.done):
        return True
    return any(
        line.source.path == frame.path and line.node.lineno <= frame.line <= (line.node.end_lineno or 0)
        for frame in written.seen.frames
    )
