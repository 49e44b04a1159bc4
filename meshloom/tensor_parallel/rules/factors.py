"""Factor maps: which dims of an operator's operands and results are the same axis, as in einsum.

    linear       b* k, o k, o -> b* o; sum k; add 2
    view         b (h d) -> b h d
    split        b (q+k+v) -> b q, b k, b v

A label is an axis. `(h d)` is a dim composed of two axes, outermost first; `(q+k)` is a concatenation; `b*`
is any number of leading dims.
`n!` must not be sharded, since computing on a shard of it would be wrong; `_` is a dim that is not sharded
and shared with no other tensor.
If a label after `sum` is sharded, the results are partial and are summed over the ranks; operands after `add`
are added to that sum once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from meshloom.comm.pieces import Runs
from meshloom.program.operators.collectives import Collective


@dataclass(frozen=True)
class Product:
    """A dim composed of several axes, outermost first."""

    parts: tuple[Term, ...]


@dataclass(frozen=True)
class Concat:
    """A dim that concatenates several axes."""

    parts: tuple[Term, ...]


Term = str | Product | Concat | None  # a label; None: unsharded, and shared with no other tensor
Dims = tuple[Term, ...]
FIRST_LINEAR = (frozenset({0}),)  # `Factors.linear` of operators that are linear in their first operand


@dataclass(frozen=True, kw_only=True)
class ShardSizes:
    """The sizes of one rank's shard of a call.

    local, full: label -> its size on this rank, and in total. operands, outputs: local shapes.
    starts: label -> the first index of each rank's shard.
    runs: label -> the index ranges that each rank holds; None: all indices.
    """

    local: Mapping[str, int]
    full: Mapping[str, int]
    operands: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    starts: Mapping[str, tuple[int, ...]]
    runs: Mapping[str, tuple[Runs | None, ...]]
    rank: int

    def is_sharded(self, label: str) -> bool:
        """Whether ranks hold different indices of a label, even if this one holds all of them."""
        return any(runs is not None for runs in self.runs[label])


@dataclass(frozen=True, kw_only=True)
class InnerCollective:
    """A collective inside an operator. num_elements: of the full tensor that is gathered or summed. times:
    how often it runs."""

    collective: Collective
    num_elements: int
    times: int
    backward: bool = False


@dataclass(frozen=True, kw_only=True)
class Routed:
    """Rows that are assigned to groups by data, such as tokens to experts.

    rows, groups: labels.
    table, by: operands: the table with an entry per group, and the integers that assign rows to groups.
    is_sorted: rows are sorted by group, and the integers are the end of each group; otherwise they are the
        group of each row.
    """

    rows: str
    groups: str
    table: int
    by: int
    is_sorted: bool = False


LocalCall = Callable[
    [Any, tuple[Any, ...], dict[str, Any], ShardSizes], tuple[Any, tuple[Any, ...], dict[str, Any]]
]
"""(target, args, kwargs, sizes) -> (target, args, kwargs) that compute a rank's shard."""


@dataclass(frozen=True, kw_only=True)
class Factors:
    """The factor map of one call.

    operands: a tuple for each tensor operand, in the order of `Node.operands()`, with a term for each dim.
    outputs: the same for each tensor result.
    sizes: of all labels that no dim consists of alone.
    unsharded: labels that must not be sharded. sums: labels that leave partial results if sharded.
    reduced_inside: labels over which, if sharded, the operator itself communicates, so that every rank has
        the full result.
    collectives: labels over which, if sharded, the operator itself communicates, so that every rank has its
        shard of the result, with what it sends.
    replicated: operands that every rank needs in full unless a label of their own is sharded, even if an axis
        of their other dims is.
    contiguous: labels of which a shard must be one range of indices: the call locates it by its first index.
    nonempty: labels of which every rank must hold an index: the kernel refuses empty tensors.
    added: operands that are added to a partial result, and must be partial themselves.
    linear: sets of operands; if those of a set are partial and all others replicated, the result is partial.
    routed: two labels that may be sharded together, whatever `unsharded` says.
    drawn: the dims of what is drawn at random inside. None: those of the first output. (): nothing is drawn.
    local: rewrites the call for a rank's shard. None: the call stays unchanged.
    """

    operands: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    sizes: Mapping[str, int] = field(default_factory=dict)
    unsharded: frozenset[str] = frozenset()
    sums: frozenset[str] = frozenset()
    reduced_inside: frozenset[str] = frozenset()
    collectives: Mapping[str, tuple[InnerCollective, ...]] = field(default_factory=dict)
    replicated: frozenset[int] = frozenset()
    contiguous: frozenset[str] = frozenset()
    nonempty: frozenset[str] = frozenset()
    added: frozenset[int] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    routed: Routed | None = None
    drawn: Dims | None = None
    local: LocalCall | None = None

    @property
    def facts(self) -> tuple[Any, ...]:
        """A key that is equal for calls with the same strategies; of `local` it contains whether there is
        one."""
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        own["sizes"], own["collectives"] = tuple(self.sizes.items()), tuple(self.collectives.items())
        own["local"] = self.local is None
        return tuple(own.values())


def labels_in(term: Term) -> list[str]:
    """All labels of a term, in order.

    >>> labels_in(Product(("h", Concat(("a", "b")))))
    ['h', 'a', 'b']
    """
    if term is None:
        return []
    return [term] if isinstance(term, str) else [label for part in term.parts for label in labels_in(part)]


def labels_of(shape: Sequence[int], but: Collection[int] = ()) -> tuple[Dims, dict[str, int]]:
    """A label for every dim except those in `but`, which stay unsharded, and the labels' sizes.

    >>> labels_of((4, 5)), labels_of((4, 5), but={1})
    ((('d0', 'd1'), {'d0': 4, 'd1': 5}), (('d0', None), {'d0': 4}))
    """
    labels = tuple(None if place in but else f"d{place}" for place in range(len(shape)))
    return labels, {f"d{place}": size for place, size in enumerate(shape) if place not in but}


def broadcast_dims(shape: Sequence[int], dims: Dims, full: Sequence[int]) -> Dims:
    """The dims of an operand of `shape` that is broadcast to `dims` of the sizes `full`; those that grow stay
    unsharded.

    >>> broadcast_dims((1, 5), ("a", "b", "c"), (3, 4, 5))
    (None, 'c')
    """
    lead = len(full) - len(shape)
    places = zip(dims[lead:], shape, full[lead:], strict=True)
    return tuple(term if size == whole else None for term, size, whole in places)


def shown(factors: Factors) -> str:
    """The text of a factor map."""
    given = [_shown_dims(dims, factors) for dims in factors.operands]
    given = [f"{{{dims}}}" if place in factors.replicated else dims for place, dims in enumerate(given)]
    text = f"{', '.join(given)} -> {', '.join(_shown_dims(dims, factors) for dims in factors.outputs)}"
    text += f"; sum {' '.join(sorted(factors.sums))}" if factors.sums else ""
    text += f"; {factors.routed.rows} goes with {factors.routed.groups}" if factors.routed else ""
    return text + (f"; add {' '.join(map(str, sorted(factors.added)))}" if factors.added else "")


def factors_of_text(
    text: str, operands: Sequence[tuple[int, ...] | None], num_outputs: int, local: LocalCall | None = None
) -> Factors:
    """The factor map that a text describes. operands: the shape of every tensor argument in the operator's
    order; None: not given.

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
            if shape is not None and "*" in part
        ),
        default=0,
    )
    places: dict[int, int] = {}
    dims: list[Dims] = []
    unsharded: set[str] = set()
    sizes: dict[str, int] = {}
    for number, (part, shape) in enumerate(zip(given, operands, strict=False)):
        if shape is not None:
            places[number] = len(dims)
            dims.append(_dims(part, shape, lead, unsharded, sizes))
    shapes = [shape for shape in operands if shape is not None]
    dims = [  # without those that are broadcast
        tuple(
            None if isinstance(term, str) and size == 1 and sizes[term] != 1 else term
            for term, size in zip(terms, shape, strict=True)
        )
        for terms, shape in zip(dims, shapes, strict=False)
    ]
    outputs = tuple(_dims(part, None, lead, unsharded, sizes) for part in right.split(","))[:num_outputs]
    return Factors(
        operands=tuple(dims),
        outputs=outputs,
        sizes=sizes,
        unsharded=frozenset(unsharded),
        sums=frozenset(clauses.get("sum", [])),
        added=frozenset(places[int(each)] for each in clauses.get("add", []) if int(each) in places),
        linear=tuple(
            frozenset(places[int(each)] for each in one.split("+") if int(each) in places)
            for one in clauses.get("linear", [])
        ),
        local=local,
    )


_TOKEN = re.compile(r"\([^)]*\)|[^\s()]+")


def _count(part: str) -> int:
    return sum(not token.rstrip("!").endswith("*") for token in _TOKEN.findall(part))


def _dims(
    part: str, shape: tuple[int, ...] | None, lead: int, unsharded: set[str], sizes: dict[str, int]
) -> Dims:
    tokens = _TOKEN.findall(part)
    stars = (len(shape) - _count(part)) if shape is not None else lead
    terms: list[Term] = []
    for token in tokens:
        if token.rstrip("!").endswith("*"):
            name = token.rstrip("!").removesuffix("*")
            terms += [f"{name}.{each}" for each in range(lead - stars, lead)]
            if token.endswith("!"):
                unsharded.update(f"{name}.{each}" for each in range(lead))
        else:
            terms.append(_term(token, unsharded))
    if shape is None:
        return tuple(terms)
    for term, size in zip(terms, shape, strict=True):
        if isinstance(term, str) and sizes.get(term, 1) == 1:
            sizes[term] = size
    return tuple(terms)


def _term(token: str, unsharded: set[str]) -> Term:
    if token.startswith("("):
        inner = token[1:-1].strip()
        if "+" in inner:
            return Concat(tuple(_term(each.strip(), unsharded) for each in inner.split("+")))
        return Product(tuple(_term(each, unsharded) for each in inner.split()))
    if token == "_":
        return None
    if token.endswith("!"):
        unsharded.add(token[:-1])
    return token.removesuffix("!")


def _shown_dims(dims: Dims, factors: Factors) -> str:
    return " ".join(_shown(term, factors) for term in dims) or "1"


def _shown(term: Term, factors: Factors) -> str:
    if term is None:
        return "_"
    if isinstance(term, str):
        return term + ("!" if term in factors.unsharded else "")
    inner = [_shown(part, factors) for part in term.parts]
    return f"({' '.join(inner)})" if isinstance(term, Product) else f"({'+'.join(inner)})"
