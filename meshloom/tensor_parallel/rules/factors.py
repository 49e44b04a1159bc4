"""Factor maps: which dims of an operator's tensors are one axis, in the manner of einsum.

    linear       b* k, o k, o -> b* o; sum k; add 2
    view         b (h d) -> b h d
    split        b (q+k+v) -> b q, b k, b v

One label is one axis. `(h d)` is a dim made of two, outermost first; `(q+k)` one after another; `b*` any
number of leading dims;
`n!` has to be whole: computing on a part of it would be wrong; `_` is a dim that is whole and nobody else's.
Labels that are in
`sum` and are cut leave partial results, to be summed over the ranks; an operand in `add` is added to such a
sum (once).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshloom.comm.pieces import Runs
from meshloom.program.operators.payload import Collective


@dataclass(frozen=True)
class Product:
    """A dim made of several, outermost first."""

    parts: tuple[Term, ...]


@dataclass(frozen=True)
class Concat:
    """A dim made of several, one after another."""

    parts: tuple[Term, ...]


Term = str | Product | Concat | None  # a label; None: whole, and nobody else's
Dims = tuple[Term, ...]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a rank's part of a call looks like.

    here, whole: label -> size there and in all. operands, outputs: shapes there. starts: label -> where each
        rank's part begins.
    runs: label -> the runs of indices that each rank has; None: all of them.
    """

    here: Mapping[str, int]
    whole: Mapping[str, int]
    operands: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    starts: Mapping[str, tuple[int, ...]]
    runs: Mapping[str, tuple[Runs | None, ...]]
    rank: int

    def is_cut(self, label: str) -> bool:
        """Whether the ranks divide it, be it that this rank has all of it and another one nothing."""
        return any(runs is not None for runs in self.runs[label])


@dataclass(frozen=True, kw_only=True)
class Talk:
    """A collective that an operator starts by itself. num_elements: of the value that is put together or
    added up. times: how often."""

    collective: Collective
    num_elements: int
    times: int
    backward: bool = False


@dataclass(frozen=True, kw_only=True)
class Routed:
    """Rows that data sends to groups. rows, groups: labels. table, by: operands: what each group has; the
    integers that say whose a row is.

    is_sorted: rows are sorted by group, and the integers say where each group's end; else they say every
        row's group.
    """

    rows: str
    groups: str
    table: int
    by: int
    is_sorted: bool = False


Local = Callable[[Any, tuple[Any, ...], dict[str, Any], Sizes], tuple[Any, tuple[Any, ...], dict[str, Any]]]
"""(target, args, kwargs, sizes) -> those with which a rank computes its part."""


@dataclass(frozen=True, kw_only=True)
class Factors:
    """The factor map of one call.

    operands: a tuple per tensor operand, in the order of `Node.operands()`, with a term per dim. outputs: per
        tensor result.
    sizes: of labels that stand in no dim by themselves.
    whole: labels that may not be cut. sums: labels that, when cut, leave partial results.
    joins: labels over which, when cut, the operator talks to the other ranks itself and gives all of them the
        whole result.
    talks: labels over which, when cut, the operator talks to the other ranks itself and gives each of them
    its part; with what it sends. entire: operands of which every rank needs all, unless a label of their own
    is cut: their other dims may have a cut axis. in_one_run: labels of which a rank's part has to be indices
    without a gap: the call finds it by where it starts.
    filled: labels of which every rank has to have an index: the kernel refuses to work on none.
    added: operands that are added to a partial result, and so have to be partial themselves.
    linear: sets of operands that may be partial (the others being replicated), so that the result is.
    routed: labels of which one goes where the other goes: they may be cut together, whatever `whole` says.
    drawn: dims of what is drawn at random inside; None: those of the first output; (): nothing, whatever
        torch says.
    local: how the call changes where something is cut; None: as it is.
    """

    operands: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    sizes: Mapping[str, int] = field(default_factory=dict)
    whole: frozenset[str] = frozenset()
    sums: frozenset[str] = frozenset()
    joins: frozenset[str] = frozenset()
    talks: Mapping[str, tuple[Talk, ...]] = field(default_factory=dict)
    entire: frozenset[int] = frozenset()
    in_one_run: frozenset[str] = frozenset()
    filled: frozenset[str] = frozenset()
    added: frozenset[int] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    routed: Routed | None = None
    drawn: Dims | None = None
    local: Local | None = None

    @property
    def facts(self) -> tuple[Any, ...]:
        """Equal for calls whose dims belong together alike; how the call changes does not count, but whether
        it does."""
        sizes, talks = tuple(self.sizes.items()), tuple(self.talks.items())
        sets = (
            self.whole,
            self.sums,
            self.joins,
            self.entire,
            self.in_one_run,
            self.filled,
            self.added,
            self.linear,
        )
        return self.operands, self.outputs, sizes, talks, *sets, self.routed, self.drawn, self.local is None


def labels_in(term: Term) -> list[str]:
    """Every label of a term, in order.

    >>> labels_in(Product(("h", Concat(("a", "b")))))
    ['h', 'a', 'b']
    """
    if term is None:
        return []
    return [term] if isinstance(term, str) else [label for part in term.parts for label in labels_in(part)]


def labels_of(shape: Sequence[int]) -> tuple[list[Term], dict[str, int]]:
    """A label for every dim, and their sizes.

    >>> labels_of((4, 5))
    (['d0', 'd1'], {'d0': 4, 'd1': 5})
    """
    names: list[Term] = [f"d{place}" for place in range(len(shape))]
    return names, {f"d{place}": size for place, size in enumerate(shape)}


def shown(factors: Factors) -> str:
    """A factor map as text."""
    given = [_shown_dims(dims, factors) for dims in factors.operands]
    given = [f"{{{dims}}}" if place in factors.entire else dims for place, dims in enumerate(given)]
    text = f"{', '.join(given)} -> {', '.join(_shown_dims(dims, factors) for dims in factors.outputs)}"
    text += f"; sum {' '.join(sorted(factors.sums))}" if factors.sums else ""
    text += f"; {factors.routed.rows} goes with {factors.routed.groups}" if factors.routed else ""
    return text + (f"; add {' '.join(map(str, sorted(factors.added)))}" if factors.added else "")


def factors_of_text(
    text: str, operands: Sequence[tuple[int, ...] | None], num_outputs: int, local: Local | None = None
) -> Factors:
    """The map that `text` stands for. operands: shape of every tensor argument, in the operator's order;
    None: not given.

    >>> factors = factors_of_text("b* k, o k, o -> b* o; sum k; add 2", [(2, 3, 4), (5, 4), None], 1)
    >>> shown(factors)
    'b.0 b.1 k, o k -> b.0 b.1 o; sum k'
    """
    body, *rest = (part.strip() for part in text.split(";"))
    left, right = body.split("->")
    clauses = {words[0]: words[1:] for words in (part.split() for part in rest)}
    given = left.split(",")
    lead = max(
        (
            len(shape) - _count(part)
            for part, shape in zip(given, operands, strict=False)
            if shape is not None and _stars(part)
        ),
        default=0,
    )
    places: dict[int, int] = {}
    dims: list[Dims] = []
    whole: set[str] = set()
    sizes: dict[str, int] = {}
    for number, (part, shape) in enumerate(zip(given, operands, strict=False)):
        if shape is not None:
            places[number] = len(dims)
            dims.append(_dims(part, shape, lead, whole, sizes))
    shapes = [shape for shape in operands if shape is not None]
    dims = [
        tuple(_unless_broadcast(term, size, sizes) for term, size in zip(terms, shape, strict=True))
        for terms, shape in zip(dims, shapes, strict=False)
    ]
    outputs = tuple(_dims(part, None, lead, whole, sizes) for part in right.split(","))[:num_outputs]
    return Factors(
        operands=tuple(dims),
        outputs=outputs,
        sizes=sizes,
        whole=frozenset(whole),
        sums=frozenset(clauses.get("sum", [])),
        added=frozenset(places[int(each)] for each in clauses.get("add", []) if int(each) in places),
        linear=tuple(
            frozenset(places[int(each)] for each in one.split("+") if int(each) in places)
            for one in clauses.get("linear", [])
        ),
        local=local,
    )


_TOKEN = re.compile(r"\([^)]*\)|[^\s()]+")


def _stars(part: str) -> bool:
    return "*" in part


def _count(part: str) -> int:
    return sum(not token.rstrip("!").endswith("*") for token in _TOKEN.findall(part))


def _dims(
    part: str, shape: tuple[int, ...] | None, lead: int, whole: set[str], sizes: dict[str, int]
) -> Dims:
    tokens = _TOKEN.findall(part)
    stars = (len(shape) - _count(part)) if shape is not None else lead
    terms: list[Term] = []
    for token in tokens:
        if token.rstrip("!").endswith("*"):
            name = token.rstrip("!").removesuffix("*")
            terms += [f"{name}.{each}" for each in range(lead - stars, lead)]
            if token.endswith("!"):
                whole.update(f"{name}.{each}" for each in range(lead))
        else:
            terms.append(_term(token, whole))
    if shape is None:
        return tuple(terms)
    for term, size in zip(terms, shape, strict=True):
        if isinstance(term, str) and sizes.get(term, 1) == 1:
            sizes[term] = size
    return tuple(terms)


def _unless_broadcast(term: Term, size: int, sizes: Mapping[str, int]) -> Term:
    return None if isinstance(term, str) and size == 1 and sizes[term] != 1 else term


def _term(token: str, whole: set[str]) -> Term:
    if token.startswith("("):
        inner = token[1:-1].strip()
        if "+" in inner:
            return Concat(tuple(_term(each.strip(), whole) for each in inner.split("+")))
        return Product(tuple(_term(each, whole) for each in inner.split()))
    if token == "_":
        return None
    if token.endswith("!"):
        whole.add(token[:-1])
    return token.removesuffix("!")


def _shown_dims(dims: Dims, factors: Factors) -> str:
    return " ".join(_shown(term, factors) for term in dims) or "1"


def _shown(term: Term, factors: Factors) -> str:
    if term is None:
        return "_"
    if isinstance(term, str):
        return term + ("!" if term in factors.whole else "")
    inner = [_shown(part, factors) for part in term.parts]
    return f"({' '.join(inner)})" if isinstance(term, Product) else f"({'+'.join(inner)})"
