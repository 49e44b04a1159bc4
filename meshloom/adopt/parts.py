"""The parts of a job: its functions, and the arguments of `ml.Job`."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler, SubsetRandomSampler

from meshloom.adopt.counters import accumulation, loader_name, steps_of_epoch, total_steps
from meshloom.adopt.evaluations import WrittenEvaluation, evaluates_average, evaluation_of
from meshloom.adopt.loop_pieces import loss_piece
from meshloom.adopt.rates import average_expression, clip_expression, rates_piece
from meshloom.adopt.setup_pieces import JobFunction, model_piece, optimizer_piece, scheduler_piece
from meshloom.adopt.watching.no_batch import no_batch
from meshloom.adopt.watching.route import Refusal, UntranslatedError
from meshloom.adopt.watching.script import Script, one_refusal
from meshloom.adopt.watching.source import bound, calls, used

OF_AVERAGE = "the script evaluates the parameters here, and a job that keeps an average evaluates that. Leave average= out to see theirs."


@dataclass
class JobParts:
    """What a job is written from. arguments: of `ml.Job`, as text, in order. evaluation: the script's, if it is translated;
    average: whether the one that it keeps is. notes: why one is not."""

    pieces: list[JobFunction] = field(default_factory=list[JobFunction])
    arguments: dict[str, str] = field(default_factory=dict[str, str])
    inline: str = ""
    evaluation: WrittenEvaluation | None = None
    average: bool = False
    notes: list[Refusal] = field(default_factory=list[Refusal])

    @property
    def needs(self) -> set[str]:
        """Names that these texts use."""
        names = set[str]().union(*(each.needs for each in self.pieces))
        for text in [*self.arguments.values(), self.inline]:
            names |= used(ast.parse(text)) if text else set()
        return names


def parts_of(script: Script, without: Collection[str] = ()) -> JobParts:
    """without: "evaluate", "average", or names of metrics, which are left out. Raises `UntranslatedError`."""
    parts = JobParts()
    model = model_piece(script)
    optimizer = optimizer_piece(script, model)
    loss = loss_piece(script)
    arguments = {"model": "make_model", "loss": "training_loss", "optimizer": "make_optimizer"}
    arguments |= _data(script, parts)
    steps, line = total_steps(script)
    arguments["steps"] = steps
    script.because(line, f"the run has {steps} optimizer steps, and a job counts those")
    rates = rates_piece(script)
    try:
        parts.evaluation = evaluation_of(script, without) if "evaluate" not in without else None
    except UntranslatedError as error:
        parts.notes += error.refusals
    by_metric = parts.evaluation.scheduled if parts.evaluation is not None else ()
    scheduler = scheduler_piece(script, steps_of_epoch(script), by_metric)
    if rates is not None and scheduler is not None:
        raise rates.lines[-1].refuse("rates are set by hand and by a scheduler. Use one of them.")
    if rates is not None:
        alias = rates.text.partition("(")[2].partition(",")[0]
        arguments["scheduler"] = f"lambda {alias}: lambda step: set_rates({alias}, step)"
    elif scheduler is not None:
        arguments["scheduler"] = "make_scheduler"
    clip = clip_expression(script)
    if clip is not None:
        arguments["clip_grad_norm"] = clip[0]
        script.because(clip[1], "a job clips the gradient of the whole model, over all ranks")
    decay = average_expression(script, loss.needs) if "average" not in without else None
    if decay is not None:
        arguments["average"], parts.average = decay, True
        parts.notes += _differences_of_average(script, decay)
    parts.pieces += [model, optimizer, *(each for each in (scheduler, rates, loss) if each is not None)]
    if parts.evaluation is not None:
        parts.pieces += parts.evaluation.pieces
        parts.notes += parts.evaluation.notes
        arguments["evaluate"] = parts.evaluation.argument
        if parts.average and not evaluates_average(script, parts.evaluation.seen):
            parts.notes.append(Refusal(parts.evaluation.file, parts.evaluation.line, OF_AVERAGE))  # fmt: skip
    parts.arguments = arguments
    return parts


def _differences_of_average(script: Script, decay: str) -> Iterator[Refusal]:
    """In what a job's average is another one than the script's."""
    average = script.watched.average
    if average is not None and average.from_initial:
        made = [each for each in script.route.setup if average.name in bound(each.node)]
        line = made[-1] if made else script.route.body[0]
        yield Refusal(
            line.source.path.name, line.at, f"{average.name!r} begins with the initial parameters, and a job's average with those after the first step: "
            f"after k steps they differ by {decay} ** k of the first update.",
        )  # fmt: skip


def _data(script: Script, parts: JobParts) -> dict[str, str]:
    """Arguments of the job about its data."""
    accumulated = accumulation(script)
    times = f" * {accumulated}" if accumulated else ""
    loader: Any = script.watched.loader
    if script.whole:
        return {
            "data": f"lambda: TensorDataset({', '.join(script.whole)})",
            "batch_size": f"len({script.whole[0]}){times}",
            "shuffle": "False",
        }
    if loader is None:
        return _stream(script, parts, times)
    name = loader_name(script)
    loop = script.data_loop
    line = loop.node.lineno if loop else script.first.line[1]
    own = [
        each
        for each in script.route.body
        if any(script.values.get(one) is loader for one in bound(each.node))
    ]
    if script.loader is None and own:
        name = next(each for each in bound(own[0].node) if script.values.get(each) is loader)
        parts.inline = own[0].source.segment(own[0].node)
    elif script.watched.zipped is not None:
        parts.inline = f"{name} = {_zipped(script, line)}"
    elif script.loader is None:
        if loop is None or not isinstance(loop.node, ast.For):
            raise one_refusal(
                script,
                line,
                "the DataLoader has no name in the set-up. Make it before the loop, and give it a name.",
            )
        parts.inline = f"{name} = {loop.source.segment(script.iterated.unwrapped(loop.node.iter))}"
    if script.watched.nexts > 1:
        raise one_refusal(
            script, line, "several batches come for one backward(). Use one DataLoader with batch_size=..., or write Job(data=..., batch_size=..., collate=...) by hand.",
        )  # fmt: skip
    script.because(line, "each rank reads its share of the batches that the DataLoader's dataset gives")
    arguments = _order(script, loader, name, line, times)
    if loader.num_workers:
        arguments["num_workers"] = f"{name}.num_workers"
    collate = loader.collate_fn
    if getattr(collate, "__module__", "").startswith("torch.utils.data"):
        return arguments
    return arguments | {"collate": f"{name}.collate_fn"}


def _zipped(script: Script, line: int) -> str:
    """The loaders of a `zip` as one."""
    zipped: Any = script.watched.zipped
    names = [script.expression_of(each) for each in zipped.loaders]
    if None in names:
        raise one_refusal(script, line, "a DataLoader of the zip has no name in the set-up. Make it before the loop, and give it a name.")  # fmt: skip
    script.because(
        line,
        "a batch of each loader comes in every step, and the job divides them together; batches that are short, at the end of an epoch, are left out",
    )
    return zipped.text([each for each in names if each is not None])


def _order(script: Script, loader: Any, name: str, line: int, times: str) -> dict[str, str]:
    """`data=`, `batch_size=` and the order of a job whose script reads `loader`, which the job has as `name`."""
    sampler, whole = loader.sampler, f"{name}.batch_size{times}"
    arguments = {"data": f"lambda: {name}.dataset", "batch_size": whole}
    if isinstance(loader.dataset, IterableDataset):
        return arguments
    plain = type(sampler) in (RandomSampler, SequentialSampler, SubsetRandomSampler)
    replaced = isinstance(sampler, RandomSampler) and (sampler.replacement or len(sampler) != len(loader.dataset))  # fmt: skip
    if loader.batch_size is None or not plain or replaced:
        return _drawn(script, loader, name, line, times)
    if isinstance(sampler, SequentialSampler):
        arguments["shuffle"] = "False"
    else:
        script.because(
            line, "the order of samples is drawn from the job's seed, in place of torch's generator"
        )
    if isinstance(sampler, SubsetRandomSampler):
        arguments["data"] = f"lambda: Subset({name}.dataset, {name}.sampler.indices)"
    if loader.drop_last:
        arguments["drop_last"] = "True"
    return arguments


def _drawn(script: Script, loader: Any, name: str, line: int, times: str) -> dict[str, str]:
    """Of a loader with a sampler or a batch sampler that draws in a way of its own."""
    if loader.batch_sampler is None:
        raise one_refusal(
            script, line, "the DataLoader makes no batches. Use one with batch_size=..., or write Job(data=..., batch_size=..., collate=...) by hand."
        )  # fmt: skip
    kind = type(loader.sampler if loader.batch_size is not None else loader.batch_sampler).__name__
    sizes = {len(batch.samples or []) for each in script.watched.steps for batch in each}
    if len(sizes) > 1:
        raise one_refusal(
            script, line, f"{kind} draws batches of {' and '.join(map(str, sorted(sizes)))} samples, and a job's have one number of them. "
            "Let it draw as many each time, or write Job(data=..., batch_size=..., batch_sizes=...) by hand.",
        )  # fmt: skip
    size = max(sizes)
    if loader.batch_size is None:
        own = getattr(loader.batch_sampler, "batch_size", None) == size
        whole = f"{name}.batch_sampler.batch_size" if own else str(size)
    else:
        whole = f"{name}.batch_size"
    script.because(
        line, f"{kind} draws the samples, batch after batch, and the job divides each among ranks; batches of fewer samples, at the end of an epoch, are left out"
    )  # fmt: skip
    return {"data": f"lambda: DrawnSamples({name}, {whole})", "batch_size": f"{whole}{times}"}


def _stream(script: Script, parts: JobParts, times: str) -> dict[str, str]:
    """Of a function that returns a batch each time it is called."""
    getter = script.first.source
    found = [
        (line, call)
        for line in [*script.route.body, *script.route.setup, *script.route.beside]
        for call in calls(line.node)
        if isinstance(call.func, ast.Name) and call.func.id == getter
    ]
    if not found:
        raise no_batch(script)
    line, call = found[0]
    rows = (
        len(script.first.batch[0])
        if isinstance(script.first.batch, tuple | list)
        else len(script.first.batch)
    )
    names = [
        name
        for name, value in script.setup_values.items()
        if type(value) is int and value == rows and "batch" in name.lower()
    ]
    text = line.source.segment(call)
    if not isinstance(script.first.batch, tuple | list):
        raise line.refuse(
            f"{getter}() returns a {type(script.first.batch).__name__}. Let it return a tuple of tensors, one row a sample."
        )
    body = "\n".join(
        [
            "class Batches(IterableDataset):",
            f'    """The rows of what {getter} returns, call after call."""',
            "",
            "    def __iter__(self):",
            "        while True:",
            f"            yield from zip(*{text}, strict=True)",
        ]
    )
    parts.pieces.append(JobFunction("Batches", body, [], {"IterableDataset", *used(call)}))
    script.because(line.at, f"{text} is called by the job's data, which divides what it returns among ranks")
    return {"data": "Batches", "batch_size": f"{names[0] if names else rows}{times}"}
