"""A transformer layer of Megatron-LM on one rank of a tensor-parallel group, written down by hand from its published shapes: half
precision, attention written out, dropout, fused softmax, GELU and bias-dropout-add, layer norms that read their input once.

Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (2022), sections 4.2 and 5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshloom.clusters.cluster import Cluster
from meshloom.clusters.collective_seconds import collective_seconds, overlapped_seconds
from meshloom.clusters.operator_seconds import operator_seconds
from meshloom.clusters.work import Collective, OperatorWork

Recompute = Literal["none", "full", "selective"]
HALF = 2  # bytes of a number; a mask of dropout has one per number


@dataclass(frozen=True, kw_only=True)
class Layer:
    """hidden, heads, length and batch (sequences) of a layer whose tensor-parallel group has tp ranks."""

    hidden: int
    heads: int
    length: int
    batch: int
    tp: int
    sequence_parallel: bool = False
    recompute: Recompute = "none"

    @property
    def tokens(self) -> int:
        return self.length * self.batch

    @property
    def wide(self) -> int:
        """Numbers of the tensors between the tensor-parallel regions on a rank."""
        return self.tokens * self.hidden // (self.tp if self.sequence_parallel else 1)

    @property
    def scores(self) -> int:
        return self.batch * self.heads // self.tp * self.length**2


def forward_seconds(cluster: Cluster, layer: Layer) -> float:
    """Of one forward pass."""
    products = [_product(*sizes) for sizes in _linears(layer)]
    norms, sums = [_moved(2, layer.wide)] * 2, [_moved(3, layer.wide, masks=1)] * 2
    inside = [*_core(layer), *products, _moved(2, _inner(layer))]
    return (
        _seconds(cluster, inside + norms + sums)
        + 2 * _gathered(cluster, layer)
        + 2 * _reduced(cluster, layer)
    )


def backward_seconds(cluster: Cluster, layer: Layer) -> float:
    """Of one backward pass, and of what it recomputes.

    Of the products that begin a tensor-parallel region, the gradient of the input is reduced beside the weight's gradient, and the
    input is gathered again beside the input's gradient, if the layer is sequence-parallel; so are gradients of a region's result.
    """
    norms, sums = [_moved(5, layer.wide)] * 2, [_moved(3, layer.wide, masks=1), _moved(3, layer.wide)] * 2
    first, last = _linears(layer)[::2], _linears(layer)[1::2]
    ending = [_product(1, m, k, n) for _, m, n, k in last] + [_product(1, n, k, m) for _, m, n, k in last]
    inside = [*_core_backward(layer), *ending, _moved(3, _inner(layer))]
    seconds = _seconds(cluster, inside + norms + sums) + 2 * _gathered(cluster, layer)
    for _, m, n, k in first:
        of_input, of_weight = (_seconds(cluster, [_product(1, *sizes)]) for sizes in ((m, k, n), (n, k, m)))
        seconds += overlapped_seconds(cluster.device, of_input, _gathered(cluster, layer))
        seconds += overlapped_seconds(cluster.device, of_weight, _reduced(cluster, layer))
    if layer.recompute == "full":
        return seconds + forward_seconds(cluster, layer)
    return seconds + (_seconds(cluster, _core(layer)) if layer.recompute == "selective" else 0.0)


def forward_flops(layer: Layer) -> int:
    """Of the products of a forward pass."""
    return sum(work.flops for work in _core(layer)) + sum(_product(*sizes).flops for sizes in _linears(layer))


def backward_flops(layer: Layer) -> int:
    """Of the products of a backward pass, and of those that it recomputes."""
    again = {"none": 0, "full": forward_flops(layer), "selective": sum(work.flops for work in _core(layer))}
    return 2 * forward_flops(layer) + again[layer.recompute]


def _linears(layer: Layer) -> list[tuple[int, int, int, int]]:
    """Sizes of the products with queries' keys' and values' weights, with the projection's, and with those of the two of the MLP."""
    hidden, tp = layer.hidden, layer.tp
    return [
        (1, layer.tokens, 3 * hidden // tp, hidden),
        (1, layer.tokens, hidden, hidden // tp),
        (1, layer.tokens, 4 * hidden // tp, hidden),
        (1, layer.tokens, hidden, 4 * hidden // tp),
    ]


def _core(layer: Layer) -> list[OperatorWork]:
    """Scores, softmax, dropout and their product with the values, whose heads are put side by side."""
    groups, length, head = layer.batch * layer.heads // layer.tp, layer.length, layer.hidden // layer.heads
    return [
        _product(groups, length, length, head),
        _moved(2, layer.scores),
        _moved(2, layer.scores, masks=1),
        _product(groups, length, head, length),
        _moved(2, layer.tokens * layer.hidden // layer.tp),
    ]


def _core_backward(layer: Layer) -> list[OperatorWork]:
    groups, length, head = layer.batch * layer.heads // layer.tp, layer.length, layer.hidden // layer.heads
    return [
        _product(groups, length, length, head),
        _product(groups, length, head, length),
        _moved(2, layer.scores, masks=1),
        _moved(3, layer.scores),
        _product(groups, length, head, length),
        _product(groups, length, head, length),
        _moved(4, layer.tokens * layer.hidden // layer.tp),
    ]


def _inner(layer: Layer) -> int:
    """Numbers between the two products of the MLP."""
    return layer.tokens * 4 * layer.hidden // layer.tp


def _product(batch: int, m: int, n: int, k: int) -> OperatorWork:
    num_bytes = HALF * batch * (m * k + k * n + m * n)
    return OperatorWork(
        kind="product",
        flops=2 * batch * m * n * k,
        num_bytes=num_bytes,
        dtype="float16",
        sizes=(batch, m, n, k),
    )


def _moved(tensors: int, numbers: int, masks: int = 0) -> OperatorWork:
    return OperatorWork(kind="other", flops=0, num_bytes=numbers * (HALF * tensors + masks), dtype="float16")


def _gathered(cluster: Cluster, layer: Layer) -> float:
    return _sent(cluster, layer, "all_gather") if layer.sequence_parallel else 0.0


def _reduced(cluster: Cluster, layer: Layer) -> float:
    return _sent(cluster, layer, "reduce_scatter" if layer.sequence_parallel else "all_reduce")


def _sent(cluster: Cluster, layer: Layer, collective: Collective) -> float:
    return collective_seconds(cluster, collective, HALF * layer.tokens * layer.hidden, range(layer.tp))


def _seconds(cluster: Cluster, works: list[OperatorWork]) -> float:
    return sum(operator_seconds(cluster.device, work) for work in works)
