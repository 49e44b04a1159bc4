"""Random calls of every operator with a rule: name -> functions that draw a call. A new rule gets an entry
in `CALLS`."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshloom.program.ir.callables import out_of_place


@dataclass(frozen=True)
class OneCall:
    """A call. target: an `OpOverload`. args, kwargs: with tensors.

    fixed: arguments without gradients. determined: whether equal calls give equal results.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    fixed: tuple[str, ...] = ()
    determined: bool = True

    @property
    def schema(self) -> Any:
        """The schema of the operator; for `out_of_place`, with the wrapped operator as first argument."""
        return self.args[0]._schema if self.target is out_of_place else self.target._schema

    @property
    def given(self) -> tuple[Any, ...]:
        """The arguments in schema order."""
        return self.args[1:] if self.target is out_of_place else self.args


class Chance:
    """Draws random sizes, shapes and values. Sizes are odd, even and prime, so that shards are uneven."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def size(self) -> int:
        return self.random.choice((3, 4, 5, 6, 7))

    def shape(self, least: int = 1, most: int = 3) -> tuple[int, ...]:
        return tuple(self.size() for _ in range(self.random.randint(least, most)))

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def any(self, least: int = 1, most: int = 3) -> Tensor:
        return self.normal(*self.shape(least, most))

    def positive(self, *shape: int) -> Tensor:
        return self.normal(*shape).abs() + 0.2

    def below(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.generator)

    def order(self, count: int) -> tuple[int, ...]:
        return tuple(self.random.sample(range(count), count))

    def dim(self, tensor: Tensor) -> int:
        return self.random.randrange(-tensor.ndim, tensor.ndim)

    def dims(self, tensor: Tensor) -> tuple[int, ...]:
        return tuple(self.random.sample(range(tensor.ndim), self.random.randint(1, tensor.ndim)))

    def yes(self) -> bool:
        return self.random.random() < 0.5

    def one(self, *choices: Any) -> Any:
        return self.random.choice(choices)

    def cut_up(self, size: int, count: int) -> tuple[int, ...]:
        """`size` as the sum of `count` numbers of 1 or more."""
        stops = sorted(self.random.sample(range(1, size), count - 1))
        return tuple(stop - start for start, stop in zip((0, *stops), (*stops, size), strict=True))


Make = Callable[[Chance], OneCall]


def op(name: str) -> Any:
    """`add.Tensor` -> that overload; `library::name` -> a custom operator."""
    library, _, name = name.rpartition("::")
    packet, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, library or "aten"), packet), overload or "default")


FIXED = {
    "batch_norm": ("running_mean", "running_var"),
    **dict.fromkeys(("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"), ("weight",)),
    "soft_margin_loss": ("target",),
    "cosine_embedding_loss": ("target",),
    "binary_cross_entropy_with_logits": ("weight",),
    **dict.fromkeys(("floor_divide", "bernoulli", "randint_like"), ("self", "other")),
    "copy": ("self", "src"),
    "log_sigmoid_backward": ("buffer",),
    **dict.fromkeys(("silu_backward", "mish_backward", "hardsigmoid_backward"), ("grad_output", "self")),
}
"""Arguments to which torch gives no gradient."""


def call(name: str, *args: Any, **kwargs: Any) -> OneCall:
    return OneCall(op(name), args, kwargs, fixed=FIXED.get(name.partition(".")[0], ()))


def named(make: Callable[..., OneCall]) -> Callable[..., Make]:
    """What is made of a chance and further arguments, given those."""
    return lambda *rest, **more: lambda c: make(c, *rest, **more)


def on_one(name: str, *rest: Any, least: int = 1) -> Make:
    """The operator on a tensor of any shape, then these arguments."""
    return lambda c: call(name, c.any(least), *rest)


@named
def along_dim(c: Chance, name: str, *rest: Any, **kwargs: Any) -> OneCall:
    """The operator on a tensor and one of its dims."""
    x = c.any()
    return call(name, x, c.dim(x), *rest, **kwargs)


@named
def on_broadcast(c: Chance, name: str, **kwargs: Any) -> OneCall:
    """The operator on two tensors, either of which is broadcast."""
    shape = c.shape()
    other = tuple(1 if c.random.random() < 0.25 else size for size in shape)[c.random.randrange(len(shape)) :]
    pair = [c.normal(*shape), c.positive(*other)]
    return call(
        name, *(pair if c.yes() or name.startswith(("div", "true", "floor")) else pair[::-1]), **kwargs
    )


@named
def reduces(c: Chance, name: str) -> OneCall:
    x = c.any()
    return call(name, x, c.dims(x), c.yes())


@named
def reduces_one(c: Chance, name: str) -> OneCall:
    x = c.any()
    return call(name, x, c.dim(x), c.yes())


def _add(c: Chance) -> OneCall:
    made = on_broadcast("add.Tensor")(c)
    return call("add.Tensor", *made.args, alpha=c.one(1, 2.5))


def _where(c: Chance) -> OneCall:
    shape = c.shape()
    return call("where.self", c.normal(*shape) > 0, c.normal(*shape), c.normal(*shape[1:]))


def _masked_fill(c: Chance) -> OneCall:
    shape = c.shape()
    return call("masked_fill.Scalar", c.normal(*shape), c.normal(*shape) > 0, c.one(0, -1.5))


def _linear(c: Chance) -> OneCall:
    k, o = c.size(), c.size()
    return call("linear", c.normal(*c.shape(0, 2), k), c.normal(o, k), *([c.normal(o)] if c.yes() else []))


def _matmul(c: Chance) -> OneCall:
    n, k, m, lead = c.size(), c.size(), c.size(), c.shape(1, 2)
    left = c.one((k,), (n, k), (*lead, n, k), (1, *lead[1:], n, k))
    right = c.one((k,), (k, m), (*lead, k, m), (*lead[1:], k, m))
    return call("matmul", c.normal(*left), c.normal(*right))


def _addmm(c: Chance) -> OneCall:
    n, k, m = c.size(), c.size(), c.size()
    return call(
        "addmm", c.normal(*c.one((m,), (n, m), (1, m))), c.normal(n, k), c.normal(k, m), alpha=c.one(1, 0.5)
    )


def _baddbmm(c: Chance) -> OneCall:
    b, n, k, m = (c.size() for _ in range(4))
    return call(
        "baddbmm", c.normal(*c.one((b, n, m), (n, m), (b, 1, m), (m,))), c.normal(b, n, k), c.normal(b, k, m)
    )


@named
def _product(c: Chance, name: str, *terms: str) -> OneCall:
    sizes = {letter: c.size() for letter in "bnkm" if letter in "".join(terms)}
    return call(name, *(c.normal(*(sizes[letter] for letter in term)) for term in terms))


def _bilinear(c: Chance) -> OneCall:
    i, j, o, lead = c.size(), c.size(), c.size(), c.shape(1, 2)
    return call(
        "bilinear", c.normal(*lead, i), c.normal(*lead, j), c.normal(o, i, j), c.one(None, c.normal(o))
    )


def _einsum(c: Chance) -> OneCall:
    sizes = {letter: c.size() for letter in "bnkmh"}
    equation = c.one(
        "bnk,bkm->bnm",
        "bhnk,bhmk->bhnm",
        "nk,km->mn",
        "bn,bn->b",
        "bnk,k->nb",
        "bk,km,mh->bh",
        "nk->kn",
        "bnk -> bk",
    )
    return call(
        "einsum",
        equation,
        tuple(
            c.normal(*(sizes[letter] for letter in term))
            for term in equation.split("->")[0].strip().split(",")
        ),
    )


@named
def _convolution(c: Chance, count: int, transposed: bool) -> OneCall:
    groups = c.one(1, 1, 3, 4)
    inner, outer = groups * c.one(1, 2, 3, 5), groups * c.one(1, 2, 3, 5)
    width = c.one(1, 2, 3)
    weight = (inner, outer // groups) if transposed else (outer, inner // groups)
    x = c.normal(*c.one((c.size(),), ()), inner, *(c.one(4, 5) for _ in range(count)))
    bias = c.one(None, c.normal(outer))
    stride, padding = c.one(1, 2), c.one(0, 1) if width > 1 else 0
    name = f"conv{'_transpose' if transposed else ''}{count}d" + (
        f".{'input' if count > 1 else 'default'}" if transposed else ""
    )
    rest = (
        (stride,) * count,
        (padding,) * count,
        *([(0,) * count, groups] if transposed else [(1,) * count, groups]),
    )
    return call(name, x, c.normal(*weight, *(width,) * count), bias, *rest)


def _plain_convolution(c: Chance) -> OneCall:
    made = _convolution(2, False)(c)
    x, weight, bias, stride, padding, dilation, groups = made.args
    x = x if x.ndim == 4 else x[None]
    return call("convolution", x, weight, bias, stride, padding, dilation, False, (0, 0), groups)


def _layer_norm(c: Chance) -> OneCall:
    shape = c.shape(2, 4)
    inner = shape[-c.one(1, len(shape) - 1) :]
    return call("layer_norm", c.normal(*shape), inner, *c.one((), (c.normal(*inner), c.normal(*inner))))


def _native_layer_norm(c: Chance) -> OneCall:
    shape = c.shape(2, 3)
    return call(
        "native_layer_norm",
        c.normal(*shape),
        shape[-1:],
        c.normal(shape[-1]),
        c.one(None, c.normal(shape[-1])),
        1e-5,
    )


@named
def _rms_norm(c: Chance, name: str) -> OneCall:
    shape = c.shape(2, 3)
    return call(name, c.normal(*shape), shape[-1:], c.one(None, c.normal(shape[-1])), 1e-5)


def _batch_norm(c: Chance) -> OneCall:
    shape = (c.size(), c.size(), *c.shape(0, 2))
    channels = shape[1]
    training = c.yes()
    statistics = (c.normal(channels), c.positive(channels)) if not training or c.yes() else (None, None)
    weights = c.one((None, None), (c.normal(channels), c.normal(channels)))
    return call("batch_norm", c.normal(*shape), *weights, *statistics, training, 0.1, 1e-5, False)


@named
def _trained_norm(c: Chance, name: str, *rest: Any) -> OneCall:
    shape = (c.size(), c.size(), c.size())
    weights = c.normal(*shape), c.normal(shape[1]), c.normal(shape[1])
    return call(name, *weights, None, None, True, 0.1, 1e-5, *rest)


def _group_norm(c: Chance) -> OneCall:
    groups = c.one(1, 3, 4, 5)
    channels = groups * c.one(1, 2, 3)
    return call(
        "group_norm",
        c.normal(c.size(), channels, *c.shape(0, 2), 4),
        groups,
        *c.one((), (c.normal(channels), c.normal(channels))),
    )


def _vector_norm(c: Chance) -> OneCall:
    x = c.any()
    return call("linalg_vector_norm", x, 2, c.one(None, c.dims(x)), c.yes())


def _norm(c: Chance) -> OneCall:
    x = c.any()
    return call("norm.ScalarOpt_dim", x, 2, c.dims(x), c.yes())


def _attention(c: Chance) -> OneCall:
    lead, heads, repeats = c.shape(0, 1), c.size(), c.one(1, 1, 2)
    queries, keys, size, value = c.size(), c.size(), c.size(), c.size()
    mask = c.one(
        None, c.normal(queries, keys), c.normal(1, queries, keys), c.normal(heads * repeats, 1, keys),
        c.normal(*(1 for _ in lead), heads * repeats, queries, keys) > -1.5,
    )  # fmt: skip
    if mask is not None and not lead and mask.ndim > 3:
        mask = None
    causal = mask is None and c.yes()
    q, k, v = (
        c.normal(*lead, heads * repeats, queries, size),
        c.normal(*lead, heads, keys, size),
        c.normal(*lead, heads, keys, value if not causal else size),
    )
    return call(
        "scaled_dot_product_attention", q, k, v, mask, c.one(0.0, 0.3), causal, enable_gqa=repeats > 1
    )


def _cross_entropy(c: Chance) -> OneCall:
    n, v, space = c.size(), c.size(), c.shape(0, 2)
    target = c.below(v, n, *space)
    target[0] = -100
    weight = c.one(None, None, c.positive(v))
    return call(
        "cross_entropy_loss", c.normal(n, v, *space), target, weight, c.one(0, 1, 2), -100, c.one(0.0, 0.1)
    )


def _embedding(c: Chance) -> OneCall:
    rows, width = c.size(), c.size()
    return call(
        "embedding",
        c.normal(rows, width),
        c.below(rows, *c.shape(1, 2)),
        c.one(-1, 1, rows - 1),
        c.random.random() < 0.2,
    )


def _embedding_bag(c: Chance) -> OneCall:
    """Bags of any length, some of them empty."""
    rows, width, bags, entries = c.size(), c.size(), c.size(), c.size() + 7
    mode, has_last = c.one(0, 0, 1, 1, 2), c.yes()
    weights = c.normal(entries) if mode == 0 and c.yes() else None
    starts = [0, *sorted(c.random.choices(range(entries), k=bags - 1)), *([entries] if has_last else [])]
    given = (
        c.normal(rows, width),
        c.below(rows, entries),
        torch.tensor(starts),
        c.random.random() < 0.1,
        mode,
        False,
        weights,
        has_last,
    )
    return c.one(call("embedding_bag", *given), call("embedding_bag.padding_idx", *given, c.one(None, 1, -1)))


def _masked_scatter(c: Chance) -> OneCall:
    mask = c.any() > 0
    return call("masked_scatter", c.normal(*mask.shape), mask, c.normal(int(mask.sum()) + c.one(0, 2)))


@named
def _likelihood(c: Chance, name: str) -> OneCall:
    """nll_loss of rows, of images, of either."""
    n, v, space = (
        c.size(),
        c.size(),
        {"nll_loss": (), "nll_loss2d": (c.size(), c.size())}.get(name, c.shape(0, 2)),
    )
    target = c.below(v, n, *space)
    target[0] = c.one(-100, 0)
    return call(
        name,
        c.normal(n, v, *space).log_softmax(1),
        target,
        c.one(None, None, None, c.positive(v)),
        c.one(0, 1, 2),
        -100,
    )


def _cosine(c: Chance) -> OneCall:
    n, d = c.size(), c.size()
    return call(
        "cosine_embedding_loss",
        c.normal(n, d),
        c.normal(n, d),
        2 * c.below(2, n) - 1,
        c.one(0.0, 0.2),
        c.one(0, 1, 2),
    )


@named
def _grouped_product(c: Chance, name: str, dtype: torch.dtype) -> OneCall:
    """Sizes whose shards torch's kernel would have to pad; some groups are empty."""
    if "transformers" in name:
        importlib.import_module("transformers.integrations.moe")  # which makes the operator
    groups, rows, inner, outer = c.size(), c.size() + 7, *((4 * c.one(1, 2, 3)) for _ in range(2))
    kind = c.one("2 3", "2 3", "3 3", "3 2", "2 2") if name == "_grouped_mm" else "2 3"
    grouped = 8 if kind == "2 2" else outer if kind == "3 2" else rows
    ends = torch.tensor(
        sorted([*c.random.choices(range(0, grouped + 1, 4 if kind != "2 3" else 1), k=groups - 1), grouped]),
        dtype=torch.int32,
    )
    x = {"2": (rows, inner), "3": (groups, rows, inner)}[kind[0]] if kind != "2 2" else (rows, 8)
    w = {"3": (groups, inner, outer), "2": (inner if kind == "3 2" else 8, outer)}[kind[2]]
    return call(name, c.normal(*x).to(dtype), c.normal(*w).to(dtype), *(() if kind == "3 3" else (ends,)))


def _gather(c: Chance) -> OneCall:
    x = c.any()
    dim = c.dim(x)
    shape = list(x.shape)
    shape[dim] = c.size()
    return call("gather", x, dim, c.below(x.shape[dim], *shape))


def _index_select(c: Chance) -> OneCall:
    x = c.any()
    dim = c.dim(x)
    return call("index_select", x, dim, c.below(x.shape[dim], c.size()))


def _index(c: Chance) -> OneCall:
    x = c.any(2, 4)
    shape = c.shape(1, 2)
    given: list[Any] = [
        c.below(size, *c.one(shape, shape, shape[1:], (1, *shape[1:]))) if c.yes() else None
        for size in x.shape
    ]
    if all(each is None for each in given):
        given[0] = c.below(x.shape[0], *shape)
    while given[-1] is None:
        given.pop()
    return call("index.Tensor", x, tuple(given))


def _lookup(c: Chance) -> OneCall:
    """An entry for every index, sometimes counted from the end; none for some entries."""
    x = c.any(3, 4)
    index = c.below(x.shape[0], c.size())
    return call("index.Tensor", x, (torch.where(c.below(4, len(index)) == 0, index - x.shape[0], index),))


def _scatter(c: Chance) -> OneCall:
    x = c.any()
    dim = c.dim(x)
    index = c.normal(*x.shape).argsort(dim)
    return call(c.one("scatter.src", "scatter_add"), x, dim, index, c.normal(*x.shape))


@named
def _view(c: Chance, name: str) -> OneCall:
    parts = [c.size() for _ in range(c.random.randint(2, 4))]
    return call(name, c.normal(*_grouped(c, parts)), _grouped(c, parts))


def _grouped(c: Chance, parts: list[int]) -> tuple[int, ...]:
    """Neighbouring sizes multiplied, with ones in between."""
    sizes = [parts[0]]
    for part in parts[1:]:
        if c.yes():
            sizes[-1] *= part
        else:
            sizes += [1] * (c.random.random() < 0.2)
            sizes.append(part)
    return tuple(sizes)


def _unflatten(c: Chance) -> OneCall:
    parts = (c.size(), c.size())
    return call(
        "unflatten.int", c.normal(c.size(), parts[0] * parts[1], c.size()), 1, c.one(parts, (-1, parts[1]))
    )


def _flatten(c: Chance) -> OneCall:
    return call("flatten.using_ints", c.any(3), c.one(0, 1), c.one(-1, 1))


def _expand(c: Chance) -> OneCall:
    shape = c.shape(1, 3)
    x = c.normal(*(size if c.yes() else 1 for size in shape))
    return call("expand", x, (*c.shape(0, 1), *shape))


def _expand_as(c: Chance) -> OneCall:
    shape = c.shape(2, 3)
    return call("expand_as", c.normal(*(size if c.yes() else 1 for size in shape)), c.normal(*shape))


@named
def _reshaped_as(c: Chance, name: str) -> OneCall:
    one, other, third = c.size(), c.size(), c.size()
    return call(name, c.normal(one, other * third), c.normal(one, other, third))


def _permute(c: Chance) -> OneCall:
    x = c.any(2)
    return call("permute", x, c.order(x.ndim))


@named
def _transpose(c: Chance, name: str) -> OneCall:
    x = c.any(2)
    return call(name, x, c.dim(x), c.dim(x))


def _movedim(c: Chance) -> OneCall:
    x = c.any(2)
    return call("movedim.intlist", x, c.order(x.ndim)[:2], c.order(x.ndim)[:2])


def _squeeze(c: Chance) -> OneCall:
    x = c.normal(c.size(), 1, c.size())
    return c.one(call("squeeze", x), call("squeeze.dim", x, 1), call("squeeze.dims", x, (1,)))


def _select(c: Chance) -> OneCall:
    x = c.any(2)
    return call("select.int", x, c.dim(x), c.one(0, 1, -1))


@named
def _splits(c: Chance, name: str) -> OneCall:
    x = c.any(1)
    dim = c.dim(x)
    if name == "split_with_sizes":
        return call(name, x, c.cut_up(x.shape[dim], 2), dim)
    return call(name, x, c.one(2, 3), dim)


def _slice(c: Chance) -> OneCall:
    x = c.any()
    dim = c.dim(x)
    size = x.shape[dim]
    start = c.random.randrange(-size, size - 1)
    return call(
        "slice.Tensor",
        x,
        dim,
        c.one(None, start),
        c.one(2**63 - 1, size, size - 1, -1) if start % size < size - 1 else size,
        c.one(1, 1, 1, 2),
    )


def _narrow(c: Chance) -> OneCall:
    x = c.any()
    dim = c.dim(x)
    start = c.random.randrange(x.shape[dim] - 1)
    return call("narrow", x, dim, start, c.random.randint(1, x.shape[dim] - start))


@named
def _cat(c: Chance, name: str) -> OneCall:
    x = c.any()
    dim = c.dim(x)
    shape = list(x.shape)
    shape[dim] = c.size()
    return call(name, (x, c.normal(*shape), *([c.normal(*x.shape)] if c.yes() else [])), dim)


def _stack(c: Chance) -> OneCall:
    shape = c.shape()
    return call(
        "stack",
        tuple(c.normal(*shape) for _ in range(c.one(2, 3, 4))),
        c.random.randrange(-len(shape) - 1, len(shape) + 1),
    )


def _repeat_interleave(c: Chance) -> OneCall:
    x = c.any()
    return call("repeat_interleave.self_int", x, c.one(2, 3, 4), c.one(c.dim(x), c.dim(x), None))


def _repeat(c: Chance) -> OneCall:
    x = c.any()
    return call("repeat", x, tuple(c.one(1, 1, 2, 4) for _ in range(x.ndim + c.one(0, 1))))


def _pad(c: Chance) -> OneCall:
    x = c.any(2)
    pads = tuple(c.one(0, 0, 1, 2, -1) for _ in range(2 * c.one(1, 2)))
    return c.one(
        call("constant_pad_nd", x, pads, c.one(0, 1.5)),
        call("pad", x, pads, "constant", c.one(None, 0.0, 1.5)),
    )


@named
def _mirrored(c: Chance, name: str, count: int) -> OneCall:
    x = c.normal(c.size(), c.size(), *(4 for _ in range(count)))
    return call(name, x, tuple(c.one(1, 2) for _ in range(2 * count)))


def _pad_mirrored(c: Chance) -> OneCall:
    return call("pad", c.normal(c.size(), c.size(), 5), (1, 2), c.one("reflect", "replicate", "circular"))


def _flip(c: Chance) -> OneCall:
    x = c.any()
    return call("flip", x, c.dims(x))


def _roll(c: Chance) -> OneCall:
    x = c.any()
    dims = c.dims(x)
    return c.one(call("roll", x, tuple(c.one(1, 2, -1) for _ in dims), dims), call("roll", x, (2,)))


def _slice_scatter(c: Chance) -> OneCall:
    x = c.any()
    dim = c.dim(x)
    shape = list(x.shape)
    shape[dim] -= 1
    return call("slice_scatter", x, c.normal(*shape), dim, 1, x.shape[dim])


def _select_scatter(c: Chance) -> OneCall:
    x = c.any(2)
    dim = c.dim(x) % x.ndim
    return call(
        "select_scatter", x, c.normal(*(size for place, size in enumerate(x.shape) if place != dim)), dim, 1
    )


def _diagonal(c: Chance) -> OneCall:
    return call("diagonal", c.any(3, 4), c.one(0, 1), *c.one((0, 1), (1, 2), (-1, 0)))


def _filled(c: Chance) -> OneCall:
    return call("full", c.shape(), 2.5, dtype=torch.float64)


def _tensors_of_shape(name: str) -> Make:
    return lambda c: OneCall(op(name), (c.shape(),), {"dtype": torch.float64}, (), "empty" not in name)


def _like(name: str, *rest: Any) -> Make:
    return lambda c: OneCall(op(name), (c.any(), *rest), {}, (), "empty" not in name)


def _new(name: str, *rest: Any) -> Make:
    return lambda c: OneCall(op(name), (c.any(), c.shape(), *rest), {}, (), "empty" not in name)


def _type_as(c: Chance) -> OneCall:
    return call("type_as", c.any().float(), c.normal(3))


@named
def _pooled(c: Chance, name: str, count: int) -> OneCall:
    x = c.normal(*c.one((c.size(),), ()) if count > 1 else (c.size(),), c.size(), *(5 for _ in range(count)))
    return call(name, x, (2,) * count)


@named
def _pooled_gradient(c: Chance, name: str, count: int) -> OneCall:
    """The backward of pooling or padding [b, c, 6...]."""
    lead = (*c.one((c.size(),), ()), c.size())
    x, half = c.normal(*lead, *(6,) * count), (*lead, *(3,) * count)
    if "pad" in name:
        return call(name, c.normal(*lead, *(8,) * count), x, (1,) * 2 * count)
    if "adaptive" in name:
        return call(name, c.normal(*half), x)
    kernel = (2,) * count
    if "avg" in name:
        return call(name, c.normal(*half), x, kernel, kernel, (0,) * count, False, True, None)
    function: Any = torch.nn.functional
    pool = getattr(function, f"max_pool{count}d_with_indices")
    indices = pool(x, kernel)[1]
    return call(name, c.normal(*half), x, kernel, kernel, (0,) * count, (1,) * count, False, indices)


def _embedding_gradient(c: Chance) -> OneCall:
    index = c.below(7, *c.shape(1, 2))
    return call("embedding_dense_backward", c.normal(*index.shape, c.size()), index, 7, c.one(-1, 3), False)


@named
def _convolution_gradient(c: Chance, name: str) -> OneCall:
    count, groups, transposed = c.one(1, 2), c.one(1, 1, 3), c.yes()
    inner, outer = groups * c.size(), groups * c.size()
    stride, padding = (c.one(1, 2),) * count, (c.one(0, 1),) * count
    how = stride, padding, (1,) * count, transposed, (0,) * count, groups
    shape = (inner, outer // groups) if transposed else (outer, inner // groups)
    x, weight = c.normal(c.size(), inner, *(5,) * count), c.normal(*shape, *(3,) * count)
    gradient = c.normal(*torch.ops.aten.convolution(x, weight, None, *how).shape)
    other, size = (weight, x) if "input" in name else (x, weight)
    return call(name, gradient, other, tuple(size.shape), *how)


def _index_put(c: Chance) -> OneCall:
    x, count = c.normal(5, 4, 6), c.one(3, 7)
    index = c.below(4, count)
    places, values = c.one(
        ((index,), (count, 4, 6)), ((None, index), (5, count, 6)), ((None, index), (6,)),
        ((index, c.below(4, count)), (count, 6)), ((index, None, c.below(6, count)), (count, 4)),
    )  # fmt: skip
    return call("index_put", x, places, c.normal(*values), True)


def _diagonal_scatter(c: Chance) -> OneCall:
    x = c.normal(4, 5, 4)
    one, other = c.one((0, 2), (0, 1), (-2, -1))
    diagonal = x.diagonal(0, one, other)
    return call("diagonal_scatter", x, c.normal(*diagonal.shape), 0, one, other)


@named
def _gradient(c: Chance, name: str, *rest: Any) -> OneCall:
    """An elementwise backward: an incoming gradient, and what its forward was given."""
    shape = c.shape()
    return call(name, c.normal(*shape), c.normal(*shape), *rest)


def _elu_gradient(c: Chance) -> OneCall:
    shape = c.shape()
    return call("elu_backward", c.normal(*shape), 1.0, 1.0, 1.0, False, c.normal(*shape))


def _dropout_gradient(c: Chance) -> OneCall:
    shape = c.shape()
    return call("native_dropout_backward", c.normal(*shape), c.normal(*shape) > 0, 1.25)


def _log_sigmoid_gradient(c: Chance) -> OneCall:
    shape = c.shape()
    x = c.normal(*shape)
    return call("log_sigmoid_backward", c.normal(*shape), x, torch.exp(-x.abs()))


@named
def _upsampled(c: Chance, name: str, count: int) -> OneCall:
    x = c.normal(c.size(), c.size(), *(3 for _ in range(count)))
    return call(name, x, (5,) * count, *((c.yes(),) if "nearest" not in name else ()))


def _complex_pairs(c: Chance) -> OneCall:
    return call("view_as_complex", c.normal(*c.shape(), 2))


def _unfold(c: Chance) -> OneCall:
    x = c.any(2)
    return call("unfold", x, c.dim(x), 2, c.one(1, 2))


@named
def _recurrent(c: Chance, name: str) -> OneCall:
    first, both, biases, batch, steps, inner, hidden, layers = (
        c.yes(),
        c.yes(),
        c.yes(),
        c.size(),
        c.size(),
        c.size(),
        c.size(),
        c.one(1, 2),
    )
    ways = 2 if both else 1
    gates = {"lstm": 4, "gru": 3}.get(name, 1)
    x = c.normal(*((batch, steps) if first else (steps, batch)), inner)
    weights: list[Tensor] = []
    for layer in range(layers * ways):
        weights += [
            c.normal(gates * hidden, inner if layer < ways else ways * hidden),
            c.normal(gates * hidden, hidden),
        ]
        weights += [c.normal(gates * hidden), c.normal(gates * hidden)] if biases else []
    start = c.normal(layers * ways, batch, hidden)
    states = (start, c.normal(layers * ways, batch, hidden)) if name == "lstm" else start
    return call(
        f"{name}.input", x, states, tuple(weights), biases, layers, c.one(0.0, 0.3), c.yes(), both, first
    )


@named
def _cell(c: Chance, name: str) -> OneCall:
    batch, inner, hidden = c.size(), c.size(), c.size()
    gates = {"lstm_cell": 4, "gru_cell": 3}.get(name, 1) * hidden
    states = (
        (c.normal(batch, hidden), c.normal(batch, hidden)) if name == "lstm_cell" else c.normal(batch, hidden)
    )
    return call(
        name,
        c.normal(batch, inner),
        states,
        c.normal(gates, inner),
        c.normal(gates, hidden),
        c.normal(gates),
        c.normal(gates),
    )


def _weight_norm(c: Chance) -> OneCall:
    v = c.any(2)
    dim = c.one(0, v.ndim - 1)
    return call(
        "_weight_norm",
        v,
        c.positive(*(size if place == dim else 1 for place, size in enumerate(v.shape))),
        dim,
    )


def _prelu(c: Chance) -> OneCall:
    x = c.any(2)
    return call("prelu", x, c.normal(c.one(1, x.shape[1])))


@named
def _loss(c: Chance, name: str, *rest: Any) -> OneCall:
    shape = c.shape()
    target = c.positive(*shape).clamp(max=1.0) if "binary" in name else c.normal(*shape)
    extra = (
        (c.one(None, c.positive(*shape), c.positive(*shape[-1:])), None)
        if name == "binary_cross_entropy_with_logits"
        else ()
    )
    return call(name, c.normal(*shape), target, *extra, c.one(0, 1, 2), *rest)


def _glu(c: Chance) -> OneCall:
    x = c.normal(*(2 * size for size in c.shape(1, 2)))
    return call("glu", x, c.dim(x))


@named
def _sorted(c: Chance, name: str) -> OneCall:
    x = c.any()
    return call(name, x, *((2, c.dim(x)) if name == "topk" else (c.dim(x), c.yes())))


def _of_all(name: str) -> Make:
    return lambda c: call(name, c.any())


@named
def _of_mask(c: Chance, name: str) -> OneCall:
    x = c.any() > 0.5
    return call(name, x, c.dim(x), c.yes())


@named
def _spread(c: Chance, name: str, correction: int) -> OneCall:
    x = c.any()
    return call(name, x, c.dims(x), correction=correction, keepdim=c.yes())


def _one_hot(c: Chance) -> OneCall:
    return call("one_hot", c.below(5, *c.shape(1, 2)), 5)


@named
def _spectrum(c: Chance, name: str) -> OneCall:
    x = c.any()
    x = torch.complex(x, c.normal(*x.shape)) if name in ("fft_ifft", "fft_irfft") else x
    return call(name, x, None, c.one(-1, 0, x.ndim - 1))


@named
def _spectra(c: Chance, name: str) -> OneCall:
    x = c.any(3)
    x = torch.complex(x, c.normal(*x.shape)) if "i" in name else x
    return call(name, x, None, *c.one((), ((0, 2),), ((-2, -1),)))


def _parts_of_complex(name: str) -> Make:
    return lambda c: call(name, torch.view_as_complex(c.normal(*c.shape(), 2)))


def _comparison(name: str) -> Make:
    return lambda c: call(name, *on_broadcast("add.Tensor")(c).args)


@named
def _logical(c: Chance, name: str) -> OneCall:
    shape = c.shape()
    return call(name, c.normal(*shape) > 0, c.normal(*shape[1:]) > 0)


def _copy(c: Chance) -> OneCall:
    shape = c.shape()
    return call("copy", c.normal(*shape), c.normal(*shape[1:]))


def _largest_of_two(name: str) -> Make:
    return lambda c: call(f"{name}.other", *on_broadcast("add.Tensor")(c).args)


def _drawn(name: str, *rest: Any) -> Make:
    return lambda c: OneCall(out_of_place, (op(name), c.any(), *rest), fixed=("self",))


def _broadcast_tensors(c: Chance) -> OneCall:
    shape = c.shape(2, 3)
    return call(
        "broadcast_tensors",
        tuple(c.normal(*(c.one(1, size) for size in shape[start:])) for start in (0, 0, 1)),
    )


@named
def _pixels(c: Chance, name: str) -> OneCall:
    channels, high, wide = c.size(), c.size(), c.size()
    shape = (4 * channels, high, wide) if name == "pixel_shuffle" else (channels, 2 * high, 2 * wide)
    return call(name, c.normal(*c.shape(0, 1), *shape), 2)


def _im2col(c: Chance) -> OneCall:
    return call("im2col", c.normal(*c.shape(0, 1), c.size(), 5, 4), (2, 3), (1, 1), (0, 1), (1, 2))


def _col2im(c: Chance) -> OneCall:
    return call("col2im", c.normal(*c.shape(0, 1), 4 * c.size(), 12), (5, 4), (2, 2), (1, 1), (0, 0), (1, 1))


@named
def _index_added(c: Chance, name: str) -> OneCall:
    x = c.any()
    dim = c.dim(x)
    index = torch.randperm(x.shape[dim], generator=c.generator)[:2]
    shape = list(x.shape)
    shape[dim] = 2
    return call(name, x, dim, index, c.normal(*shape))


CALLS: dict[str, list[Make]] = {
    **{
        name: [_drawn(name)]
        for name in ("normal_", "uniform_", "exponential_", "log_normal_", "cauchy_", "random_")
    },
    "bernoulli_": [_drawn("bernoulli_.float", 0.4)],
    "geometric_": [_drawn("geometric_", 0.4)],
    "broadcast_tensors": [_broadcast_tensors],
    **{name: [_pixels(name)] for name in ("pixel_shuffle", "pixel_unshuffle")},
    "im2col": [_im2col],
    "col2im": [_col2im],
    **{name: [_index_added(name)] for name in ("index_add", "index_copy")},
    "add": [_add, on_one("add.Scalar", 1.5)],
    **{
        name: [on_broadcast(f"{name}.Tensor")]
        for name in ("sub", "subtract", "multiply", "divide", "true_divide")
    },
    "mul": [on_broadcast("mul.Tensor"), on_one("mul.Scalar", 1.5)],
    "div": [
        on_broadcast("div.Tensor"),
        on_broadcast("div.Tensor_mode", rounding_mode="floor"),
        on_one("div.Scalar", 1.5),
    ],
    "floor_divide": [on_broadcast("floor_divide")],
    "where": [_where],
    "masked_fill": [_masked_fill],
    "dropout": [on_one("dropout", 0.3, True)],
    "dropout_": [lambda c: OneCall(out_of_place, (op("dropout_"), c.any(), 0.3, True))],
    "feature_dropout_": [lambda c: OneCall(out_of_place, (op("feature_dropout_"), c.any(2), 0.3, True))],
    "native_dropout": [on_one("native_dropout", 0.3, True)],
    "alpha_dropout": [on_one("alpha_dropout", 0.3, True)],
    "feature_dropout": [on_one("feature_dropout", 0.3, True, least=2)],
    **{
        name: [on_one(name)]
        for name in (
            "neg", "selu", "celu", "relu6", "hardtanh", "softplus", "log_sigmoid", "softshrink", "hardshrink",
            "nan_to_num", "square", "mish", "hardswish", "hardsigmoid", "rand_like", "randn_like",
            "contiguous", "clone", "alias", "detach", "lift_fresh_copy",
        )
    },
    "bernoulli": [lambda c: call("bernoulli.p", c.any(), 0.4)],
    "randint_like": [on_one("randint_like", 9)],
    "fill": [on_one("fill.Scalar", 1.5)],
    "copy": [_copy],
    "threshold": [on_one("threshold", 0.1, 0.7)],
    "clip": [on_one("clip", -0.5, 0.5)],
    **{name: [_comparison(f"{name}.Tensor")] for name in ("less", "greater", "not_equal")},
    "logical_or": [_logical("logical_or")],
    **{name: [_logical(f"{name}.Tensor")] for name in ("__and__", "__or__")},
    **{name: [_tensors_of_shape(name)] for name in ("rand", "randn")},
    "randint": [lambda c: call("randint", 9, c.shape())],
    "_grouped_mm": [_grouped_product("_grouped_mm", torch.float32)],
    "transformers::grouped_mm_fallback": [
        _grouped_product("transformers::grouped_mm_fallback", torch.float64)
    ],
    "linear": [_linear],
    "matmul": [_matmul],
    "mm": [_product("mm", "nk", "km")],
    "bmm": [_product("bmm", "bnk", "bkm")],
    "mv": [_product("mv", "nk", "k")],
    "dot": [_product("dot", "k", "k")],
    "addmm": [_addmm],
    "baddbmm": [_baddbmm],
    "bilinear": [_bilinear],
    "einsum": [_einsum],
    **{f"conv{count}d": [_convolution(count, False)] for count in (1, 2, 3)},
    **{f"conv_transpose{count}d": [_convolution(count, True)] for count in (1, 2, 3)},
    "convolution": [_plain_convolution],
    "layer_norm": [_layer_norm],
    "native_layer_norm": [_native_layer_norm],
    **{name: [_rms_norm(name)] for name in ("rms_norm", "_fused_rms_norm")},
    "batch_norm": [_batch_norm],
    "native_batch_norm": [_trained_norm("native_batch_norm")],
    "instance_norm": [_trained_norm("instance_norm", False)],
    "group_norm": [_group_norm],
    "linalg_vector_norm": [_vector_norm],
    "norm": [_norm],
    "scaled_dot_product_attention": [_attention],
    "cross_entropy_loss": [_cross_entropy],
    "embedding": [_embedding],
    **{name: [_likelihood(name)] for name in ("nll_loss", "nll_loss_nd", "nll_loss2d")},
    "cosine_embedding_loss": [_cosine],
    "embedding_bag": [_embedding_bag],
    "masked_scatter": [_masked_scatter],
    "gather": [_gather],
    "index_select": [_index_select],
    "index": [_index, _lookup],
    "scatter": [_scatter],
    "scatter_add": [_scatter],
    "one_hot": [_one_hot],
    **{name: [_view(name)] for name in ("view", "_unsafe_view", "reshape")},
    "flatten": [_flatten],
    "ravel": [on_one("ravel", least=2)],
    "unsqueeze": [along_dim("unsqueeze")],
    "squeeze": [_squeeze],
    "unflatten": [_unflatten],
    "expand": [_expand],
    "expand_as": [_expand_as],
    **{name: [_reshaped_as(name)] for name in ("view_as", "reshape_as")},
    "permute": [_permute],
    "transpose": [_transpose("transpose.int")],
    **{name: [_transpose(name)] for name in ("swapaxes", "swapdims")},
    "movedim": [_movedim],
    "t": [lambda c: call("t", c.any(1, 2))],
    "numpy_T": [lambda c: call("numpy_T", c.any(2, 2))],
    "mT": [on_one("mT", least=2)],
    "select": [_select],
    "unbind": [along_dim("unbind.int")],
    "split": [_splits("split.Tensor")],
    **{name: [_splits(name)] for name in ("split_with_sizes", "chunk")},
    "tensor_split": [_splits("tensor_split.sections")],
    "slice": [_slice],
    "narrow": [_narrow],
    **{name: [_cat(name)] for name in ("cat", "concat")},
    "stack": [_stack],
    "repeat_interleave": [_repeat_interleave],
    "repeat": [_repeat],
    "constant_pad_nd": [_pad],
    "pad": [_pad, _pad_mirrored],
    **{
        f"{kind}_pad{count}d": [_mirrored(f"{kind}_pad{count}d", count)]
        for kind in ("reflection", "replication")
        for count in (1, 2)
    },
    "flip": [_flip],
    "roll": [_roll],
    "slice_scatter": [_slice_scatter],
    "select_scatter": [_select_scatter],
    "diagonal": [_diagonal],
    "to": [on_one("to.dtype", torch.float32)],
    "_to_copy": [lambda c: call("_to_copy", c.any(), dtype=torch.float32)],
    "type_as": [_type_as],
    **{name: [_tensors_of_shape(name)] for name in ("zeros", "ones")},
    "empty": [_tensors_of_shape("empty.memory_format")],
    "full": [_filled],
    **{name: [_like(name)] for name in ("zeros_like", "ones_like", "empty_like")},
    "full_like": [_like("full_like", 2.5)],
    **{name: [_new(name)] for name in ("new_zeros", "new_ones", "new_empty")},
    "new_full": [_new("new_full", 2.5)],
    **{
        name: [_pooled(name, count)]
        for count in (1, 2, 3)
        for kind in ("avg", "max", "adaptive_avg", "adaptive_max")
        for name in [f"{kind}_pool{count}d"]
    },
    **{f"_adaptive_avg_pool{count}d": [_pooled(f"_adaptive_avg_pool{count}d", count)] for count in (2, 3)},
    "max_pool2d_with_indices": [_pooled("max_pool2d_with_indices", 2)],
    **{f"upsample_nearest{count}d": [_upsampled(f"upsample_nearest{count}d", count)] for count in (1, 2, 3)},
    **{
        name: [_upsampled(name, 2)]
        for name in ("upsample_bilinear2d", "upsample_bicubic2d", "_upsample_bilinear2d_aa")
    },
    **{name: [on_one(name, least=3)] for name in ("tril", "triu")},
    "view_as_real": [lambda c: call("view_as_real", torch.view_as_complex(c.normal(*c.shape(), 2)))],
    "view_as_complex": [_complex_pairs],
    **{name: [_spectrum(name)] for name in ("fft_fft", "fft_rfft", "fft_irfft", "fft_ifft")},
    **{
        name: [_spectra(name)]
        for kind in ("fft", "rfft", "ifft", "irfft")
        for name in (f"fft_{kind}2", f"fft_{kind}n")
    },
    **{name: [_parts_of_complex(name)] for name in ("real", "imag")},
    "unfold": [_unfold],
    **{name: [_recurrent(name)] for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
    **{name: [_cell(name)] for name in ("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")},
    "_weight_norm": [_weight_norm],
    "prelu": [_prelu],
    "sum": [reduces("sum.dim_IntList"), _of_all("sum")],
    "mean": [reduces("mean.dim"), _of_all("mean")],
    **{name: [reduces(name)] for name in ("amax", "amin", "logsumexp")},
    **{name: [reduces_one(f"{name}.dim"), _of_all(name), _largest_of_two(name)] for name in ("max", "min")},
    **{name: [reduces_one(name)] for name in ("argmax", "argmin")},
    **{name: [_of_mask(f"{name}.dim")] for name in ("any", "all")},
    "prod": [reduces_one("prod.dim_int"), _of_all("prod")],
    **{name: [_spread(f"{name}.correction", number)] for name, number in (("var", 1), ("std", 1), ("var_mean", 0))},
    "median": [reduces_one("median.dim")],
    "count_nonzero": [lambda c: call("count_nonzero.dim_IntList", x := c.any(), c.dims(x))],
    "softmax": [along_dim("softmax.int")],
    "_softmax": [along_dim("_softmax", False)],
    "log_softmax": [along_dim("log_softmax.int")],
    "_log_softmax": [along_dim("_log_softmax", False)],
    **{name: [along_dim(name)] for name in ("cumsum", "cumprod", "logcumsumexp")},
    **{name: [_sorted(name)] for name in ("sort", "argsort", "topk")},
    **{
        name: [_loss(name)]
        for name in ("mse_loss", "l1_loss", "soft_margin_loss", "binary_cross_entropy_with_logits")
    },
    **{name: [_loss(name, 0.5)] for name in ("smooth_l1_loss", "huber_loss")},
    "glu": [_glu],
    **{
        f"{name}_backward": [_gradient(f"{name}_backward", *rest)]
        for name, rest in {
            "tanh": (), "sigmoid": (), "gelu": (), "silu": (), "mish": (), "hardswish": (), "hardsigmoid": (),
            "threshold": (0.0,), "leaky_relu": (0.1, False), "hardtanh": (-0.5, 0.5), "hardshrink": (0.5,), "softshrink": (0.5,),
            "softplus": (1.0, 20.0),
        }.items()
    },
    "elu_backward": [_elu_gradient],
    "native_dropout_backward": [_dropout_gradient],
    "log_sigmoid_backward": [_log_sigmoid_gradient],
    **{
        name: [_pooled_gradient(name, count)]
        for count in (2, 3)
        for name in (
            f"avg_pool{count}d_backward", f"_adaptive_avg_pool{count}d_backward", f"max_pool{count}d_with_indices_backward",
            f"reflection_pad{count}d_backward", f"replication_pad{count}d_backward",
        )
    },
    "embedding_dense_backward": [_embedding_gradient],
    **{
        name: [_convolution_gradient(name)]
        for name in ("meshloom::convolution_input_gradient", "meshloom::convolution_weight_gradient")
    },
    "index_put": [_index_put],
    "diagonal_scatter": [_diagonal_scatter],
}  # fmt: skip

POINTWISE: dict[str, list[Make]] = {
    **{
        name: [on_one(name)]
        for name in [
            "relu",
            "gelu",
            "silu",
            "tanh",
            "sigmoid",
            "exp",
            "sin",
            "abs",
            "sign",
            "elu",
            "leaky_relu",
            "erf",
        ]
    },
    "pow": [on_one("pow.Tensor_Scalar", 2), on_broadcast("pow.Tensor_Tensor")],
    "maximum": [on_broadcast("maximum")],
    "rsub": [on_one("rsub.Scalar", 1.5)],
    "addcmul": [
        lambda c: call("addcmul", *(c.normal(*shape) for shape in [(4, 5), (4, 1), (5,)]), value=0.5)
    ],
    "lerp": [lambda c: call("lerp.Scalar", *(c.normal(*shape) for shape in [(4, 5), (5,)]), 0.3)],
    "clamp": [on_one("clamp", -0.5, 0.5)],
    "bitwise_and": [lambda c: call("bitwise_and.Tensor", c.normal(4, 5) > 0, c.normal(5) > 0)],
}
"""Of the operators that torch calls pointwise, which all have one rule, some."""
