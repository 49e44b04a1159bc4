"""Parameters without gradient that a loss writes, such as a teacher's moving average: they are treated as buffers.

They stay parameters of the user's modules. Only their names are kept, with the model that they belong to.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from torch import Tensor, nn

from meshloom.core.buffer_rules import BufferRule, rule_of

_KEY = "_written_by_its_loss"


def mark_written(model: nn.Module, names: Collection[str]) -> None:
    """From now on the parameters of these names count as buffers of `model`, in addition to those marked
    before."""
    if names:
        vars(model)[_KEY] = tuple(sorted({*names, *_marked(model)}))


def mark_declared(model: nn.Module, rules: Mapping[str, BufferRule]) -> None:
    """Mark the parameters without gradient for which the job has a rule."""
    untrained = (name for name, each in model.named_parameters() if not each.requires_grad)
    mark_written(model, [name for name in untrained if rule_of(name, rules) is not None])


def written_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Those that are marked, by the first of their names.

    >>> model = nn.Linear(2, 3)
    >>> mark_written(model, ["bias"])
    >>> list(written_parameters(model)), [name for name, _ in named_buffers(model)]
    (['bias'], ['bias'])
    """
    marked = _marked(model)
    return {name: each for name, each in model.named_parameters() if name in marked} if marked else {}


def limited_tables(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trained tables of embeddings with `max_norm`, whose forwards scale the rows that they read, by the first of
    their names."""
    embeddings = [each for each in model.modules() if isinstance(each, nn.Embedding | nn.EmbeddingBag)]
    tables = {
        id(each.weight) for each in embeddings if each.max_norm is not None and each.weight.requires_grad
    }
    return {name: each for name, each in model.named_parameters() if id(each) in tables}


def frozen_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The other parameters without gradient that this rank holds."""
    written = written_parameters(model)
    return [
        (name, each)
        for name, each in model.named_parameters()
        if not each.requires_grad and not each.is_meta and name not in written
    ]


def named_buffers(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
    """The model's buffers, then its marked parameters, under all their names if duplicates stay."""
    yield from model.named_buffers(remove_duplicate=remove_duplicate)
    marked = {id(each) for each in written_parameters(model).values()}
    if marked:
        for name, each in model.named_parameters(remove_duplicate=remove_duplicate):
            if id(each) in marked:
                yield name, each


def _marked(model: nn.Module) -> tuple[str, ...]:
    return vars(model).get(_KEY, ())
