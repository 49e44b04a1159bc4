"""One device's chunks run again in ways that would be wrong: with parameters of an earlier step, in another precision, with the
draws of another step or chunk, with a module that lacks its bias or is in evaluation mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.dropout import _DropoutNd  # pyright: ignore[reportPrivateUsage]
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from meshloom.verify.between_steps.checks import TensorError
from meshloom.verify.causes.of_gradients import is_explained
from meshloom.verify.reference.buffer_merging import changed_numbers
from meshloom.verify.reference.mistakes import Evidence, Gradients, OtherRun, subsample_each
from meshloom.verify.reference.reference import Reference
from meshloom.verify.reference.reruns import chunk_by_chunk, full_evidence, having, one_by_one
from meshloom.verify.reference.samples_of_epoch import RIGHT, reader_of_step

_FIRST = 4  # steps, of whose batches numbers may be
_MOST_MODULES = 8  # that are tried one by one
_SMALL = 2**24  # parameters of a model that is run so often


def whole_evidence(
    reference: Reference, initial: Evidence, errors: Sequence[TensorError], ours: Gradients, rounding: float
) -> Evidence:
    """The evidence with reruns of the step, and with those in other ways if they are needed. errors, ours: of the plan's gradients, which are
    subsampled. rounding: what need not be explained. To be called between `Reference.run` and `Reference.update`."""
    evidence = replace(full_evidence(reference, initial), without_hooks=[*_without_hooks(reference)])
    if is_explained(errors, ours, reference.gradients, evidence, rounding):
        return evidence
    return replace(evidence, others=[*other_runs(reference)])


def other_runs(reference: Reference) -> Iterator[OtherRun]:
    """All of them; state is left unchanged."""
    yield from _with_earlier_weights(reference)
    yield from _in_other_precision(reference)
    yield from _with_numbers_of_batches(reference)
    yield from _with_chained_numbers(reference)
    yield from _with_chained_tensors(reference)
    if any(chunk.draws for chunk in reference.chunks):
        yield from _with_other_draws(reference)
    if sum(each.numel() for each in reference.parameters.values()) <= _SMALL:
        yield from _without_biases(reference)
        yield from _in_evaluation_mode(reference)


def _without_hooks(reference: Reference) -> Iterator[OtherRun]:
    """Parameters have no hooks, if some have."""
    of_each = [each._backward_hooks for each in reference.parameters.values()]  # pyright: ignore[reportPrivateUsage]
    of_each += [getattr(each, "_post_accumulate_grad_hooks", None) for each in reference.parameters.values()]
    kept = [(hooks, dict(hooks)) for hooks in of_each if hooks]
    if not kept:
        return
    for hooks, _ in kept:
        hooks.clear()
    try:
        chunks = chunk_by_chunk(reference)
    finally:
        for hooks, own in kept:
            hooks.update(own)
    why = "hooks that the job has put on parameters are lost, or not called"
    yield OtherRun(kind="forward", what="whose parameters have no hooks", why=why, chunks=chunks)


def _with_earlier_weights(reference: Reference) -> Iterator[OtherRun]:
    """All, and those of each module, if there are few."""
    by_module = _trained_by_module(reference)
    parts = {"all modules": [name for names in by_module.values() for name in names]}
    if len(by_module) <= _MOST_MODULES:
        parts |= {module or "the model": names for module, names in by_module.items()}
        if sum(map(len, by_module.values())) <= 2 * _MOST_MODULES:
            parts |= {name: [name] for names in by_module.values() for name in names if len(names) > 1}
    names = [name for of_module in by_module.values() for name in of_module]
    within = [name for name in names if any(part.isdecimal() for part in name.split("."))]
    if 0 < len(within) < len(names):
        parts |= {
            "all repeated modules": within,
            "all modules that are not repeated": [name for name in names if name not in within],
        }
    seen: list[Any] = []
    for when, values in reference.earlier.items():
        if any(values is each for each in seen):
            continue
        seen.append(values)
        for where, names in parts.items():
            with having(reference, {name: values[name] for name in names}):
                chunks = chunk_by_chunk(reference)
            what = f"of {where} with the weights {when}"
            yield OtherRun(kind="stale", what=what, why="what was updated is not used", chunks=chunks)


def _in_other_precision(reference: Reference) -> Iterator[OtherRun]:
    runs, kept = reference.chunk_run, reference.chunk_run.autocast
    lower = (torch.bfloat16, torch.float16) if reference.device.type == "cuda" else ()
    for other in lower if kept is None else (None,):
        if reference.precision != torch.float32:
            continue
        runs.autocast = other
        try:
            chunks = chunk_by_chunk(reference)
        finally:
            runs.autocast = kept
        name = str(other).removeprefix("torch.")
        yield OtherRun(
            kind="rounding", what=f"under autocast to {name}" if other else "without autocast",
            why="losses are not computed in the precision that the plan says", chunks=chunks,
        )  # fmt: skip


def _with_numbers_of_batches(reference: Reference) -> Iterator[OtherRun]:
    """Numbers and texts in the batch are those of another step's."""
    runs, step, kept = reference.chunk_run, reference.step, reference.chunk_run.replaced
    forwards = [*reference.forwards()]
    own = runs.collate(forwards[0].samples, step, forwards[0].key)
    if all(isinstance(each, Tensor) for each in tree_leaves(own)):
        return
    for other in sorted({*range(min(step, _FIRST)), *({step - 1} if step else ())}):
        with suppress(Exception):  # the job's own code may refuse a batch that is cut otherwise
            samples = iter(reader_of_step(reference.job, other)(RIGHT))
            batches = {
                each.key: runs.collate(list(islice(samples, len(each.samples))), other, each.key)
                for each in forwards
            }
            runs.replaced = lambda batch, key, batches=batches: _with_numbers(batch, batches[key])
            try:
                chunks = chunk_by_chunk(reference)
            finally:
                runs.replaced = kept
            what = f"with the numbers and texts that the batch of step {other} has beside its tensors"
            yield OtherRun(
                kind="stale", what=what, why="those of this step's batch are not used", chunks=chunks
            )


def _with_numbers(batch: Any, other: Any) -> Any:
    mine, structure = tree_flatten(batch)
    theirs = tree_leaves(other)
    leaves = [one if isinstance(one, Tensor) else two for one, two in zip(mine, theirs, strict=True)]
    return tree_unflatten(leaves, structure)


def _with_chained_numbers(reference: Reference) -> Iterator[OtherRun]:
    """Numbers in attributes of modules are those that the chunk before has left."""
    kept, m = reference.numbers, reference.plan.microbatches
    changed, chunks = set[str](), list[Gradients]()
    if m == 1 or not kept:
        return
    replicas = [forward.members[0][0] // m for forward in reference.forwards()]
    try:
        with reference.rerun():
            for number, _ in enumerate(one_by_one(reference)):
                chunks.append(subsample_each(reference.gradients))
                left = changed_numbers(reference.model, kept)
                changed |= {".".join(place).removeprefix(".") for place in left}
                goes_on = replicas[number] in replicas[number + 1 : number + 2]
                reference.numbers = kept | left if goes_on else kept
    finally:
        reference.numbers = kept
    if changed:
        what = f"that finds the numbers in attributes ({', '.join(sorted(changed)[:3])}) that the chunk before has left"
        yield OtherRun(kind="buffers", what=what, why="they are put back between chunks", chunks=chunks)


def _with_chained_tensors(reference: Reference) -> Iterator[OtherRun]:
    """Tensors in attributes of modules are those that the chunk before on its replica has left."""
    left, m = reference.chunk_run.left, reference.plan.microbatches
    names = sorted(
        name for name, values in left.by_name().items() if any(each is not None for each in values.values())
    )
    if m == 1 or reference.plan.sync_batch_norm or not names:
        return
    with left.going_on(lambda key: key % m > 0):
        chunks = chunk_by_chunk(reference)
    what = f"that finds the tensors in attributes ({', '.join(names[:3])}) that the chunk before has left"
    why = "a chunk does not go on from what the chunk of its number has left in the step before"
    yield OtherRun(kind="buffers", what=what, why=why, chunks=chunks)


def _with_other_draws(reference: Reference) -> Iterator[OtherRun]:
    runs, kept, m = reference.chunk_run, reference.chunk_run.place_of_seed, reference.plan.microbatches
    ways: dict[str, Callable[[int, int], tuple[int, int]]] = {
        "the next step": lambda step, key: (step + 1, key),
        "the step before": lambda step, key: (step - 1, key),
        "step 0": lambda step, key: (0, key),
        "chunk 0": lambda step, key: (step, 0),
        "the chunk of this number of replica 0": lambda step, key: (step, key % m),
        "the first chunk of the replica": lambda step, key: (step, key - key % m),
    }
    places = [(reference.step, forward.key) for forward in reference.forwards()]
    seen = [places]
    for what, way in ways.items():
        others = [way(*place) for place in places]
        if others in seen or min(step for step, _ in others) < 0:
            continue
        seen.append(others)
        runs.place_of_seed = way
        try:
            chunks = chunk_by_chunk(reference)
        finally:
            runs.place_of_seed = kept
        yield OtherRun(
            kind="same draws", what=f"with the random draws, such as dropout masks, of {what}",
            why="they depend on something besides seed, step and chunk", chunks=chunks,
        )  # fmt: skip


def _without_biases(reference: Reference) -> Iterator[OtherRun]:
    by_module = _trained_by_module(reference)
    if len(by_module) > _MOST_MODULES:
        return
    for module, names in by_module.items():
        biases = [name for name in names if name.rpartition(".")[2].endswith("bias")]
        if not biases:
            continue
        zeros = {name: torch.zeros_like(reference.parameters[name]) for name in biases}
        with having(reference, zeros):
            chunks = [_without(each, biases) for each in chunk_by_chunk(reference)]
        what, why = f"in which {module or 'the model'} has no bias", "it is left out"
        yield OtherRun(kind="forward", what=what, why=why, chunks=chunks)


def _in_evaluation_mode(reference: Reference) -> Iterator[OtherRun]:
    found = [
        (name, module)
        for name, module in reference.model.named_modules()
        if module.training and isinstance(module, _BatchNorm | _DropoutNd)
    ]
    parts = {"the whole model": found} if len(found) > 1 else {}
    if len(found) <= _MOST_MODULES:
        parts |= {name: [(name, module)] for name, module in found}
    for where, modules in parts.items():
        for _, module in modules:
            module.training = False
        try:
            chunks = chunk_by_chunk(reference)
        finally:
            for _, module in modules:
                module.training = True
        what, why = f"in which {where} is in evaluation mode", "modes of modules are others"
        yield OtherRun(kind="forward", what=what, why=why, chunks=chunks)


def _trained_by_module(reference: Reference) -> dict[str, list[str]]:
    """Module -> names of its trained parameters."""
    found: dict[str, list[str]] = {}
    for name, each in reference.parameters.items():
        if each.requires_grad:
            found.setdefault(name.rpartition(".")[0], []).append(name)
    return found


def _without(gradients: Gradients, names: list[str]) -> Gradients:
    return {
        name: torch.zeros_like(each) if name in names and each is not None else each
        for name, each in gradients.items()
    }
