"""Every message of an asynchronous run comes back as it was sent; what is anything else is refused."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from meshloom.asynchronous.messaging.codec import (
    FROM_SERVERS,
    FROM_WORKERS,
    SLICE_BYTES,
    TO_SERVERS,
    TO_WORKERS,
    ServerState,
    decode,
    encode,
    limits_for,
)
from meshloom.asynchronous.messaging.handshake import Ask, Hello, RunDescription, Welcome, WorkerSeconds
from meshloom.asynchronous.protocol.messages import (
    Apply,
    Done,
    DropPush,
    Join,
    Leave,
    ParametersPart,
    Push,
    PushStaged,
    Restore,
    SendParameters,
    ServerReport,
    SnapshotKept,
    TakeSnapshot,
)
from meshloom.asynchronous.state.division import divide_over_servers
from meshloom.comm.messaging.wire_format import Header, TensorSpec, read_frames, write_frames
from meshloom.core.errors import JobError, MessageError

HOLDING = ServerState(
    slices=(
        TensorSpec(dtype=torch.float32, shape=(7,)),
        TensorSpec(dtype=torch.bfloat16, shape=(3,)),
        TensorSpec(dtype=torch.float64, shape=(0,)),
    ),
    buffers={
        "mean": TensorSpec(dtype=torch.float32, shape=(2, 3)),
        "count": TensorSpec(dtype=torch.int64, shape=()),
    },
)
ELSEWHERE = ServerState(slices=(TensorSpec(dtype=torch.complex64, shape=(5,)),), buffers={})
LIMITS = limits_for(FROM_WORKERS | TO_WORKERS | FROM_SERVERS | TO_SERVERS, [HOLDING, ELSEWHERE])
NUMBER, FLOAT = st.integers(0, 2**62), st.floats(allow_nan=False)


def tensor_of(described: TensorSpec) -> Tensor:
    return torch.arange(math.prod(described.shape)).reshape(described.shape).to(described.dtype)


def tensors(holding: ServerState, *, all_there: bool) -> st.SearchStrategy[dict[str, Any]]:
    def held(there: list[bool]) -> dict[str, Any]:
        slices = [
            tensor_of(each) if present else None for each, present in zip(holding.slices, there, strict=False)
        ]
        rest = there[len(holding.slices) :]
        buffers = {
            name: tensor_of(each)
            for (name, each), present in zip(holding.buffers.items(), rest, strict=False)
            if present
        }
        return {"slices": slices, "buffers": buffers if holding.buffers else None}

    count = len(holding.slices) + len(holding.buffers)
    return st.lists(st.just(True) if all_there else st.booleans(), min_size=count, max_size=count).map(held)


SIMPLE = [
    Ask,
    Done,
    Join,
    Leave,
    WorkerSeconds,
    Welcome,
    PushStaged,
    SnapshotKept,
    Apply,
    SendParameters,
    DropPush,
    Restore,
    Hello,
]


def simple(made: type) -> st.SearchStrategy[Any]:
    kinds = {"int": NUMBER, "float": FLOAT, "int | None": st.none() | NUMBER, "str": st.text()}
    return st.builds(made, **{each.name: kinds[str(each.type)] for each in fields(made)})


STATE = st.dictionaries(st.text(), NUMBER, max_size=4)
MESSAGES = st.one_of(
    *(simple(made) for made in SIMPLE),
    st.builds(RunDescription, plan=st.text(), facts=STATE, ports=st.lists(NUMBER, max_size=4)),
    st.builds(TakeSnapshot, version=NUMBER, state=STATE, forget_before=NUMBER),
    st.builds(
        ServerReport, server=NUMBER, next_share=NUMBER,
        snapshots=st.lists(st.tuples(NUMBER, STATE).map(list), max_size=4),
    ),
)  # fmt: skip


def sent(message: Any, holding: ServerState) -> Any:
    """Through the bytes of its frames."""
    frames = write_frames(*encode(message, holding), LIMITS)
    return decode(*read_frames([bytearray(frame) for frame in frames], LIMITS), holding)


@pytest.mark.long
@given(message=MESSAGES)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_what_is_sent_arrives(message: Any) -> None:
    assert sent(message, HOLDING) == message


@given(held=tensors(HOLDING, all_there=False), here=st.booleans())
@settings(max_examples=50, deadline=None, derandomize=True)
def test_gradients_arrive_with_what_is_not_there(held: dict[str, Any], here: bool) -> None:
    push = Push(
        worker=3,
        share=5,
        gradients=held["slices"],
        changes=held["buffers"],
        loss=0.5,
        norm=math.nan,
    )
    found = sent(push, HOLDING)
    assert (found.worker, found.share, found.loss, math.isnan(found.norm)) == (3, 5, 0.5, True)
    assert_same([*found.gradients, *found.changes.values()], [*push.gradients, *push.changes.values()])
    assert found.changes.keys() == push.changes.keys()


@pytest.mark.parametrize("holding", [HOLDING, ELSEWHERE])
def test_parameters_arrive(holding: ServerState) -> None:
    values = [tensor_of(each) for each in holding.slices]
    buffers = {name: tensor_of(each) for name, each in holding.buffers.items()} if holding.buffers else None
    part = ParametersPart(server=1, share=4, version=5, values=values, buffers=buffers)
    found = sent(part, holding)
    assert_same(found.values, values)
    assert (found.buffers is None) == (buffers is None)
    assert_same(list((found.buffers or {}).values()), list((buffers or {}).values()))


def assert_same(found: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for here, there in zip(found, expected, strict=True):
        assert (here is None) == (there is None)
        assert here is None or (there is not None and here.dtype == there.dtype and torch.equal(here, there))


def test_large_tensors_travel_in_slices_without_a_copy() -> None:
    elements = 5 * SLICE_BYTES // 8 + 3  # two and a half slices of float32
    holding = ServerState(slices=(TensorSpec(dtype=torch.float32, shape=(elements,)),), buffers={})
    gradient = torch.randn(elements)
    header, found = encode(
        Push(worker=0, share=0, gradients=[gradient], changes=None, loss=0.0, norm=0.0),
        holding,
    )
    assert [each.nbytes for each in found[2:-1]] == [
        SLICE_BYTES,
        SLICE_BYTES,
        gradient.nbytes - 2 * SLICE_BYTES,
    ]
    assert found[2].data_ptr() == gradient.data_ptr()
    assert len(found) <= holding.num_tensors
    assert torch.equal(decode(header, found, holding).gradients[0], gradient)


def push_of(held: dict[str, Any]) -> Push:
    return Push(
        worker=0,
        share=0,
        gradients=held["slices"],
        changes=held["buffers"],
        loss=0.0,
        norm=0.0,
    )


CHANGES = ("drop", "repeat", "dtype", "shape", "number", "kind", "header", "flag")


@pytest.mark.long
@given(
    message=st.one_of(MESSAGES, tensors(HOLDING, all_there=False).map(push_of)),
    change=st.sampled_from(CHANGES),
    at=st.integers(0, 20),
)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_what_is_changed_is_refused_or_is_another_message(message: Any, change: str, at: int) -> None:
    """Nothing but a `MessageError`, and whatever is read would be written as what was sent."""
    header, found = encode(message, HOLDING)
    at %= len(found)
    each = found[at]
    match change:
        case "drop":
            found = found[:at] + found[at + 1 :]
        case "repeat":
            found = [*found[:at], each, *found[at:]]
        case "dtype":
            found[at] = each.to(torch.int16)
        case "shape":
            found[at] = each.unsqueeze(0)
        case "number":
            found[0] = found[0] - 3
        case "kind":
            header = Header(kind=header.kind % 36 + 1)
        case "header":
            header = Header(kind=header.kind, step=1)
        case _:
            found[at] = each + 1 if each.dtype == torch.uint8 else each
    try:
        read = decode(header, found, HOLDING)
    except MessageError:
        return
    again, tensors_again = encode(read, HOLDING)
    assert again == header
    assert len(tensors_again) == len(found)
    assert all(torch.equal(a.reshape(-1), b.reshape(-1)) for a, b in zip(tensors_again, found, strict=True))


def test_what_no_message_can_carry_is_said_before_the_run() -> None:
    with pytest.raises(JobError, match="sends a RunDescription in 4194304 bytes"):
        encode(RunDescription(plan="dp=2", facts={"parameters": "a" * SLICE_BYTES}, ports=[1]))
    with pytest.raises(JobError, match="cannot carry"):
        ServerState.of([[]], {"gates": torch.empty(3, dtype=torch.float8_e4m3fnuz)})


def test_holdings_are_those_of_the_division() -> None:
    named = [("a", nn.Parameter(torch.zeros(5))), ("b", nn.Parameter(torch.zeros(3)))]
    holdings = ServerState.of(
        divide_over_servers(named, 2, whole=False), {"seen": torch.zeros(2, dtype=torch.int64)}
    )
    assert [[each.shape for each in holding.slices] for holding in holdings] == [[(4,)], [(1,), (3,)]]
    assert [list(holding.buffers) for holding in holdings] == [["seen"], []]
