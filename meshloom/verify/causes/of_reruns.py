"""Causes that a rerun of one device in another way reproduces: a use of a tied parameter that is lost, weights of an earlier step,
another reduction over replicas, wrong factors of the chunks' gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from meshloom.verify.causes.of_elements import names_of
from meshloom.verify.reference.mistakes import Cause, Evidence

Gradients = Mapping[str, Tensor]  # subsampled, by name
Expected = Callable[[str], Tensor]  # name -> subsampled gradient
_MOST_REPLICAS = 16  # that are tried one by one
_MANY = 16  # elements, from which a share can be told


def of_tied_uses(evidence: Evidence, actual: Gradients, right: Gradients) -> Iterator[tuple[Cause, Expected]]:
    """A use of a tied parameter that is missing, or counts by another factor, on all replicas or on one."""
    for run in evidence.uses:
        (name,) = run.chunks[0]
        if name not in right or any(chunk[name] is None for chunk in run.chunks):
            continue
        for where, chosen in _replicas(evidence):
            total = sum(chunk.weight for chunk in evidence.chunks)
            part = torch.zeros_like(right[name])
            for number, chunk in enumerate(run.chunks):
                part += _zeros_or(chunk[name], part) / total if number in chosen else 0.0
            off = actual[name] - right[name]
            share = float((off * part).sum() / (part * part).sum().clamp_min(1e-300))
            what = f"is left out{where}" if abs(share + 1) < 1e-3 else f"counts {1 + share:.4g} times{where}"
            sentence = (
                f"What {run.what} adds to its gradient {what}: a tied gradient is lost, or added again."
            )
            yield (
                Cause("tied", sentence),
                lambda each, name=name, part=part, share=share: (
                    right[each] + share * part if each == name else right[each]
                ),
            )


def of_other_runs(evidence: Evidence, right: Gradients, who: str) -> Iterator[tuple[Cause, Expected]]:
    """Forwards in another way, on all replicas or on one."""
    for run in evidence.others:
        for where, chosen in _replicas(evidence):
            chunks = [
                replace(chunk, gradients=run.chunks[number]) if number in chosen else chunk
                for number, chunk in enumerate(evidence.chunks)
            ]
            total = sum(chunk.weight for chunk in chunks)
            expected = mixed(replace(evidence, chunks=chunks), [1 / total] * len(chunks), right)
            yield Cause(run.kind, f"{who} those of a forward {run.what}{where}: {run.why}."), expected


def of_leftovers(evidence: Evidence, right: Gradients, who: str) -> Iterator[tuple[Cause, Expected]]:
    """What a chunk gives once more for each one right after it on its replica that does not use the parameter: where that finds memory as the
    chunk before has left it. Only where all that is wrong is left out by some chunk."""
    if evidence.plan.microbatches == 1 or evidence.plan.sync_batch_norm:
        return
    names = {name for chunk in evidence.chunks for name in chunk.gradients}
    times = {name: found for name in names if max(found := _times_left(evidence, name), default=0) > 1}
    if not right or not set(right) <= set(times):
        return
    total = sum(chunk.weight for chunk in evidence.chunks)

    def expected(name: str) -> Tensor:
        return sum(
            (
                count / total * _zeros_or(chunk.gradients[name], right[name])
                for count, chunk in zip(times[name], evidence.chunks, strict=True)
            ),
            torch.zeros_like(right[name]),
        )

    first = next(iter(right))
    number = next(place for place, count in enumerate(times[first]) if count > 1)
    one, other = evidence.chunks[number].chunks[0], evidence.chunks[number + 1].chunks[0]
    which = f"what chunk {one} adds to {first} counts {times[first][number]} times"
    why = f"where a chunk does not use a parameter, such as chunk {other}, memory still holds the gradient of the chunk before"
    also = "" if set(times) == set(right) else ", or gradients are added once more"
    yield (
        Cause("stale", f"{who} one device's and what is left of other chunks ({which}): {why}{also}."),
        expected,
    )


def _times_left(evidence: Evidence, name: str) -> list[int]:
    """Of each chunk 1, and one more for each right behind it on its replica that has no gradient; 0: it has none itself."""
    m, times, last = evidence.plan.microbatches, list[int](), -1
    for number, chunk in enumerate(evidence.chunks):
        if chunk.gradients.get(name) is not None:
            times.append(1)
            last = number
            continue
        times.append(0)
        if last >= 0 and evidence.chunks[last].chunks[0] // m == chunk.chunks[0] // m:
            times[last] += 1
    return times


def of_other_reductions(evidence: Evidence, right: Gradients, who: str) -> Iterator[tuple[Cause, Expected]]:
    """Each element the largest or smallest of the replicas' sums."""
    of_replicas = parts_of_replicas(evidence, right)
    for what, reduce in (("largest", torch.amax), ("smallest", torch.amin)) if of_replicas else ():
        sentence = f"{who} the {what} of the replicas' parts, element by element, and not their sum."

        def expected(name: str, reduce: Callable[..., Tensor] = reduce) -> Tensor:
            return reduce(torch.stack([each(name) for each in of_replicas]), 0)

        yield Cause("not reduced", sentence), expected


def of_exchanged_parts(
    evidence: Evidence, actual: Gradients, right: Gradients, everything: Mapping[str, Tensor | None]
) -> Iterator[tuple[Cause, Expected]]:
    """Parts of one replica that are exchanged for one another. everything: one device's gradients."""
    known = {name: each for name, each in everything.items() if each is not None}
    for replica, part in enumerate(parts_of_replicas(evidence, known)):
        found: dict[str, Tensor] = {}
        others: list[str] = []
        for name, each in actual.items():
            off, left = each - right[name], each - right[name] + part(name)
            for other, like in known.items():
                same = other != name and like.shape == each.shape
                if same and float((left - part(other)).norm()) < 0.01 * float(off.norm()):
                    found[name] = right[name] - part(name) + part(other)
                    others.append(f"that of {name} is {other}'s")
                    break
        if found:
            yield (
                Cause("exchanged", f"What replica {replica} adds to gradients is exchanged: {', '.join(others[:3])}."),
                lambda name, found=found: found.get(name, right[name]),
            )  # fmt: skip


def parts_of_replicas(evidence: Evidence, right: Gradients) -> list[Expected]:
    """Each replica's part of the averaged gradients; none if there is one replica, or replicas share forwards."""
    total = sum(chunk.weight for chunk in evidence.chunks)
    return [
        mixed(evidence, [(number in chosen) / total for number in range(len(evidence.chunks))], right)
        for where, chosen in _replicas(evidence)
        if where
    ]


def of_owners(evidence: Evidence, actual: Gradients, right: Gradients) -> Cause | None:
    """Whether each wrong element is one replica's own, of another one in other places: its owner has not got the others'."""
    parts = parts_of_replicas(evidence, right)
    if not parts:
        return None
    total = sum(chunk.weight for chunk in evidence.chunks)
    ways = {
        "part of the mean": [1.0] * len(parts),
        "mean": [total / (weight or total) for weight in _weights(evidence)],
    }
    for what, factors in ways.items():
        counts, found = 0, [0] * len(parts)
        for name, each in actual.items():
            wrong = (each - right[name]).abs() > 1e-6 * right[name].abs().max()
            left = wrong.clone()
            for replica, (part, factor) in enumerate(zip(parts, factors, strict=True)):
                own = factor * part(name)
                fits = left & ((each - own).abs() <= 1e-4 * each.abs())
                found[replica] += int(fits.sum())
                left &= ~fits
            counts += int(wrong.sum())
        if counts >= _MANY and sum(found) > 0.95 * counts and sum(map(bool, found)) > 1:
            shares = ", ".join(
                f"{each / counts:.0%} of replica {replica}" for replica, each in enumerate(found) if each
            )
            of = f"{sum(found) / counts:.0%} of the wrong elements of {names_of(actual)} are one replica's own {what} ({shares})"
            return Cause(
                "not reduced",
                f"{of}: owners of slices have not got the gradients of other replicas. This explains {sum(found) / counts:.0%} of the elements.",
            )
    return None


def _weights(evidence: Evidence) -> list[float]:
    """Of each replica's chunks."""
    return [
        sum(chunk.weight for number, chunk in enumerate(evidence.chunks) if number in chosen)
        for where, chosen in _replicas(evidence)
        if where
    ]


def _replicas(evidence: Evidence) -> Iterator[tuple[str, set[int]]]:
    """All chunks, and those of each replica, by number; as the end of a sentence."""
    yield "", set(range(len(evidence.chunks)))
    m = evidence.plan.microbatches
    if 1 < evidence.plan.dp <= _MOST_REPLICAS and not evidence.plan.sync_batch_norm:
        for replica in range(evidence.plan.dp):
            yield (
                f" on replica {replica}",
                {number for number, chunk in enumerate(evidence.chunks) if chunk.chunks[0] // m == replica},
            )


def mixed(evidence: Evidence, factors: Sequence[float], right: Gradients) -> Expected:
    """The gradients of the chunks, each times its factor."""

    def expected(name: str) -> Tensor:
        total = torch.zeros_like(right[name])
        for factor, chunk in zip(factors, evidence.chunks, strict=True):
            part = chunk.gradients.get(name)
            if part is not None and factor:
                total += factor * part
        return total

    return expected


def _zeros_or(tensor: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if tensor is None else tensor
