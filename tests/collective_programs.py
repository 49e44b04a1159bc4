"""Random programs of collectives: which calls the ranks of a world make, with which tensors, and in which
order they wait.

All is derived from the program alone, so that every rank, and the oracle, knows the inputs of all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
COMPLEX = (torch.complex64, torch.complex128)
ARITHMETIC, BITWISE = ("sum", "avg", "product", "min", "max"), ("and", "or", "xor")
OPS = {
    **dict.fromkeys(FLOATS, ARITHMETIC),
    **dict.fromkeys(INTEGERS, ARITHMETIC + BITWISE),
    **dict.fromkeys(COMPLEX, ("sum", "avg", "product")),
    torch.bool: ("min", "max", *BITWISE),
}
REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
KINDS = (*REDUCTIONS, "all_gather", "all_to_all", "gather", "scatter", "broadcast", "message", "barrier")
LAYOUTS = ("contiguous", "offset", "transposed", "every_other", "lazy", "window")
LENGTHS = (0, 1, 2, 3, 7, 17)
# elements: above what everybody reduces by itself, and over several chunks
LARGE = (1000, 4099, 70_001, 300_003)


@dataclass(frozen=True, kw_only=True)
class Call:
    """One collective of a group, or one message.

    members: the group, as ranks of the world. shape: of what a rank hands in; of what it receives, for
    reduce_scatter and scatter. root, to: within the group; to is where a message goes. sizes: [from][to],
    elements of all_to_all.
    layouts: [place in the group], how that rank's tensors lie in memory. place_bytes: in the window.
    any_source: the message is received from whoever sends it.
    """

    number: int
    kind: str
    members: tuple[int, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    op: str
    root: int
    to: int
    sizes: tuple[tuple[int, ...], ...]
    layouts: tuple[str, ...]
    place_bytes: int
    any_source: bool

    @property
    def tag(self) -> int:
        """A message for any rank to send has a tag of its own."""
        return self.number + 10 if self.any_source else self.number % 2

    @property
    def numel(self) -> int:
        """Elements of `shape`."""
        return torch.Size(self.shape).numel()

    def input_of(self, place: int) -> Tensor:
        """What that rank hands in, contiguous: the whole tensor, flat for all_to_all, all slices behind each
        other for reduce_scatter and scatter."""
        if self.kind == "all_to_all":
            shape: tuple[int, ...] = (sum(self.sizes[place]),)
        elif self.kind in ("reduce_scatter", "scatter"):
            shape = self.all_shape
        else:
            shape = self.shape
        return random_values(self.dtype, shape, self.op, seed=self.number * 100 + place)

    @property
    def window_bytes(self) -> int:
        """What its tensors take there at most."""
        return (len(self.members) + 1) * max(self.numel, 2 * max(LENGTHS)) * self.dtype.itemsize + 32

    @property
    def all_shape(self) -> tuple[int, ...]:
        """All ranks' `shape` behind each other."""
        first, *others = self.shape or (1,)
        return (first * len(self.members), *others)


@dataclass(frozen=True, kw_only=True)
class Program:
    """rounds: calls that are under way together. orders: [round][rank of the world], the calls' numbers
    within the round in the order in which it waits."""

    rounds: tuple[tuple[Call, ...], ...]
    orders: tuple[tuple[tuple[int, ...], ...], ...]


def random_values(dtype: torch.dtype, shape: tuple[int, ...], op: str, seed: int) -> Tensor:
    """Values of all sizes; a product of a few of them does not overflow."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if dtype in INTEGERS:
        bits = torch.iinfo(dtype)
        low, high = (bits.min // 4, bits.max // 4) if op in ("avg", "sum") else (bits.min, bits.max)
        return torch.randint(low, high, shape, generator=generator).to(dtype)
    return torch.randn(
        shape, generator=generator, dtype=torch.complex128 if dtype in COMPLEX else torch.float64
    ).to(dtype)


@st.composite
def programs(draw: st.DrawFn, size: int, max_rounds: int = 4, max_calls: int = 4) -> Program:
    """Programs for a world of `size` ranks: groups are all, or parts that work at the same time."""
    rounds: list[tuple[Call, ...]] = []
    orders: list[tuple[tuple[int, ...], ...]] = []
    number = 0
    for _ in range(draw(st.integers(1, max_rounds))):
        round_: list[Call] = []
        taken_bytes = 0
        for _ in range(draw(st.integers(1, max_calls))):
            number += 1
            call = draw(calls(size, number, taken_bytes))
            if "window" in call.layouts:
                taken_bytes += call.window_bytes
            round_.append(call)
        rounds.append(tuple(round_))
        numbers = list(range(len(round_)))
        orders.append(tuple(tuple(draw(st.permutations(numbers))) for _ in range(size)))
    return Program(rounds=tuple(rounds), orders=tuple(orders))


@st.composite
def calls(draw: st.DrawFn, size: int, number: int, taken_bytes: int) -> Call:
    """One call. taken_bytes: taken in the window by other calls that are under way."""
    members = tuple(draw(st.sampled_from(_splits(size))))
    kind = draw(st.sampled_from(KINDS if len(members) > 1 else [kind for kind in KINDS if kind != "message"]))
    dtype = draw(st.sampled_from([*FLOATS, *INTEGERS, *COMPLEX, torch.bool]))
    op = draw(st.sampled_from(OPS[dtype])) if kind in REDUCTIONS else "sum"
    small = st.lists(st.sampled_from(LENGTHS), max_size=3).map(tuple)
    shape = draw(small | st.sampled_from([(length,) for length in LARGE]))
    n = len(members)
    root = draw(st.integers(0, n - 1))
    to = draw(st.sampled_from([place for place in range(n) if place != root])) if kind == "message" else 0
    row = st.lists(st.sampled_from(LENGTHS), min_size=n, max_size=n).map(tuple)
    sizes = tuple(draw(row) for _ in range(n)) if kind == "all_to_all" else ()
    layout = st.sampled_from(LAYOUTS)
    layouts = draw(st.lists(layout, min_size=n, max_size=n) | layout.map(lambda each: [each] * n))
    return Call(
        number=number, kind=kind, members=members, dtype=dtype, shape=shape, op=op, root=root, to=to, sizes=sizes, layouts=tuple(layouts),
        place_bytes=-(-taken_bytes // 16) * 16 + draw(st.sampled_from([0, dtype.itemsize])), any_source=draw(st.booleans()),
    )  # fmt: skip


def _splits(size: int) -> list[tuple[int, ...]]:
    """Groups to draw from: all ranks, in order and backwards, halves, every other one, single ranks."""
    world = tuple(range(size))
    found = [
        world,
        world,
        world,
        tuple(reversed(world)),
        world[: size // 2],
        world[size // 2 :],
        world[::2],
        world[1::2],
        (0,),
    ]
    return [members for members in found if members]
