"""Measures what this machine does: seconds of operators and of collectives, in a few seconds.

Operators run as a chain of equal ones that is recorded for backward, as in training, so that what autograd costs is in it, and outputs
are allocated as they are there. All ranks measure at the same time, since that is how they share caches and memory when they train.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from meshloom.cluster import COLLECTIVES, COUNTED_IN_FLOPS, Collective, Kind, Link, Machine, Operation, fit_link
from meshloom.comm.group import Group

OPERATOR_SECONDS = 2.0  # about what all operators take, without making their tensors
LINK_SECONDS = 1.2  # for all collectives of one group
MESSAGE_BYTES = (4 << 10, 64 << 10, 1 << 20, 8 << 20)
RUNS = (4, 200)  # least and most repetitions of one point


@dataclass(frozen=True, kw_only=True)
class Operators:
    """What `measure_operators` found, in the terms of `Machine`."""

    operations: tuple[Operation, ...]
    call_seconds: float
    backward_call_seconds: float


@dataclass(frozen=True)
class _Chain:
    """`length` equal operators, each on what the one before gave (or beside it). work, backward_work: of one of them. inputs: want gradients."""

    work: float
    backward_work: float
    length: int
    inputs: tuple[Tensor, ...]
    run: Callable[[], tuple[Tensor, ...]]


def measure_operators(device: torch.device, *, seconds: float = OPERATOR_SECONDS) -> Operators:
    """Seconds of each kind of operator at a few sizes, forward and backward. seconds: about what it takes in all."""
    sizes = _LARGE if device.type == "cuda" else _SMALL
    dtypes = {True: (torch.float32, torch.bfloat16), False: (torch.float32,)}
    wanted: list[tuple[Kind, torch.dtype]] = [(kind, dtype) for kind in sizes for dtype in dtypes[kind in COUNTED_IN_FLOPS]]
    num_points = sum(len(sizes[kind]) for kind, _ in wanted) + 1
    generator = torch.Generator(device=device).manual_seed(0)
    found: list[Operation] = []
    for kind, dtype in wanted:
        forward, backward, spreads = [], [], [0.0, 0.0]
        for size in sizes[kind]:
            chain = _CHAINS[kind](size, lambda *shape, dtype=dtype: _normal(shape, dtype, device, generator))
            (ahead, spread), (back, back_spread) = _time_chain(chain, device, seconds / num_points)
            forward.append((chain.work, ahead))
            backward.append((chain.backward_work, back))
            spreads = [max(spreads[0], spread), max(spreads[1], back_spread)]
        name = str(dtype).removeprefix("torch.")
        for is_backward, points in ((False, forward), (True, backward)):
            found.append(Operation(kind=kind, dtype=name, backward=is_backward, points=_rising(points), spread=round(spreads[is_backward], 4)))
    (call, _), (backward_call, _) = _time_chain(_views(device), device, seconds / num_points)
    return Operators(operations=tuple(found), call_seconds=call, backward_call_seconds=backward_call)


def machine_of(operators: Operators, links: Sequence[Link], device: torch.device, *, cores: int) -> Machine:
    """The machine this process runs on, with what was measured on it."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        kind, model, devices, memory = "cuda", str(properties.name), torch.cuda.device_count(), int(properties.total_memory)
    else:
        kind, model, devices, memory = "cpu", _processor(), 1, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(
        name=platform.node() or "unnamed",
        device=kind,
        model=model,
        devices=devices,
        cores=cores,
        threads=torch.get_num_threads(),
        memory_bytes=memory,
        measured_at=time.time(),
        call_seconds=operators.call_seconds,
        backward_call_seconds=operators.backward_call_seconds,
        operations=operators.operations,
        links=tuple(links),
    )


def machine_file(device: str) -> Path:
    """Where this machine's measurements lie unless another place is named; one file for each kind of device."""
    return Path.home() / ".cache" / "meshloom" / "machines" / f"{platform.node() or 'unnamed'}-{device}.json"


def measure_links(group: Group, device: torch.device, *, seconds: float = LINK_SECONDS) -> tuple[Link, ...]:
    """Seconds of each collective of `group`, which all its ranks measure together. Each rank gets what it saw; rank 0's is used."""
    links: list[Link] = []
    for collective in COLLECTIVES:
        measured: list[tuple[float, float]] = []
        for num_bytes in MESSAGE_BYTES:
            count = num_bytes // 4 // group.size * group.size  # elements, the same for each rank
            operate = _collective(collective, group, count, device)
            operate()
            _wait_for_all(group, device)
            took = _once(operate, device)
            # All ranks must agree how often: rank 0's first measurement decides.
            runs = _agreed_runs(group, seconds / len(COLLECTIVES) / len(MESSAGE_BYTES) / max(took, 1e-6), device)
            measured.append(
                (count * 4, _typical([_once(operate, device) for _ in range(runs)])[0] / _PER_CALL.get(collective, lambda _: 1)(group.size))
            )
        links.append(fit_link(collective, group.size, measured))
    return tuple(links)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor() or platform.machine())


# --- Operators


def _time_chain(chain: _Chain, device: torch.device, seconds: float) -> tuple[tuple[float, float], tuple[float, float]]:
    """Forward's and backward's (seconds, spread) per operator of the chain. The first run, which warms up, does not count."""
    ahead: list[float] = []
    back: list[float] = []
    deadline = math.inf
    while len(ahead) <= RUNS[0] or (len(ahead) <= RUNS[1] and time.perf_counter() < deadline):
        started = _now(device)
        outputs = chain.run()
        middle = _now(device)
        gradients = [torch.ones_like(each) for each in outputs]
        before = _now(device)
        torch.autograd.grad(outputs, chain.inputs, gradients)
        ended = _now(device)
        ahead.append((middle - started) / chain.length)
        back.append((ended - before) / chain.length)
        if len(ahead) == 1:
            deadline = time.perf_counter() + seconds
        del outputs, gradients
    return _typical(ahead[1:]), _typical(back[1:])


def _typical(values: Sequence[float]) -> tuple[float, float]:
    """The lower quartile, and how far above it the median lies. What else runs on the machine only adds time, and that is not the operator's."""
    ordered = sorted(values)
    low = ordered[len(ordered) // 4]
    return low, statistics.median(ordered) / low - 1


def _rising(points: Iterable[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """More work takes no less time: where noise says otherwise, the smaller work gets the shorter time of the larger one.

    >>> _rising([(1, 2.0), (10, 1.0), (100, 5.0)])
    ((1, 1.0), (10, 1.0), (100, 5.0))
    """
    result: list[tuple[float, float]] = []
    for work, seconds in reversed(list(points)):
        result.append((work, min(seconds, result[-1][1]) if result else seconds))
    return tuple(reversed(result))


def _normal(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, device=device).to(dtype).requires_grad_()


Make = Callable[..., Tensor]  # a tensor of that shape that wants a gradient
Step = Callable[[Tensor, int], Tensor]  # one operator of a chain: on what, and its number


def _matmul(size: tuple[int, ...], make: Make) -> _Chain:
    rows, width, length = size
    x, weights = make(rows, width), [_weight(make, width, width) for _ in range(length)]
    flops = 2 * rows * width * width
    return _chain(flops, 2 * flops, length, x, weights, lambda value, number: F.linear(value, weights[number]))


def _attention(size: tuple[int, ...], make: Make) -> _Chain:
    batch, heads, tokens, width, length = size
    query, key, value = (make(batch, heads, tokens, width) for _ in range(3))
    flops = 4 * batch * heads * tokens * tokens * width  # two products; backward has five
    return _chain(flops, 2.5 * flops, length, query, [key, value], lambda each, _: F.scaled_dot_product_attention(each, key, value, is_causal=True))


def _convolution(size: tuple[int, ...], make: Make) -> _Chain:
    batch, channels, side, length = size
    x, weights = make(batch, channels, side, side), [_weight(make, channels, channels, 3, 3) for _ in range(length)]
    flops = 2 * batch * channels * channels * 9 * side * side
    return _chain(flops, 2 * flops, length, x, weights, lambda each, number: F.conv2d(each, weights[number], padding=1))


def _elementwise(size: tuple[int, ...], make: Make) -> _Chain:
    count, length = size
    other = make(count).detach()
    x = make(count)
    return _chain(3 * x.nbytes, 3 * x.nbytes, length, x, [], lambda each, _: each * other)


def _activation(size: tuple[int, ...], make: Make) -> _Chain:
    count, length = size
    x = make(count)
    return _chain(2 * x.nbytes, 3 * x.nbytes, length, x, [], lambda each, _: F.gelu(each))


def _normalization(size: tuple[int, ...], make: Make) -> _Chain:
    rows, width, length = size
    x, weights = make(rows, width), [make(width) for _ in range(length)]
    return _chain(2 * x.nbytes, 3 * x.nbytes, length, x, weights, lambda each, number: F.layer_norm(each, (width,), weights[number]))


def _softmax(size: tuple[int, ...], make: Make) -> _Chain:
    rows, width, length = size
    x = make(rows, width)
    return _chain(2 * x.nbytes, 3 * x.nbytes, length, x, [], lambda each, _: torch.log_softmax(each, -1))


def _reduction(size: tuple[int, ...], make: Make) -> _Chain:
    rows, width, length = size
    inputs = tuple(make(rows, width) for _ in range(length))
    return _Chain(inputs[0].nbytes, inputs[0].nbytes, length, inputs, lambda: tuple(each.mean(-1) for each in inputs))


def _gather(size: tuple[int, ...], make: Make) -> _Chain:
    tokens, width, length = size
    tables = tuple(make(4 * tokens, width) for _ in range(length))
    rows = torch.arange(tokens, device=tables[0].device) * 7 % (4 * tokens)
    picked = tokens * width * tables[0].element_size()
    # Forward reads and writes the rows; backward reads theirs, clears the table's gradient, and writes into it.
    return _Chain(2 * picked, picked + tables[0].nbytes, length, tables, lambda: tuple(F.embedding(rows, each) for each in tables))


def _views(device: torch.device) -> _Chain:
    x = torch.zeros(8, 8, device=device, requires_grad=True)
    return _chain(1, 1, 64, x, [], lambda each, _: each.transpose(0, 1))


def _weight(make: Make, *shape: int) -> Tensor:
    """Keeps the size of what it is applied to."""
    return (make(*shape) / math.prod(shape[1:]) ** 0.5).detach().requires_grad_()


def _chain(work: float, backward: float, length: int, start: Tensor, weights: list[Tensor], step: Step) -> _Chain:
    def run() -> tuple[Tensor]:
        value = start
        for number in range(length):
            value = step(value, number)
        return (value,)

    return _Chain(work, backward, length, (start, *weights), run)


_CHAINS: dict[Kind, Callable[[tuple[int, ...], Make], _Chain]] = {
    "matmul": _matmul,
    "attention": _attention,
    "convolution": _convolution,
    "elementwise": _elementwise,
    "activation": _activation,
    "normalization": _normalization,
    "softmax": _softmax,
    "reduction": _reduction,
    "gather": _gather,
}

# Sizes of each kind, small to large; the last number is the length of the chain.
_Sizes = dict[Kind, tuple[tuple[int, ...], ...]]
_SMALL: _Sizes = {  # a core: from what costs a call to some ten milliseconds
    "matmul": ((8, 16, 8), (64, 64, 8), (128, 256, 4), (512, 384, 2), (512, 1024, 1)),
    "attention": ((1, 1, 16, 32, 4), (2, 4, 64, 64, 2), (2, 6, 256, 64, 1)),
    "convolution": ((1, 8, 8, 4), (2, 32, 16, 2), (4, 64, 32, 1)),
    "elementwise": ((256, 16), (1 << 14, 8), (1 << 18, 4), (1 << 21, 2)),
    "activation": ((256, 16), (1 << 14, 8), (1 << 17, 4), (1 << 20, 1)),
    "normalization": ((4, 64, 8), (64, 256, 8), (512, 512, 2), (1024, 1024, 1)),
    "softmax": ((4, 64, 8), (64, 256, 8), (512, 512, 2), (512, 2048, 1)),
    "reduction": ((4, 64, 8), (64, 256, 8), (512, 512, 2), (1024, 1024, 1)),
    "gather": ((16, 64, 4), (256, 256, 2), (1024, 512, 1)),
}
_LARGE: _Sizes = {  # a GPU: up to some milliseconds
    "matmul": ((64, 64, 16), (512, 512, 16), (2048, 2048, 8), (8192, 4096, 2), (8192, 8192, 1)),
    "attention": ((1, 4, 64, 64, 16), (4, 16, 512, 64, 8), (4, 16, 2048, 64, 2)),
    "convolution": ((1, 16, 16, 16), (16, 64, 56, 8), (32, 256, 56, 2)),
    "elementwise": ((256, 32), (1 << 20, 16), (1 << 24, 8), (1 << 27, 2)),
    "activation": ((256, 32), (1 << 20, 16), (1 << 24, 8), (1 << 27, 2)),
    "normalization": ((4, 64, 16), (1024, 1024, 16), (8192, 2048, 8), (16384, 4096, 2)),
    "softmax": ((4, 64, 16), (1024, 1024, 16), (8192, 2048, 8), (4096, 32768, 1)),
    "reduction": ((4, 64, 16), (1024, 1024, 16), (8192, 2048, 8), (16384, 4096, 2)),
    "gather": ((16, 64, 8), (2048, 1024, 4), (16384, 2048, 1)),
}


# --- Links


def _collective(collective: Collective, group: Group, count: int, device: torch.device) -> Callable[[], Any]:
    """Does it once, each rank handing in `count` float32 elements; what has a direction goes round, so that no rank runs ahead."""
    tensor, size = torch.zeros(count, device=device), group.size
    if collective == "all_reduce":
        return lambda: group.all_reduce(tensor).wait()
    if collective == "all_gather":
        gathered = torch.empty(size * count, device=device)
        return lambda: group.all_gather(gathered, tensor).wait()
    if collective == "reduce_scatter":
        part = torch.empty(count // size, device=device)
        return lambda: group.reduce_scatter(part, tensor).wait()
    if collective == "all_to_all":
        received = torch.empty(count, device=device)
        shares = [count // size] * size
        return lambda: group.all_to_all(received, tensor, shares, shares).wait()
    if collective == "broadcast":
        return lambda: [group.broadcast(tensor, source).wait() for source in range(size)]

    def ping_pong() -> None:
        """Rank 0 and rank 1 only."""
        if group.rank == 0:
            group.send(tensor, 1).wait()
            group.recv(tensor, 1).wait()
        elif group.rank == 1:
            group.recv(tensor, 0).wait()
            group.send(tensor, 0).wait()

    return ping_pong


_PER_CALL: dict[Collective, Callable[[int], int]] = {"broadcast": lambda size: size, "send": lambda _: 2}


def _agreed_runs(group: Group, wanted: float, device: torch.device) -> int:
    runs = torch.tensor([min(max(wanted, RUNS[0]), RUNS[1])], dtype=torch.float32, device=device)
    group.broadcast(runs, 0).wait()
    return int(runs.item())


def _wait_for_all(group: Group, device: torch.device) -> None:
    group.barrier().wait()
    _now(device)


def _once(operate: Callable[[], Any], device: torch.device) -> float:
    started = _now(device)
    operate()
    return _now(device) - started


def _now(device: torch.device) -> float:
    """Seconds, when all that was asked of the device has been done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
