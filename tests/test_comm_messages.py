"""The format of messages between peers: what is written is read again, anything else is refused, and tensors
are not copied."""

from __future__ import annotations

import pytest
import torch
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshloom.comm.messaging.sockets import receive, send
from meshloom.comm.messaging.wire_format import (
    DTYPES,
    Buffer,
    FrameLimits,
    Header,
    TensorSpec,
    read_frames,
    read_header,
    write_frames,
    write_header,
)
from meshloom.core.errors import MessageError

LIMITS = FrameLimits(kinds=frozenset(range(1 << 16)), num_tensors=4, tensor_bytes=1 << 20)
counters = st.integers(0, 2**64 - 1)
headers = st.builds(
    Header,
    kind=st.integers(0, 2**16 - 1),
    worker=st.integers(0, 2**32 - 1),
    sequence=counters,
    answers=counters,
    step=counters,
    version=counters,
)
shapes = st.lists(st.integers(0, 9), max_size=5).map(tuple)
described = st.builds(TensorSpec, dtype=st.sampled_from(list(DTYPES.values())), shape=shapes)
descriptions = st.lists(described, max_size=4)


def test_a_header_byte_by_byte():
    """Written down once by hand: what travels does not change unnoticed."""
    header = Header(kind=0x0102, worker=3, sequence=4, answers=5, step=6, version=2**64 - 1)
    expected = (
        b"MLM\n"
        + b"\1\0"
        + b"\x02\x01"
        + b"\3\0\0\0"
        + b"\2\0\0\0"
        + b"".join(number.to_bytes(8, "little") for number in (4, 5, 6, 2**64 - 1))
    )
    # float32 [2, 3]
    expected += (
        bytes([2, 2]) + (24).to_bytes(8, "little") + (2).to_bytes(8, "little") + (3).to_bytes(8, "little")
    )
    expected += bytes([15, 0]) + (1).to_bytes(8, "little")  # bool []
    tensors = [TensorSpec(dtype=torch.float32, shape=(2, 3)), TensorSpec(dtype=torch.bool, shape=())]
    assert write_header(header, tensors) == expected


@given(header=headers, tensors=descriptions)
@pytest.mark.long
def test_headers_are_read_as_they_were_written(header: Header, tensors: list[TensorSpec]):
    assert read_header(write_header(header, tensors), LIMITS) == (header, tensors)


@given(header=headers, tensors=descriptions, data=st.data())
@pytest.mark.long
def test_a_header_that_is_cut_off_or_goes_on_is_refused(
    header: Header, tensors: list[TensorSpec], data: st.DataObject
):
    written = write_header(header, tensors)
    for length in range(len(written)):
        with pytest.raises(MessageError):
            read_header(written[:length], LIMITS)
    with pytest.raises(MessageError):
        read_header(written + data.draw(st.binary(min_size=1, max_size=200)), LIMITS)


@pytest.mark.long
@given(header=headers, tensors=descriptions, data=st.data())
@settings(max_examples=300)
def test_bytes_have_one_meaning_or_none(header: Header, tensors: list[TensorSpec], data: st.DataObject):
    changed = bytearray(write_header(header, tensors))
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    refused_or_the_same(bytes(changed))


@given(st.binary(max_size=400), st.booleans())
@settings(max_examples=300)
@pytest.mark.long
def test_random_bytes_are_refused_or_have_one_meaning(text: bytes, begins_well: bool):
    refused_or_the_same(write_header(Header(kind=1), [])[:8] + text if begins_well else text)


def refused_or_the_same(text: bytes) -> None:
    try:
        header, tensors = read_header(text, LIMITS)
    except MessageError:
        return
    assert write_header(header, tensors) == text
    assert len(tensors) <= LIMITS.num_tensors and all(
        each.num_bytes <= LIMITS.tensor_bytes for each in tensors
    )


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3, 4)], ids=str)
@pytest.mark.every
def test_tensors_arrive_bit_by_bit(dtype: torch.dtype, shape: tuple[int, ...]):
    sent = random_bits(dtype, shape)
    header, [received] = over_inproc(Header(kind=7, version=9), [sent])
    assert header == Header(kind=7, version=9)
    assert received.dtype == dtype and received.shape == sent.shape
    assert torch.equal(received.reshape(-1).view(torch.uint8), sent.reshape(-1).view(torch.uint8))


def test_views_arrive_as_what_they_show():
    base = torch.arange(24, dtype=torch.float64).reshape(4, 6)
    values = torch.complex(base[0], base[1])
    sent = [base.T, base[:, ::2], values.conj(), torch.ones(2, requires_grad=True)]
    _, received = over_inproc(Header(kind=1), sent)
    assert all(torch.equal(here, there) for here, there in zip(sent, received, strict=True))
    assert not any(each.requires_grad for each in received)


def test_tensors_travel_and_arrive_in_the_memory_they_lie_in():
    """Within a process ZeroMQ hands over messages by address, so that any copy of this side would be seen."""
    sent = torch.randn(100_000)
    _, [received] = over_inproc(Header(kind=1), [sent])
    assert received.data_ptr() == sent.data_ptr()
    slice_of_it = sent[1000:99_000]
    _, [received] = over_inproc(Header(kind=1), [slice_of_it])
    assert received.data_ptr() == slice_of_it.data_ptr()


def test_what_arrives_may_be_written_to_and_lives_as_long_as_it_is_used():
    _, received = over_inproc(Header(kind=1), [torch.arange(1000.0), torch.arange(3)])
    received[0].add_(1)
    assert torch.equal(received[0], torch.arange(1.0, 1001.0)) and torch.equal(received[1], torch.arange(3))


def test_elements_in_odd_places_are_moved():
    memory = bytearray(8 * 5 + 1)
    start = 1 if torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % 2 == 0 else 0
    memory[start : start + 40] = bytes(torch.arange(5.0, dtype=torch.float64).numpy().tobytes())
    header = write_header(Header(kind=1), [TensorSpec(dtype=torch.float64, shape=(5,))])
    _, [received] = read_frames([header, memoryview(memory)[start : start + 40]], LIMITS)
    assert received.data_ptr() % 8 == 0 and torch.equal(received, torch.arange(5.0, dtype=torch.float64))


FOUR_FLOATS = write_header(Header(kind=1), [TensorSpec(dtype=torch.float32, shape=(4,))])


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        ([], "without a header"),
        ([FOUR_FLOATS], "0 tensors whose header describes 1"),
        ([FOUR_FLOATS, bytearray(16), bytearray(16)], "2 tensors whose header describes 1"),
        ([FOUR_FLOATS, bytearray(15)], "15 bytes whose header says 16"),
        (
            [write_header(Header(kind=1), [TensorSpec(dtype=torch.bool, shape=(2,))]), bytearray([1, 2])],
            "neither 0 nor 1",
        ),
        ([b"PK\3\4" + FOUR_FLOATS[4:]], "not of meshloom"),
        ([FOUR_FLOATS[:4] + b"\2\0" + FOUR_FLOATS[6:]], "of format 2"),
        (
            [write_header(Header(kind=1), [TensorSpec(dtype=torch.int8, shape=())] * 5)],
            "5 tensors; 4 are expected",
        ),
        (
            [write_header(Header(kind=1), [TensorSpec(dtype=torch.int8, shape=(1 << 20, 2))])],
            "2097152 bytes; 1048576 are expected",
        ),
        (
            [write_header(Header(kind=1), [TensorSpec(dtype=torch.int8, shape=(0, 1 << 40, 1 << 40))])],
            "which no memory could hold",
        ),
    ],
)
def test_malformed_messages_are_refused_with_the_reason(frames: list[Buffer], why: str):
    with pytest.raises(MessageError, match=why):
        read_frames(frames, LIMITS)


def test_kinds_that_are_not_expected_are_refused_both_ways():
    limits = FrameLimits(kinds=frozenset({1, 2}), num_tensors=0, tensor_bytes=0)
    with pytest.raises(MessageError, match="kind 3; known are 1, 2"):
        write_frames(Header(kind=3), [], limits)
    with pytest.raises(MessageError, match="kind 3; known are 1, 2"):
        read_frames([write_header(Header(kind=3), [])], limits)


def test_what_cannot_travel_is_said_before_it_does():
    for tensor, why in [
        (torch.empty(1, device="meta"), "on the CPU"),
        (torch.eye(2).to_sparse(), "dense tensors"),
        (torch.empty(1 << 18, dtype=torch.float64), "in slices"),
        (torch.zeros([1] * 17), "17 dims"),
    ]:
        with pytest.raises(MessageError, match=why):
            write_frames(Header(kind=1), [tensor], LIMITS)
    with pytest.raises(MessageError, match="sequence=-1"):
        Header(kind=1, sequence=-1)
    with pytest.raises(MessageError, match="kind=65536"):
        Header(kind=1 << 16)
    with pytest.raises(MessageError, match="num_tensors=65536"):
        FrameLimits(kinds=frozenset(), num_tensors=1 << 16, tensor_bytes=0)


def random_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, dtype=torch.bool)
    return (
        torch.randint(0, 256, (torch.Size(shape).numel() * dtype.itemsize,), dtype=torch.uint8)
        .view(dtype)
        .reshape(shape)
    )


def over_inproc(header: Header, tensors: list[Tensor]) -> tuple[Header, list[Tensor]]:
    with zmq.Context() as context, context.socket(zmq.PAIR) as here, context.socket(zmq.PAIR) as there:
        here.bind("inproc://here")
        there.connect("inproc://here")
        send(here, write_frames(header, tensors, LIMITS))
        frames = receive(there, 9)
        assert frames is not None
        return read_frames([frame.buffer for frame in frames], LIMITS)
