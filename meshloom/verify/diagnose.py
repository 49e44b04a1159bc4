"""The likely cause of a difference between a plan's step and one device's, in one sentence.

It is derived from the two records and, once something differs, from each chunk's own gradient
(`mistakes.py`). Order:

    draws, data, weights      facts of the chunks: the inputs differ
    gradients                 a mistake that explains all but a small part of the difference
    norm, update              the gradients agree: what follows them is wrong
    loss, buffers, replicas   the rest
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from meshloom.core.plan import Plan
from meshloom.core.units import plural
from meshloom.verify.causes.of_gradients import from_gradients
from meshloom.verify.causes.of_norms import from_norm
from meshloom.verify.causes.of_update_sizes import rounded_updates, scaled_updates
from meshloom.verify.compared.compare import Comparison
from meshloom.verify.compared.compare_chunks import filled, other_turn, wrong_number, wrong_settings
from meshloom.verify.reference.mistakes import Cause, Evidence, subsample
from meshloom.verify.reference.step_records import NOT_ROUNDED, StepRecord, seed_key

_NOWHERE: Mapping[str, str] = {}
_OF_INPUTS = ("stale", "buffers")  # causes of what a forward is given, which explain missing gradients, too


def diagnose(
    comparison: Comparison,
    ours: StepRecord,
    reference: StepRecord,
    evidence: Evidence,
    earlier: Sequence[Comparison] = (),
    of_averages: Cause | None = None,
    of_update: Cause | None = None,
    of_buffer: Cause | None = None,
    places: Mapping[str, str] = _NOWHERE,
    of_data: Cause | None = None,
) -> list[Cause]:
    """Likely causes of a step's difference, likeliest first: none if nothing differs, "unknown" if none
    fits. of_averages: what is wrong with moving averages, if parameters are right. of_update: which other update of one device
    gives what the plan has. of_buffer: what is wrong with a buffer, if nothing else is. places: digests of data, and `seed_key`, of chunks of
    earlier steps and turns. of_data: in which other way one device reads what the plan has."""
    if comparison.passed:
        return []
    causes = [*ours.changed]
    if (turn := other_turn(ours, reference)) is not None:
        why = "Losses take their turns in another order, or as often as they should not."
        if ours.turn == reference.turn:
            why = (
                "The run goes on in another step: with other samples than one device reads, and other draws."
            )
        return [*causes, Cause("turns", f"{turn} {why}")]
    if (told := wrong_number(ours)) is not None:
        causes.append(Cause("turns", f"{told} What a loss makes depend on the step is that of another one."))
    causes += [
        *_from_draws(ours, reference, evidence.plan, places),
        *_from_data(ours, reference, evidence.plan, places, of_data),
    ]
    gradients = comparison.failed("gradient")
    if gradients and len(causes) == len(ours.changed):
        missing = [*_from_missing(ours, reference, gradients, evidence)]
        found = [
            cause
            for cause in from_gradients(comparison, ours, reference, evidence)
            if not (causes and cause.kind in ("forward", "unknown"))  # of parameters that are not equal
        ]
        of_inputs = [cause for cause in found if cause.explains and cause.kind in _OF_INPUTS]
        causes += of_inputs + missing + [cause for cause in found if cause not in of_inputs]
    common = next((error for error in comparison.errors if error.kind == "scale"), None)
    if common is not None and common.multiple:
        what = f"All gradients are {common.multiple[0]:.8g} times one device's, each within its tolerance but all by the same factor"
        causes.append(Cause("scale", f"{what}: they are divided by a number that is slightly wrong."))
    elif not gradients:
        causes += from_norm(comparison, ours, reference, evidence) or _from_update(
            comparison, ours, reference, evidence, earlier, of_update
        )
    if of_averages and not causes and not gradients:
        causes.append(of_averages)
    logged = [name for name in comparison.failed("loss") if name != "loss"]
    if not causes and not gradients and logged == comparison.failed("loss") and logged:
        causes.append(
            Cause(
                "logged",
                f"Gradients and the loss agree, but not what is {_names(logged)}: it is averaged in another way.",
            )
        )
    elif not causes and not gradients and logged != comparison.failed("loss"):
        losses = f"{ours.loss:.6g} instead of {reference.loss:.6g}"
        sentence = (
            f"All gradients agree, but the loss is reported as {losses}: it is averaged in another way."
        )
        causes.append(Cause("loss", sentence))
    if not causes and not gradients and (buffers := comparison.failed("buffer")):
        what = "what chunks write there is not merged of all of them, in their order, each with its weight"
        if evidence.plan.sync_batch_norm and not any(
            each.rpartition(".")[0] in evidence.batch_norms for each in buffers
        ):
            what = "with sync_batch_norm a replica sees a part of a chunk, and where a buffer depends on samples the last replica's value is kept, as the run says"
        only = all(error.passed for error in comparison.errors if error.kind != "buffer")
        causes.append(
            of_buffer
            if of_buffer and only
            else Cause(
                "batch statistics",
                f"{'Only buffers' if only else 'Buffers'} differ ({_names(buffers)}): {what}.",
            )
        )
    if len(set(ours.replicas)) > 1:
        which = f", first {ours.apart[0]}" if ours.apart else ""
        sentence = (
            f"The replicas have different parameters or buffers after the step{which}: they drift apart"
        )
        if evidence.plan.exchange == "local_sgd" and not gradients:  # what comes of the mean is a consequence
            why = "which the mean at the end of a round takes back: it is not taken, or not by all alike"
            causes.insert(0, Cause("replicas", f"{sentence}, {why}."))
        else:
            causes.append(Cause("replicas", f"{sentence}."))
    if rounded := [each for each in ours.inconsistent if NOT_ROUNDED in each]:
        causes.append(
            Cause(
                "rounding", f"{rounded[0]}: it is rounded otherwise than to nearest, or is of another step."
            )
        )
    elif ours.inconsistent:
        sentence = (
            f"Ranks of one replica hold different values of what each of them holds: {ours.inconsistent[0]}."
        )
        causes.append(Cause("replicas", sentence))
    return causes or [Cause("unknown", f"Unknown cause: {_figures(ours, reference, gradients)}.")]


def _from_draws(
    ours: StepRecord, reference: StepRecord, plan: Plan, places: Mapping[str, str]
) -> Iterator[Cause]:
    """Chunks must start with different seeds, except those that share a forward (synchronised statistics). places: as of `diagnose`."""
    records = {"the plan": ours, "one device": reference}
    for who, record in records.items():
        seeds: dict[int, int] = {}
        for index, chunk in filled(record.chunks).items():
            key = index % plan.microbatches if plan.sync_batch_norm else index
            other = seeds.setdefault(chunk.seed, key)
            if other != key and (
                chunk.draws or (who == "the plan" and any(each.draws for each in record.chunks))
            ):
                of = [(each // plan.microbatches, each % plan.microbatches) for each in (other, key)]
                replicas = (
                    f"replicas {of[0][0]} and {of[1][0]}"
                    if plan.dp > 1
                    else f"microbatches {of[0][1]} and {of[1][1]}"
                )
                what = "use the same random draws, such as dropout masks"
                yield Cause("same draws", f"Chunks {other} and {key} ({replicas}) {what}, under {who}.")
                return
    chunks, right = filled(ours.chunks), filled(reference.chunks)
    if plan.captures or plan.compiles:  # draws inside captured programs, or compiled ones, are not observed
        return
    if plan.sync_batch_norm and len({len(each.draws) for each in right.values()}) > 1:
        return  # one device does not know which of them are whose
    wrong = [
        index
        for index in chunks
        if index in right
        and chunks[index].data == right[index].data
        and chunks[index].draws != right[index].draws
    ]
    if wrong:
        why = "other random draws than on one device; they depend on something besides seed, step and chunk"
        if plan.sync_batch_norm:
            same = all(chunks[index].seed == right[index].seed for index in wrong)
            of = "the seed is theirs" if same else "or of another seed"
            why = f"other random draws than on one device: other rows than theirs of what all replicas draw together, {of}"
        counts = [(len(chunks[index].draws), len(right[index].draws)) for index in wrong]
        if plan.keyed_draws and counts[0][0] != counts[0][1]:
            why = (
                f"{counts[0][0]} random draws instead of {counts[0][1]}, so that those after them are others"
            )
        if known := [place for index in wrong if (place := places.get(seed_key(chunks[index].seed)))]:
            why = f"the random draws of {_list(known)}, whose seed they have"
        yield Cause("same draws", f"{_chunks(wrong)}: {why}.")


def _from_data(
    ours: StepRecord, reference: StepRecord, plan: Plan, places: Mapping[str, str], of_data: Cause | None
) -> Iterator[Cause]:
    """places: digest of a chunk's data -> the earlier step and chunk that had it on one device. of_data: of `diagnose`."""
    chunks, right = filled(ours.chunks), filled(reference.chunks)
    here, there = (sum(each.samples for each in of.values()) for of in (chunks, right))
    owner = {chunk.data: index for index, chunk in right.items()}
    m = plan.microbatches
    wrong = [index for index in chunks if index not in right or chunks[index].data != right[index].data]
    exchanged = [(index, owner[chunks[index].data]) for index in wrong if chunks[index].data in owner]
    # a chunk whose samples another one runs as well
    twice = next(
        (
            (index, other)
            for index, other in exchanged
            if other in chunks and chunks[other].data == chunks[index].data
        ),
        None,
    )
    if wrong and of_data is not None and not exchanged:
        yield of_data
    elif wrong and here != there and not twice:
        what = "left out" if here < there else "read too often"
        yield Cause("data", f"The batch has {here} samples, and {there} on one device: some are {what}.")
    elif exchanged and len(exchanged) < len(wrong) and not twice:
        index, other = exchanged[0]
        rest = [each for each in wrong if chunks[each].data not in owner]
        samples = f"Chunk {index} runs the samples of chunk {other}, and {_chunks(rest).lower()} others than one device reads"
        yield Cause("data", f"{samples}: the batch begins elsewhere, or is cut in another way.")
    elif exchanged:
        index, other = twice or exchanged[0]
        end = "in place of its own"
        if twice:
            end = "which runs them too: replicas share data, and other samples are never read"
        samples = f"the samples of chunk {other} (replica {other // m})"
        yield Cause("data", f"Chunk {index} (replica {index // m}) runs {samples}, {end}.")
    elif wrong and all(chunks[index].data in places for index in wrong):
        known = _list([places[chunks[index].data] for index in wrong])
        yield Cause(
            "data", f"{_chunks(wrong)}: the samples of {known}: the data does not go on where it should."
        )
    elif wrong:
        why = "the batch is split, ordered, augmented or mixed in another way, reading a sample is not deterministic, or values change on their way to the device"
        yield Cause("data", f"{_chunks(wrong)}: other samples than one device reads; {why}.")
    elif missing := [index for index in right if index not in chunks]:
        yield Cause("data", f"{_chunks(missing)}: not computed under the plan.")
    elif not plan.sync_batch_norm:
        for index, chunk in right.items():
            if not math.isclose(chunks[index].weight, chunk.weight, rel_tol=1e-6):
                weights = f"weight {chunks[index].weight:g} instead of {chunk.weight:g}"
                yield Cause("weights", f"Chunk {index} has {weights}: the mean is weighted wrongly.")
                return


def _from_missing(
    ours: StepRecord, reference: StepRecord, names: Sequence[str], evidence: Evidence
) -> Iterator[Cause]:
    frozen = evidence.frozen
    mine = {name for name in names if ours.gradients.get(name) is not None}
    expected = {name for name in names if reference.gradients.get(name) is not None}
    if lost := [name for name in names if name in expected - mine]:
        why = ", as if frozen, which the job does not do in this step" if frozen is not None else ""
        biases = {name for name in expected if name.rpartition(".")[2] == "bias"}
        others = [other for name in lost for other in evidence.tied.get(name, ())]
        if set(lost) == biases and len(lost) > 1:
            why = ": these are all biases, and weights have theirs, so that what computes gradients of biases is left out"
        elif others and all(name in evidence.tied for name in lost):
            why = f": it is tied to {_names(others)}, and what one of the uses gives does not come to the rank that updates it"
        yield Cause("None or zero", f"{_names(lost)}: a gradient on one device and none under the plan{why}.")
    if extra := [name for name in names if name in mine - expected]:
        why = "where it is unused; optimizers distinguish zero from none"
        if frozen and all(name in frozen for name in extra):
            why = "as the job freezes it in this step"
        what = f"a gradient under the plan and none on one device, {why}"
        yield Cause("None or zero", f"{_names(extra)}: {what}.")


def _of_skipping(ours: StepRecord) -> Cause:
    """One side alone skips its update, and no gradient is at the edge of float16's range."""
    if ours.skipped:
        what = "The plan skips the update, and its gradients are finite, as one device's are"
        return Cause(
            "optimizer", f"{what}: gradients of another step, or what is none, count as overflowing."
        )
    what = "Gradients overflow float16 on both sides, and the plan makes an update all the same, or some of its ranks do"
    return Cause(
        "optimizer",
        f"{what}: they are not all told of an overflow, or each goes by its own part of the gradients.",
    )


def _although(ours: StepRecord) -> str:
    return (
        " The update is skipped on both sides: what comes after one was done all the same."
        if ours.skipped
        else ""
    )


def _from_update(
    comparison: Comparison,
    ours: StepRecord,
    reference: StepRecord,
    evidence: Evidence,
    earlier: Sequence[Comparison],
    of_update: Cause | None,
) -> list[Cause]:
    """Gradients and norm agree but the parameters, or the settings of optimizers, do not."""
    if ours.skipped != reference.skipped and not reference.overflow:
        return [_of_skipping(ours)]
    settings = [*wrong_settings(ours, reference)]
    if of_groups := [each for each in settings if " of optimizer " in each]:
        kept = next((f" {each}" for each in settings if " of scheduler " in each), "")
        return [
            Cause(
                "optimizer",
                f"The gradients agree, and the optimizer's settings do not: {of_groups[0]}{kept}{_although(ours)}",
            )
        ]
    wrong = {*comparison.failed("update"), *comparison.failed("parameter")}
    names = list(dict.fromkeys(error.name for error in comparison.errors if error.name in wrong))
    of_schedulers = [
        Cause(
            "optimizer",
            f"The gradients agree, and what {'schedulers keep' if ' of scheduler ' in each else 'is reported'} does not: {each}{_although(ours)}",
        )
        for each in settings[:1]
    ]
    if not names:
        return of_schedulers
    untrained = [name for name in names if reference.gradients.get(name) is None]
    if len(untrained) == len(names):
        what = "changed under the plan differently than on one device, without a gradient"
        return [Cause("optimizer", f"{_names(names)}: {what}.")]
    found = scaled_updates(comparison, names, reference) or rounded_updates(comparison, names, earlier)
    if found is not None or of_update is not None:
        return [of_update or found]  # pyright: ignore[reportReturnType]
    if of_schedulers:
        return of_schedulers
    again = ", or its further evaluations of the loss in the step are others" if evidence.has_closures else ""
    if early := [name for name in untrained if name in (evidence.frozen or ())]:
        what = f"The gradients agree, and {_names(early)} change, which the job freezes in this step and which have no gradients"
        why = "what updates them takes it for another step"
        if again:
            why = "further evaluations of the loss, which the optimizer asks for, are as of another step, or freeze nothing"
        return [Cause("optimizer", f"{what}: {why}.", explains=True)]
    some = f"those of {_names(names)}" if len(names) < len(reference.gradients) else "all of them"
    if earlier:
        when = f"The gradients agree, and so did all updates until step {comparison.step}, where updates differ ({some})"
        why = "the optimizer's state or schedule is wrong, such as the state of another rank or parameter"
        other = f"or it is given other gradients than those that were compared{again}"
        return [Cause("optimizer", f"{when}: {why}, {other}.")]
    clipped = evidence.clip is not None and (reference.gradient_norm or 0.0) > evidence.clip
    hint = "the optimizer has other settings or other parameters, or is given other gradients than those that were compared"
    if clipped:
        hint = "clipped to another norm, or the optimizer has other settings, or is given other gradients than those that were compared"
    kind = "clipping" if clipped and len(names) > 1 else "optimizer"
    sentence = f"The gradients agree but the updates differ from the first step on ({some}): {hint}{again}."
    return [Cause(kind, sentence)]


def _figures(ours: StepRecord, reference: StepRecord, failed: Sequence[str]) -> str:
    shown: list[str] = []
    for name in failed[:3]:
        a, b = ours.gradients.get(name), reference.gradients.get(name)
        if a is not None and b is not None and a.shape == b.shape:
            a, b = subsample(a), subsample(b)
            ratio = float((a * b).sum() / (b * b).sum().clamp_min(1e-300))
            rest = float((a - ratio * b).norm() / a.norm().clamp_min(1e-300))
            times = f"{ratio:.4g} times one device's, and {rest:.2g} of it is something else"
            shown.append(f"the gradient of {name} is {times}")
    return "; ".join(shown) or "no usual mistake explains the difference"


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _chunks(indices: Sequence[int]) -> str:
    return f"{plural('Chunk', len(indices))} {_list([str(index) for index in indices])}"


def _list(shown: Sequence[str]) -> str:
    return ", ".join(shown[:8]) + (", ..." if len(shown) > 8 else "")
