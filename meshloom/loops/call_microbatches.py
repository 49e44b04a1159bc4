"""The microbatches of a call, and whether what is computed of them is what is computed of the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves

from meshloom.core.errors import CODE_ERRORS, CaptureError, first_line
from meshloom.core.losses.loss_sum import as_sum
from meshloom.core.plan_shares import chunk_sizes
from meshloom.loops.call_weight import counts
from meshloom.loops.captured_forward import CapturedForward, results
from meshloom.loops.execution import Cutting
from meshloom.program.ir.leaves import leaves_of

WAY_OUT = (
    'Say which dim of which input is the batch, as in parallel(batch={"data": 1, "mask": None}), where None is for what all microbatches need whole; '
    "or use microbatches=1."
)


Say = Callable[[Mapping[str, Any]], float | None]


class Microbatch:
    """Some rows of a call's inputs, whose tensors are leaves of its graph. share: what its results count in a mean over the call's microbatches;
    by_rows: as its rows do."""

    def __init__(
        self, batch: Mapping[str, Any], rows: int, share: float = 1.0, *, by_rows: bool = True
    ) -> None:
        self.batch, self.leaves, self.rows = batch, leaves_of(batch), rows
        self.share, self.by_rows = share, by_rows


def microbatches_of(
    batch: Mapping[str, Any], count: int, dims: Mapping[str, Cutting], say: Say = lambda part: None
) -> tuple[list[Microbatch], dict[str, int]]:
    """The inputs in parts, as many as there are rows for, and along which dim each tensor is cut. dims: of inputs by name, None: all
    microbatches have the whole, "part": of a number, each has its share; others are cut along dim 0. say: what one counts, given its inputs, with
    such numbers whole; None: its rows. Raises `CaptureError` for inputs of different lengths, `TrainingError` as `counts`.

    >>> parts, _ = microbatches_of({"x": torch.ones(5, 2), "scale": 3.0}, 2, {})
    >>> [each.rows for each in parts], parts[1].leaves.tensors["x"].shape
    ([3, 2], torch.Size([2, 2]))
    """
    leaves = leaves_of(batch)
    along: dict[str, int] = {}
    cuts = {name: dims.get(name, dims.get(name.split(".")[0], 0)) for name in leaves.tensors}
    for name, each in leaves.tensors.items():
        dim = cuts[name]
        if isinstance(dim, int) and each.ndim:
            along[name] = dim
    sizes = {name: leaves.tensors[name].size(dim) for name, dim in along.items()}
    first = next(iter(sizes), None)
    if first is None:
        return [Microbatch(leaves.rebuild(_leaves_of_a_graph(leaves.tensors.values())), 1)], {}
    other = next((name for name, size in sizes.items() if size != sizes[first]), None)
    if other is not None:
        raise CaptureError(
            f"A pipeline cuts the inputs of a call: {first} has {sizes[first]} rows along dim {along[first]} and {other} has {sizes[other]} along dim {along[other]}. "
            + WAY_OUT
        )
    rows = chunk_sizes(sizes[first], min(count, sizes[first]))
    cut = {name: leaves.tensors[name].split(rows, dim) for name, dim in along.items()}

    def part(number: int, share: float = 1.0) -> Mapping[str, Any]:
        values = [
            cut[name][number].contiguous() if name in cut else each * share if cuts[name] == "part" else each
            for name, each in leaves.tensors.items()
        ]
        return leaves.rebuild(_leaves_of_a_graph(values))

    said = [say(part(number)) for number in range(len(rows))] if len(rows) > 1 else [None]
    counted = counts(said, rows, "microbatch")
    shares = [each / sum(counted) for each in counted]
    found = [
        Microbatch(part(at, shares[at]), size, shares[at], by_rows=counted is rows)
        for at, size in enumerate(rows)
    ]
    return found, along


def _leaves_of_a_graph(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [each.detach().requires_grad_(each.requires_grad) for each in tensors]


def _in_evaluation(model: nn.Module) -> nn.Module:
    for each in model.modules():
        each.training = False
    return model


def _computed(model: nn.Module, forward: CapturedForward, batch: Any) -> tuple[Any, bool]:
    """What it returns, and whether it draws."""
    before = torch.get_rng_state()
    return forward(model, batch), not torch.equal(before, torch.get_rng_state())


def check_rows(
    copy: Callable[[], nn.Module], forward: CapturedForward, batch: Mapping[str, Any], microbatches: Sequence[Microbatch]
) -> None:  # fmt: skip
    """Raises `CaptureError` where the model's results for the batch are not those for its parts, joined: rows depend on each other, or what is
    cut is not the batch. Compares in evaluation mode, and no values of a forward that draws there, too. copy: makes one of the model."""
    rows, forward = [each.rows for each in microbatches], replace(forward, graded=None)
    if len(rows) == 1:
        return
    returned, draws = _computed(_in_evaluation(copy()), forward, batch)
    whole, model = tree_leaves(returned), _in_evaluation(copy())
    try:
        parts = [tree_leaves(forward(model, each.batch)) for each in microbatches]
    except CODE_ERRORS as error:
        raise CaptureError(
            f"A pipeline cuts the inputs of a call, and the forward fails for {rows[0]} of its {sum(rows)} rows ({first_line(error)}). {WAY_OUT}"
        ) from error
    for at, result in enumerate(whole):
        of_parts = [each[at] for each in parts]
        joined = joined_result(of_parts, microbatches)
        if joined is None or joined.shape != result.shape:
            found = "cannot be joined" if joined is None else f"have shape {list(joined.shape)}, joined"
            raise CaptureError(
                f"A pipeline cuts the inputs of a call. Result {at} of the forward has shape {list(result.shape)}, and those of {len(rows)} microbatches {found}. "
                "Results have their rows along dim 0, whatever dim inputs have them along. " + WAY_OUT
            )
        if draws:
            continue
        if not is_joined([each.shape for each in of_parts], rows):
            if not microbatches[0].by_rows and _differ(joined, result, _rounding(result, forward), of_parts):
                raise CaptureError(
                    f"Result {at} of the forward is {_number(result)}, and the mean over {len(rows)} microbatches by what parallel(weight=...) counts in them is "
                    f"{_number(joined)}. Let it count what the result is a mean over, or use microbatches=1."
                )
        elif _differ(joined, result):
            raise CaptureError(
                f"A pipeline cuts the inputs of a call, and their rows depend on each other: result {at} is another one for {len(rows)} microbatches, joined. "
                + WAY_OUT
            )


def check_loss(
    copy: Callable[[], nn.Module], forward: CapturedForward, batch: Any, microbatches: Sequence[Microbatch]
) -> None:
    """Raises `CaptureError` where the loss of the batch is not that of its parts: samples depend on each other, or it is a mean over
    something else. Compares in evaluation mode, and no loss that draws there, too. copy: as of `check_rows`."""
    returned, draws = _computed(_in_evaluation(copy()), forward, batch)
    if draws or len(microbatches) == 1:
        return
    whole, model = _mean_of(returned, 1)[0], _in_evaluation(copy())
    sums = [_mean_of(forward(model, each.batch), each.rows) for each in microbatches]
    values, weights = (torch.stack(each).double() for each in zip(*sums, strict=True))
    mean = (values * weights).sum() / weights.sum()
    if _differ(mean, whole, _rounding(whole, forward), [values]):
        raise CaptureError(
            f"A pipeline cuts the batch, and its loss is {float(whole):.6g} where the mean over {len(sums)} microbatches is {float(mean):.6g}. If it is a mean over "
            "something else than samples, such as tokens, return the sum and what it counts, (sum, count); if samples depend on each other, use microbatches=1."
        )


def _mean_of(returned: Any, rows: int) -> tuple[Tensor, Tensor]:
    """The mean, and what it counts."""
    value, weight = as_sum(results(*tree_flatten(returned)), rows, needs_gradient=False)
    return value.detach() / weight, torch.as_tensor(weight, device=value.device)


def _rounding(mean: Tensor, forward: CapturedForward) -> float:
    """More than that of a mean, and less than what another mean differs by."""
    return 1e-4 if mean.dtype.itemsize > 2 and not forward.autocast else 1e-2


def _number(result: Tensor) -> str:
    return f"{float(result):.6g}" if result.numel() == 1 else "another one"


def _differ(one: Tensor, other: Tensor, rounding: float = 1e-2, of: Sequence[Tensor] = ()) -> bool:
    """By far more than rounding, a part of the largest of these; without them, of `other`."""
    if not one.numel():
        return False
    a, b, *larger = (each.double().nan_to_num() for each in (one, other, *of))
    return float((a - b).abs().max()) > rounding * max(float(each.abs().max()) for each in larger or [b])


def joined_result(parts: Sequence[Tensor], microbatches: Sequence[Microbatch]) -> Tensor | None:
    """One result of all microbatches, of those of each: their rows, or their mean by what each counts; None: there is neither."""
    if is_joined([each.shape for each in parts], [each.rows for each in microbatches]):
        return torch.cat(list(parts))
    if len(parts) == 1:
        return parts[0].clone()
    if any(each.shape != parts[0].shape for each in parts) or not parts[0].is_floating_point():
        return None
    return torch.stack([part * each.share for part, each in zip(parts, microbatches, strict=True)]).sum(0)


def is_joined(shapes: Sequence[tuple[int, ...]], rows: Sequence[int]) -> bool:
    """Whether a result has so many rows for each row of the inputs, in all microbatches: else it is a mean over them."""
    return all(
        shape and shape[0] and shape[0] * rows[0] == shapes[0][0] * size and shape[0] % size == 0
        for shape, size in zip(shapes, rows, strict=True)
    )
