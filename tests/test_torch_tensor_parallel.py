"""What PyTorch's own tests of tensor parallelism expect is held against plans: the same models and sizes, the
same checks, and its counts of collectives as bounds.

After `test/distributed/tensor/parallel` of PyTorch: test_tp_examples.py (MLP, transformer, frozen parameters,
loss parallel), test_tp_style.py and test_parallelize_api.py (columns, rows, embeddings, sequence-parallel norms),
all on four ranks. What those tests say of
layouts that a user declares by hand (PrepareModuleInput and the like) has no counterpart, as nothing is
declared here; nor have the patterns of test_micro_pipeline_tp.py, which are the compiler's.

Two ways of counting differ. A loss is a number on every rank, where DTensor leaves its last sum to the user,
so an all-reduce of one number is not counted. And an input that was gathered is gathered once more in the
backward rather than kept; DTensor keeps it. Those gathers are counted apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.errors import PlanError
from meshloom.program.cost.rates import Rates
from meshloom.program.operators.linears import GatheredLinears
from meshloom.tensor_parallel.search.choose import choose
from meshloom.tensor_parallel.sent_bytes import sent_at_step_end, sent_in_chunk
from tests.division import Subject, compare, subject_of
from tests.program_jobs import job_of
from tests.sent import counted, predicted

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]

Build = Callable[[], nn.Module]
Loss = Callable[[Any, Any], Any]
Counts = Mapping[str, int]

# starting a collective takes longer than anything else in models this small, so as few as possible are
# started
TALKING_COSTS = Rates()
VOLUME_COSTS = Rates(start_seconds=0.0, latency_seconds=0.0)
COMPUTING_COSTS = Rates(
    flops_per_second=1e6, bytes_per_second=1e4, memory_price=1e6
)  # what can be divided is: norms and sums too, as in sequence parallelism


class MLP(nn.Module):
    """[n, 10] -> [n, out]."""

    def __init__(self, hidden: int = 16, out: int = 10) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net1, self.net2 = nn.Linear(10, hidden), nn.Linear(hidden, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.net2(torch.relu(self.net1(x)))


class Attention(nn.Module):
    """Causal, without biases: [b, s, width] -> the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.wq, self.wk, self.wv)
        )
        return self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """[b, s, width] -> the same, over four times the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.gelu(self.w1(x)))


class Block(nn.Module):
    """A norm before each of attention and MLP, a sum after."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.ffn_norm, self.feed_forward = nn.LayerNorm(width), FeedForward(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    """Tokens [b, s <= 16] -> logits [b, s, vocabulary]; the head is the embedding, unless `tied` is False.
    trained: the parameters that are; None: all."""

    def __init__(
        self,
        *,
        width: int = 16,
        heads: int = 4,
        vocabulary: int = 8,
        tied: bool = True,
        trained: tuple[str, ...] | None = None,
    ) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.tok_embeddings, self.pos_embeddings = nn.Embedding(vocabulary, width), nn.Embedding(16, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(2))
        self.norm, self.output = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.output.weight = self.tok_embeddings.weight
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(trained is None or name in trained)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens) + self.pos_embeddings(
            torch.arange(tokens.shape[1], device=tokens.device)
        )
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


class Given(nn.Module):
    """A module whose input [shape] is made within the model, of a parameter, so that it may be divided or
    have a gradient: x + input."""

    def __init__(self, module: nn.Module, *shape: int, trained: bool = True) -> None:
        super().__init__()
        self.module = module
        self.input = nn.Parameter(
            torch.rand(shape, generator=torch.Generator().manual_seed(1)), requires_grad=trained
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x + self.input)


def total_and_output(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """The sum of the output, as those tests differentiate it, and the output, which every rank gets whole."""
    output = model(batch["x"])
    return output.sum(), output


def weighed(model: nn.Module, batch: Any) -> Tensor:
    """The sum of the output times given weights: the output may stay divided, and no two of its elements
    count alike."""
    return (model(batch["x"]) * batch["weights"]).sum()


def normal(*shape: int, **more: tuple[int, ...]) -> dict[str, Tensor]:
    """x [shape] and further fields, normal."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(size, generator=generator, dtype=torch.float64)
        for name, size in {"x": shape, **more}.items()
    }


def tokens(*shape: int, vocabulary: int = 8) -> dict[str, Tensor]:
    """x [shape], token numbers."""
    return {"x": torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(0))}


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Kind of collective -> how many a rank started.

    regathered: of those in the backward, gathers of an input once more. at_the_end: sums of gradients, once a
        step.
    """

    forward: Counts
    backward: Counts
    regathered: int
    at_the_end: int = 0

    @property
    def kept(self) -> Counts:
        """Of the backward, had what was gathered been kept."""
        return +Counter({**self.backward, "all_gather": self.backward.get("all_gather", 0) - self.regathered})


def read(build: Build, loss: Loss, batch: Any) -> Subject:
    return subject_of(
        job_of(build, loss), batches=(batch, {name: each.flip(0) for name, each in batch.items()})
    )


def divide(
    build: Build,
    loss: Loss,
    batch: Any,
    num_ranks: int = 4,
    *,
    subject: Subject | None = None,
    rates: Rates = TALKING_COSTS,
    **pins: str,
) -> Counted:
    """Divide, compare outputs and gradients of all ranks with the module's own, and count what is sent, which is as predicted.

    subject: the loss, where it was read already. pins: module -> how its parameters are divided, dots of its
        name written as two underscores.
    """
    subject = subject or read(build, loss, batch)
    placements = {name.replace("__", "."): how for name, how in pins.items()}
    compared = compare(
        subject, num_ranks, lambda layout, count: choose(layout, count, rates, placements=placements)
    )
    assert compared.error <= 1e-12, compared.what  # sums in another order
    part = compared.partition
    assert counted(part, subject.model, subject.batch) == predicted(part)
    sent = sent_in_chunk(part.programs[0], 0)
    of_loss = [each for each in sent if each.num_bytes == 8]
    assert not any(each.backward for each in of_loss)
    kinds = [
        Counter(each.collective for each in sent if each.num_bytes != 8 and each.backward is backward)
        for backward in (False, True)
    ]
    regathered = sum(
        isinstance(node.target, GatheredLinears)
        and node.target.change.source == "part"
        and any(out.requires_grad for out in node.outputs)
        for node in part.programs[0].nodes
    )
    return Counted(
        forward=kinds[0], backward=kinds[1], regathered=regathered, at_the_end=len(sent_at_step_end(part))
    )


def assert_within(found: Counts, bound: Counts) -> None:
    """No more collectives are started, and none that send more. An all-reduce sends what a reduce-scatter and
    a gather do."""
    assert _total(found) <= _total(bound) and _halves(found) <= _halves(bound), (
        f"{dict(found)} against {dict(bound)}"
    )


def _total(counts: Counts) -> int:
    return sum(counts.values())


def _halves(counts: Counts) -> int:
    return sum(number * (2 if kind == "all_reduce" else 1) for kind, number in counts.items())


# The numbers below are those that PyTorch's tests assert of CommDebugMode.

MLP_PINS = {"net1": "column", "net2": "row"}
TRANSFORMER_PINS = {
    "tok_embeddings": "vocabulary", "pos_embeddings": "vocabulary", "layers__*__w1": "column", "layers__*__w2": "row", "layers__*__wo": "row",
    **{f"layers__*__{name}": "column" for name in ("wq", "wk", "wv")},
}  # fmt: skip


@pytest.mark.parametrize(
    ("hidden", "out", "samples", "num_ranks"), [(16, 10, 8, 4), (17, 11, 7, 3), (5, 3, 1, 2)]
)
@pytest.mark.slow
def test_mlp(hidden: int, out: int, samples: int, num_ranks: int):
    found = divide(lambda: MLP(hidden, out), total_and_output, normal(samples, 10), num_ranks, **MLP_PINS)
    assert found == Counted(forward={"all_reduce": 1}, backward={}, regathered=0)


@pytest.mark.parametrize(("hidden", "samples", "num_ranks"), [(16, 8, 4), (17, 7, 3)])
def test_mlp_between_parts_of_the_samples(hidden: int, samples: int, num_ranks: int):
    """Sequence parallelism: input and output lie divided by samples. A norm behind the MLP wants them so."""
    batch = normal(samples, 10, weights=(samples, 10))
    pins = {"input": "dim0", "module__0__net1": "column", "module__0__net2": "row"}
    build = lambda: Given(nn.Sequential(MLP(hidden), nn.LayerNorm(10)), samples, 10, trained=False)  # noqa: E731
    found = divide(build, weighed, batch, num_ranks, rates=COMPUTING_COSTS, **pins)
    assert found.forward == {"all_gather": 1, "reduce_scatter": 1}
    assert found.kept == {"all_gather": 1} and found.regathered == 1


@pytest.mark.parametrize(("width", "heads", "vocabulary", "num_ranks"), [(16, 4, 8, 4), (15, 5, 7, 3)])
@pytest.mark.slow
def test_transformer(width: int, heads: int, vocabulary: int, num_ranks: int):
    build = lambda: Transformer(width=width, heads=heads, vocabulary=vocabulary)  # noqa: E731
    found = divide(
        build,
        total_and_output,
        tokens(vocabulary, vocabulary, vocabulary=vocabulary),
        num_ranks,
        **TRANSFORMER_PINS,
    )
    assert_within(found.forward, {"all_reduce": 6, "all_gather": 1})
    assert_within(found.backward, {"all_reduce": 9})
    assert found.forward == {"all_reduce": 5, "all_gather": 1}  # both embeddings are added up at once
    assert found.backward == {"all_reduce": 5}  # so are the gradients of the inputs of q, k and v


def test_transformer_without_pins():
    found = divide(
        Transformer,
        total_and_output,
        tokens(8, 8),
        rates=replace(TALKING_COSTS, start_seconds=0.0, latency_seconds=0.0),
    )
    assert_within(found.forward, {"all_reduce": 6, "all_gather": 1})
    assert_within(found.backward, {"all_reduce": 9})


@pytest.mark.parametrize(("width", "heads", "vocabulary", "num_ranks"), [(16, 4, 8, 4), (15, 5, 7, 3)])
@pytest.mark.slow
def test_transformer_with_sequence_parallelism(width: int, heads: int, vocabulary: int, num_ranks: int):
    build = lambda: Transformer(width=width, heads=heads, vocabulary=vocabulary)  # noqa: E731
    batch = tokens(vocabulary, vocabulary, vocabulary=vocabulary)
    found = divide(build, total_and_output, batch, num_ranks, rates=COMPUTING_COSTS, **TRANSFORMER_PINS)
    assert_within(found.forward, {"reduce_scatter": 6, "all_gather": 6})
    assert_within(found.kept, {"reduce_scatter": 5, "all_gather": 6})
    assert found.regathered == 5  # the input of each attention, each MLP and the head
    assert found.at_the_end == 1  # PyTorch: 30, one for every value of every norm's optimizer


@pytest.mark.covering("None-True", "trained3", "trained4")
@pytest.mark.parametrize(
    ("trained", "sequence", "backward", "at_the_end"),
    [
        (None, True, {"reduce_scatter": 5, "all_gather": 6}, 30),
        (None, False, {"all_reduce": 9}, 0),
        (("output.weight", "norm.weight", "norm.bias"), True, {"reduce_scatter": 1}, 6),
        (("tok_embeddings.weight", "output.weight"), True, {"reduce_scatter": 5, "all_gather": 5}, 0),
        (("tok_embeddings.weight", "output.weight", "norm.weight", "norm.bias"), True, {"reduce_scatter": 5, "all_gather": 5}, 6),
        (
            ("tok_embeddings.weight", "output.weight", "norm.weight", "norm.bias", "layers.1.ffn_norm.weight", "layers.1.ffn_norm.bias"),
            True, {"reduce_scatter": 5, "all_gather": 5}, 12,
        ),
        (
            ("tok_embeddings.weight", "layers.0.attention.wv.weight", "layers.0.feed_forward.w1.bias", "layers.1.ffn_norm.bias",
             "layers.1.feed_forward.w2.weight", "output.weight"),
            True, {"reduce_scatter": 5, "all_gather": 5}, 3,
        ),
    ],
)  # fmt: skip
def test_transformer_that_is_trained_in_part(
    trained: tuple[str, ...] | None, sequence: bool, backward: Counts, at_the_end: int
):
    build = lambda: Transformer(tied=False, trained=trained)  # noqa: E731
    rates = COMPUTING_COSTS if sequence else TALKING_COSTS
    found = divide(build, total_and_output, tokens(8, 8), rates=rates, output="column", **TRANSFORMER_PINS)
    assert_within(found.kept, backward)
    assert found.at_the_end <= at_the_end


def test_both_layers_by_columns():
    found = divide(lambda: MLP(16, 12), total_and_output, normal(12, 10), net1="column", net2="column")
    assert found.forward == {"all_gather": 2}
    assert_within(found.backward, {"all_reduce": 1})


def test_linear_by_columns():
    build = lambda: Given(nn.Linear(16, 24), 8, 16)  # noqa: E731
    batch = normal(8, 16, weights=(8, 24))
    found = divide(build, weighed, batch, rates=VOLUME_COSTS, module="column", input="replicated")
    # one sum of the input's gradient
    assert found.forward == {} and _total(found.backward) + found.at_the_end == 1
    found = divide(build, weighed, batch, rates=VOLUME_COSTS, module="column", input="dim0")
    assert found.forward == {"all_gather": 1} and found.kept == {"reduce_scatter": 1}


def test_linear_by_rows():
    found = divide(
        lambda: Given(nn.Linear(16, 10), 9, 16), total_and_output, normal(9, 16), module="row", input="dim1"
    )
    assert found == Counted(forward={"all_reduce": 1}, backward={}, regathered=0)
    build = lambda: Given(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)), 8, 16)  # noqa: E731
    found = divide(
        build, weighed, normal(8, 16, weights=(8, 16)), rates=COMPUTING_COSTS, module__0="row", input="dim1"
    )
    assert found.forward == {"reduce_scatter": 1} and found.backward == {"all_gather": 1}


def test_embedding_by_columns_and_by_rows():
    build = lambda: nn.Sequential(nn.Embedding(16, 16))  # noqa: E731
    batch = {"x": torch.arange(8).reshape(4, 2), "weights": normal(4, 2, 16)["x"]}
    assert divide(build, weighed, batch, rates=VOLUME_COSTS, **{"0": "dim1"}) == Counted(
        forward={}, backward={}, regathered=0
    )
    found = divide(build, total_and_output, {"x": batch["x"]}, **{"0": "vocabulary"})
    assert found == Counted(forward={"all_reduce": 1}, backward={}, regathered=0)


@pytest.mark.parametrize("affine", [True, False])
def test_norm_of_parts_of_the_sequence(affine: bool):
    build = lambda: Given(nn.LayerNorm(12, elementwise_affine=affine), 20, 32, 12)  # noqa: E731
    found = divide(build, weighed, normal(20, 32, 12, weights=(20, 32, 12)), rates=VOLUME_COSTS, input="dim1")
    assert found.forward == {} and found.backward == {} and found.at_the_end == affine


@pytest.mark.covering(
    "shape0-4-none-True-0.2",
    "shape0-4-mean-False-0.0",
    "shape1-4-sum-True-0.0",
    "shape1-4-mean-True-0.2",
    "shape2-3-mean-False-0.2",
    "shape2-3-sum-True-0.2",
)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize(("shape", "num_ranks"), [((8, 16), 4), ((8, 16, 12), 4), ((5, 7, 3), 3)])
def test_loss_parallel(
    shape: tuple[int, ...], num_ranks: int, reduction: str, weighted: bool, smoothing: float
):
    """Cross-entropy of logits that are divided by classes, weighted or not; by other dims a sum over them is
    refused, as there."""
    batch = {
        "target": torch.randint(shape[1], (shape[0], *shape[2:]), generator=torch.Generator().manual_seed(0))
    }
    batch["target"][0] = -100
    weight = (
        torch.rand(shape[1], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        if weighted
        else None
    )

    def build() -> nn.Module:
        model = nn.Module()
        model.logits = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(2)))
        model.register_buffer("weight", weight)
        return model

    def loss(model: Any, batch: Any) -> Any:
        found = F.cross_entropy(
            model.logits, batch["target"], model.weight, reduction=reduction, label_smoothing=smoothing
        )
        return (found.sum(), found) if reduction == "none" else found

    subject = read(build, loss, batch)
    for dim in range(len(shape)):
        if dim != 1 and reduction != "none":
            with pytest.raises(
                PlanError, match=f"cross_entropy_loss at .* needs all dimension {dim} of logits"
            ):
                divide(build, loss, batch, num_ranks, subject=subject, rates=VOLUME_COSTS, logits=f"dim{dim}")
            continue
        found = divide(build, loss, batch, num_ranks, subject=subject, rates=VOLUME_COSTS, logits=f"dim{dim}")
        if dim == 1 and reduction != "none":
            assert found.forward == {"all_reduce": 2} and found.backward == {}  # PyTorch: 3
