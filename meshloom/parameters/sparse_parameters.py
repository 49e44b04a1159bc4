"""Which parameters have sparse gradients, and which optimizers receive them as such."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

from meshloom.core.errors import JobError
from meshloom.core.job import NamedParameters


@dataclass(frozen=True, kw_only=True)
class Sparse:
    """names: of parameters with sparse gradients. kept: names of those whose optimizers receive sparse
    gradients. sparse_only: names of those whose optimizers accept no others."""

    names: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()
    sparse_only: frozenset[str] = frozenset()


def sparse_parameters(
    tables: Collection[str], named: NamedParameters, optimizers: Sequence[Optimizer]
) -> Sparse:
    """`tables`, the trainable parameters of embeddings with sparse=True (`sparse_tables`), and those of SparseAdam.

    SparseAdam, and SGD and Adagrad with settings that leave unused rows unchanged, receive sparse gradients,
    as on one device; others receive the same values dense, so that optimizers such as Adam work too.
    """
    optimizer_of = {
        id(each): optimizer
        for optimizer in optimizers
        for group in optimizer.param_groups
        for each in group["params"]
    }
    names = {
        name for name, each in named if name in tables or isinstance(optimizer_of.get(id(each)), SparseAdam)
    }
    owner = {name: optimizer_of.get(id(each)) for name, each in named if name in names}
    return Sparse(
        names=frozenset(names),
        kept=frozenset(
            name for name, optimizer in owner.items() if optimizer is not None and _takes_rows(optimizer)
        ),
        sparse_only=frozenset(name for name, optimizer in owner.items() if isinstance(optimizer, SparseAdam)),
    )


def sparse_weight(module: nn.Module) -> Tensor | None:
    """The module's parameter whose gradient is sparse; none if its weight is computed (by a parametrization)."""
    is_sparse = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    return dict(module.named_parameters(recurse=False)).get("weight") if is_sparse else None


def sparse_tables(model: nn.Module) -> frozenset[str]:
    """Names of the parameters of its embeddings with sparse=True."""
    weights = {id(each) for each in map(sparse_weight, model.modules()) if each is not None}
    return frozenset(name for name, each in model.named_parameters() if id(each) in weights)


def make_dense(model: nn.Module) -> None:
    """Switches embeddings to dense gradients of the same values."""
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.sparse = False


def refuse_sparse_adam(optimizers: Sequence[Optimizer], where: str) -> None:
    """Raises `JobError` if one of them is SparseAdam and gradients are dense. where: as the end of a
    sentence."""
    if any(isinstance(optimizer, SparseAdam) for optimizer in optimizers):
        raise JobError(
            f"SparseAdam needs sparse gradients, and gradients are dense {where}. Use another exchange, or an optimizer such as Adam for these "
            "parameters."
        )


def _takes_rows(optimizer: Optimizer) -> bool:
    """Whether it accepts sparse gradients, and keeps no sparse state."""
    if isinstance(optimizer, SparseAdam):
        return True
    if type(optimizer) not in (SGD, Adagrad):
        return False
    groups = optimizer.param_groups
    return not any(
        group.get(name)
        for group in groups
        for name in ("weight_decay", "momentum", "nesterov", "fused", "foreach", "differentiable")
    )
