"""Random draws keyed by (seed, step, chunk, n), independent of the order of execution.

A chunk's forward starts from the seed of (seed, step, chunk), on whichever rank it runs. Under `KeyedDraws`,
each random operation n has a seed derived from that of operation n - 1, so a draw does not depend on how many
numbers the earlier ones took. The chain of seeds is stored in torch's CPU generator (its `initial_seed`), so
activation checkpointing, which saves and restores that generator, repeats the same draws.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from meshloom.core.errors import JobError

_HERE = threading.local()  # .drawing: contexts of this thread in which `random` and numpy are drawn from


def derive(*parts: int | str) -> int:
    """A 63-bit hash of `parts`.

    >>> derive(0, "chunk", 3) == derive(0, "chunk", 3) != derive(0, "chunk", 4)
    True
    """
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def seed_everything(value: int) -> None:
    """Seed torch (every device), `random` and numpy."""
    seed_torch(value)
    _seed_python(value)


def seed_script(value: int) -> None:
    """The same before a script begins, which may still choose the devices that it sees: none is asked for."""
    torch.manual_seed(value)
    _seed_python(value)


def seed_torch(value: int) -> None:
    """`torch.manual_seed`; without accelerators only the CPU generator, which is forty times as fast."""
    if torch.accelerator.is_available():
        torch.manual_seed(value)
    else:
        torch.default_generator.manual_seed(value)


@contextmanager
def python_draws_of(seed: int) -> Iterator[None]:
    """A context in which `random` and numpy draw from `seed`; their states outside are restored.

    numpy's functions draw from another bit generator meanwhile, so that their own stays as it is: copying its state takes numpy
    35 microseconds each way, for every chunk.
    """
    numpys = _random_state.mtrand._rand
    own, spare = numpys._bit_generator, _spare_bit_generator()
    if own is spare:  # within such a context
        with _drawing(), _python_preserved():
            _seed_python(seed)
            yield
        return
    kept, normals = random.getstate(), _of_normals(numpys)
    _random_state.set_bit_generator(spare)
    try:
        with _drawing():
            _seed_python(seed)
            yield
    finally:
        _random_state.set_bit_generator(own)
        _of_normals(numpys, normals)
        random.setstate(kept)


@contextmanager
def draws_of(seed: int) -> Iterator[None]:
    """`python_draws_of`, and torch's CPU generator draws from `seed`, too."""
    kept = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        with python_draws_of(seed):
            yield
    finally:
        torch.set_rng_state(kept)


def seed_draws(value: int) -> None:
    """Seed the CPU generators. Takes 10 us; `torch.manual_seed` visits every kind of device in 200 us."""
    torch.default_generator.manual_seed(value)
    _seed_python(value)


def _seed_python(value: int) -> None:
    random.seed(value)
    numpy.random.seed(value % 2**32)


@contextmanager
def _python_preserved() -> Iterator[None]:
    kept = random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(kept[0])
        numpy.random.set_state(kept[1])


_random_state: Any = numpy.random  # numpy tells checkers of types less than there is


@cache
def _spare_bit_generator() -> numpy.random.MT19937:
    return numpy.random.MT19937(0)  # takes half a millisecond to make


class _NoGenerator:
    """A bit generator's place while the rest of a `RandomState` is read or set."""

    state: Any = {"bit_generator": "none", "state": {}}  # noqa: RUF012


def _of_normals(numpys: Any, given: Any = None) -> Any:
    """The normal draw that a `RandomState` has made beforehand, which a change of its bit generator discards. given:
    set this one."""
    own, numpys._bit_generator = numpys._bit_generator, _NoGenerator()
    try:
        return numpys.get_state(legacy=False) if given is None else numpys.set_state(given)
    finally:
        numpys._bit_generator = own


def model_seed(seed: int) -> int:
    """The seed of the initial parameters."""
    return derive(seed, "model")


def chunk_seed(seed: int, step: int, chunk: int) -> int:
    """The seed of the draws of chunk `chunk` of the global batch of step `step`."""
    return derive(seed, "chunk", step, chunk)


def evaluation_seed(seed: int, step: int, chunk: int) -> int:
    """The seed of what torch, `random` and numpy draw in every metric for chunk `chunk` of batch `step` of an evaluation."""
    return derive(seed, "evaluation", step, chunk)


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """The seed of the draws during the reading of sample `index` (augmentation)."""
    return derive(seed, "sample", epoch, index)


def sample_order(seed: int, epoch: int, num_samples: int, shuffle: bool) -> list[int]:
    """The order of samples in an epoch of map-style data: a permutation determined by (seed, epoch)."""
    if not shuffle:
        return list(range(num_samples))
    generator = torch.Generator().manual_seed(derive(seed, "order", epoch))
    return torch.randperm(num_samples, generator=generator).tolist()


@contextmanager
def preserved_draws() -> Iterator[None]:
    """Restore the CPU generators of torch, `random` and numpy at the end of the context."""
    kept = torch.get_rng_state()
    try:
        with _drawing(), _python_preserved():
            yield
    finally:
        torch.set_rng_state(kept)


@contextmanager
def preserved_draws_of_devices() -> Iterator[None]:
    """`preserved_draws`, and the generators of this process's GPUs as they are."""
    with _torch_preserved(), _drawing(), _python_preserved():
        yield


@contextmanager
def draws_apart() -> Iterator[None]:
    """What others draw meanwhile does not change the draws of this thread: those of torch, and in a context of this module's functions
    those of `random` and numpy, which take twenty times as long to keep."""
    with _torch_preserved(), _python_preserved() if getattr(_HERE, "drawing", 0) else nullcontext():
        yield


@contextmanager
def _torch_preserved() -> Iterator[None]:
    gpus = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    kept = [(each, each.get_state()) for each in (torch.default_generator, *gpus)]
    try:
        yield
    finally:
        for each, state in kept:
            each.set_state(state)


@contextmanager
def _drawing() -> Iterator[None]:
    """Marks that this thread draws from `random` and numpy."""
    _HERE.drawing = getattr(_HERE, "drawing", 0) + 1
    try:
        yield
    finally:
        _HERE.drawing -= 1


def generators() -> tuple[Tensor, Any, Any]:
    """The states of the CPU generators of torch, `random` and numpy."""
    return torch.get_rng_state(), random.getstate(), numpy.random.get_state()


def put_generators(states: tuple[Tensor, Any, Any]) -> None:
    """Go on with the draws that follow these states, as of `generators`."""
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    numpy.random.set_state(states[2])


@dataclass(frozen=True)
class Rows:
    """The rows of a larger chunk on this rank: `start` to `start + count` of `total` samples."""

    start: int
    count: int
    total: int


class KeyedDraws(TorchDispatchMode):
    """Seeds every random operation by its number within the chunk.

    rows: ranks share a chunk, and draw what one device would: a draw whose first dim is k per sample is the
        slice for these rows of the draw for all `rows.total` samples. Between the layers of a recurrent one the second
        dim is that of samples; a packed sequence has none, which raises `JobError`.
    seen: a list to which every operation that may draw is appended.
    compiled: compiled code may be made and run in it, whose draws are operators of their own (`fallback_random`).

    Operations that are passed a generator are not changed.
    """

    def __init__(
        self, rows: Rows | None = None, seen: list[Any] | None = None, *, compiled: bool = False
    ) -> None:
        super().__init__()
        self.rows = rows
        self.seen = seen
        self._compiled = compiled
        self._recurrent = None if rows is None or rows.count == rows.total else _RecurrentLayers()

    def __enter__(self) -> KeyedDraws:
        super().__enter__()
        if self._recurrent is not None:
            self._recurrent.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._recurrent is not None:
            self._recurrent.__exit__(*error)
        super().__exit__(*error)

    def ignore_compile_internals(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Torch's question whether compiled code runs in this mode, instead of the functions as written."""
        return self._compiled

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        seed_torch(derive(torch.default_generator.initial_seed(), "next"))
        if self.seen is not None:
            self.seen.append(func)
        return _draw(func, args, kwargs, self.rows, self._recurrent.dim if self._recurrent else 0)


def pass_over_draws(count: int) -> None:
    """Advance the chain of seeds as `count` random operations do."""
    seed = torch.default_generator.initial_seed()
    for _ in range(count):
        seed = derive(seed, "next")
    seed_torch(seed)


class _RecurrentLayers(TorchFunctionMode):
    """Notices recurrent layers, which draw masks [time, samples, features]. dim: that of samples in a draw."""

    def __init__(self) -> None:
        super().__init__()
        self.dim = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") not in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
            return func(*args, **(kwargs or {}))
        is_packed = isinstance(
            args[3], list | tuple
        )  # its third operand is the hidden state, else the weights
        _, num_layers, dropout, training = args[4:8] if is_packed else args[3:7]
        if is_packed and dropout and training and num_layers > 1:
            raise JobError(
                "A recurrent layer with dropout on packed sequences draws for all of their steps at once, so replicas that share a chunk "
                "(sync_batch_norm=true) cannot draw what one device would. Use padded sequences, dropout=0, or sync_batch_norm=false."
            )
        self.dim = 1
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.dim = 0


def _draw(func: Any, args: Sequence[Any], kwargs: dict[str, Any], rows: Rows | None, dim: int = 0) -> Any:
    """dim: that of samples."""
    if func in _TAKES_A_VARYING_COUNT and args[0].ndim:
        return _draw_row_by_row(func, args, kwargs, rows)
    if rows is None or rows.count == rows.total:
        return func(*args, **kwargs)
    like = next((value for value in args if isinstance(value, Tensor)), None)
    if like is None:  # rand(sizes), randint(low, high, sizes): the one list among the arguments is the shape
        at = next((number for number, value in enumerate(args) if isinstance(value, list | tuple)), None)
        shape = list(args[at]) if at is not None else []
        if at is None or not shape or shape[0] % rows.count:
            return func(*args, **kwargs)
        per_sample = shape[0] // rows.count
        full = func(*args[:at], [rows.total * per_sample, *shape[1:]], *args[at + 1 :], **kwargs)
        return full.narrow(0, rows.start * per_sample, shape[0]).clone()
    if like.ndim <= dim or like.shape[dim] % rows.count:
        return func(*args, **kwargs)
    per_sample = like.shape[dim] // rows.count
    start, length = rows.start * per_sample, rows.count * per_sample

    def enlarge(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.shape[: dim + 1] != like.shape[: dim + 1]:
            return value
        # a valid probability, weight, deviation and rate
        sizes = [*value.shape[:dim], rows.total * per_sample, *value.shape[dim + 1 :]]
        order = sorted(
            range(value.ndim), key=value.stride, reverse=True
        )  # results have the layout of operands
        ones = value.new_ones([sizes[each] for each in order])
        full = ones.permute([order.index(each) for each in range(value.ndim)])
        full.narrow(dim, start, length).copy_(value)
        return full

    enlarged = [enlarge(value) for value in args]
    full = func(*enlarged, **{key: enlarge(value) for key, value in kwargs.items()})

    def cut(value: Any) -> Any:
        is_cut = isinstance(value, Tensor) and value.ndim > dim
        return value.narrow(dim, start, length).clone() if is_cut else value

    if full is enlarged[0]:  # an in-place draw, such as bernoulli_
        args[0].copy_(full.narrow(dim, start, length))
        return args[0]
    return tuple(cut(value) for value in full) if isinstance(full, tuple) else cut(full)


# How many values these take from the generator depends on their arguments, so each row has its own seed.
_TAKES_A_VARYING_COUNT = {
    torch.ops.aten.poisson.default,
    torch.ops.aten.binomial.default,
    torch.ops.aten._standard_gamma.default,
    torch.ops.aten._sample_dirichlet.default,
    torch.ops.aten.rrelu_with_noise.default,
    torch.ops.aten.rrelu_with_noise_.default,
}


def _draw_row_by_row(func: Any, args: Sequence[Any], kwargs: dict[str, Any], rows: Rows | None) -> Tensor:
    chain = torch.default_generator.initial_seed()
    num_rows = args[0].shape[0]
    first = rows.start * (num_rows // rows.count) if rows else 0
    drawn = torch.empty_like(args[0])
    for row in range(num_rows):
        seed_torch(derive(chain, "row", first + row))
        of_row = [value[row : row + 1] if isinstance(value, Tensor) else value for value in args]
        drawn[row : row + 1] = func(*of_row, **kwargs)
    seed_torch(chain)
    # in place, through the rows
    return args[0] if func is torch.ops.aten.rrelu_with_noise_.default else drawn
