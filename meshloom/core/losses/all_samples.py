"""What `Metric.update` returns, chunk by chunk, and what `Metric.compute` makes of all of it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from numbers import Real
from typing import Any

import numpy
import torch
from torch import Tensor

from meshloom.core.errors import JobError
from meshloom.core.job_functions import Metric
from meshloom.core.units import format_count

Whole = Tensor | tuple[Tensor, ...] | dict[str, Tensor]  # of one chunk, or of all samples


class ComputeError(JobError):
    """`Metric.compute` raised something."""


def checked_samples(returned: Any, samples: int) -> Whole:
    """What `update` returned for a chunk of so many samples, copied to the CPU; numbers of 16 bits as float32, as numpy has no bfloat16. Raises
    `JobError`."""
    parts = _parts(returned)
    for each in parts:
        if not isinstance(each, Tensor):
            where = "" if each is returned else f" in a {type(returned).__name__}"
            raise JobError(f"update returned a {type(each).__name__}{where}. {_GIVE}")
        if not each.ndim or len(each) != samples:
            raise JobError(
                f"update returned a tensor of shape {list(each.shape)} for a chunk of {format_count(samples, 'sample')}. {_GIVE}"
            )
    if not parts:
        raise JobError(f"update returned an empty {type(returned).__name__}. {_GIVE}")
    return _like(
        returned, [each.detach().to("cpu", _LARGER.get(each.dtype, each.dtype), copy=True) for each in parts]
    )


def computed(metric: Metric, chunks: Sequence[Whole]) -> float:
    """The metric of all samples. chunks: what `checked_samples` gave, in order; one or more. Raises `ComputeError` for what `compute` raises, and
    `JobError` for chunks that do not fit together, for a function that cannot be called with them, and for what is no number.

    >>> share = Metric(lambda model, batch: batch, lambda ours, right: (ours == right).float().mean())
    >>> computed(share, [(torch.tensor([1, 0]), torch.tensor([1, 1])), (torch.tensor([1, 1]), torch.tensor([1, 1]))])
    0.75
    """
    return _number(_called(metric.compute, _joined(chunks)))


_LARGER = dict.fromkeys((torch.bfloat16, torch.float16), torch.float32)
_GIVE = "Return a tensor [samples, ...], or a tuple or dict of them; what is a mean over the samples, or (sum, weight), is given without ml.Metric."


def _parts(whole: Any) -> list[Any]:
    if isinstance(whole, tuple | list):
        return list(whole)
    return list(whole.values()) if isinstance(whole, dict) else [whole]


def _like(whole: Any, parts: Sequence[Tensor]) -> Whole:
    if isinstance(whole, tuple | list):
        return tuple(parts)
    return dict(zip(whole, parts, strict=True)) if isinstance(whole, dict) else parts[0]


def _joined(chunks: Sequence[Whole]) -> Whole:
    first, names = chunks[0], _names(chunks[0])
    columns: list[Tensor] = []
    for number, name in enumerate(names):
        column: list[Tensor] = []
        for each in chunks:
            if _names(each) != names:
                raise JobError(
                    f"update returned {_text(names)} for one chunk and {_text(_names(each))} for another. Return the same for each."
                )
            column.append(_parts(each)[number])
            if column[-1].shape[1:] != column[0].shape[1:]:
                raise JobError(
                    f"update returned a tensor of shape {list(column[0].shape)} for one chunk and {list(column[-1].shape)} for another{name and f', as {name!r}'}. "
                    "Only the number of samples may differ: pad the others."
                )
        columns.append(torch.cat(column))
    return _like(first, columns)


def _names(whole: Whole) -> list[str]:
    """Of a dict its names, else an empty one for each tensor."""
    return list(whole) if isinstance(whole, dict) else [""] * len(_parts(whole))


def _text(names: Sequence[str]) -> str:
    return f"a dict of {', '.join(names)}" if any(names) else format_count(len(names), "tensor")


def _called(compute: Callable[..., Any], whole: Whole) -> Any:
    arguments = () if isinstance(whole, dict) else tuple(_parts(whole))
    named: dict[str, Tensor] = whole if isinstance(whole, dict) else {}
    with suppress(ValueError):  # some that are not written in Python have no signature
        try:
            inspect.signature(compute).bind(*arguments, **named)
        except TypeError as error:
            given = ", ".join(f"{name}=..." for name in named) or format_count(len(arguments), "tensor")
            raise JobError(f"compute is called with ({given}), as update returns: {error}.") from None
    try:
        return compute(*arguments, **named)
    except Exception as error:
        raise ComputeError(f"compute failed with {type(error).__name__}: {error}") from error
    finally:
        reset = getattr(compute, "reset", None)
        if callable(reset):
            reset()


def _number(value: Any) -> float:
    if isinstance(value, Tensor | numpy.ndarray | numpy.generic) and math.prod(value.shape) == 1:
        value = value.item()
    if isinstance(value, Real):
        return float(value)
    shape = f" of shape {list(value.shape)}" if isinstance(value, Tensor | numpy.ndarray) else ""
    raise JobError(
        f"compute returned a {type(value).__name__}{shape}, not one number. Give one Metric for each number."
    )
