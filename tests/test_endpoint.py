"""Workers come and go at a server's address; who has no key, and what is no message, has no effect."""

from __future__ import annotations

import random
import socket
import threading
import time
from contextlib import suppress

import pytest
import torch
import zmq
from peers import (
    LIMITS,
    SERVER,
    WAIT_SECONDS,
    WORKER,
    dealer,
    is_lost,
    kinds_of,
    listening_ports,
    meet,
    poll_until,
    port_of,
    receive,
    say,
    server,
    slow_link,
    worker,
)

from meshloom.comm.messaging.connections import Connections
from meshloom.comm.messaging.endpoint import Endpoint
from meshloom.comm.messaging.keys import WorkerKey, make_keys
from meshloom.comm.messaging.sockets import Event, Joined, Lost, ReceivedMessage, SocketLimits
from meshloom.comm.messaging.wire_format import FrameLimits, Header, TensorSpec, write_header
from meshloom.core.errors import EndpointError, MessageError, PeerLostError


def test_messages_travel_both_ways_in_order():
    with server() as endpoint, worker(endpoint.address) as connections:
        [there] = meet(endpoint, connections)
        [here] = connections.peers
        sent = [[torch.randn(3, 4), torch.arange(number)] for number in range(5)]
        for number, tensors in enumerate(sent):
            connections.send(here, Header(kind=1, worker=7, sequence=number, step=2, version=1), tensors)
        for number, message in enumerate(receive(endpoint, 5)):
            assert message.peer == there and message.header == Header(
                kind=1, worker=7, sequence=number, step=2, version=1
            )
            assert all(torch.equal(*pair) for pair in zip(message.tensors, sent[number], strict=True))
            endpoint.send(there, Header(kind=2, answers=number), message.tensors[:1])
        for number, message in enumerate(receive(connections, 5)):
            assert message.peer == here and message.header == Header(kind=2, answers=number)
            assert torch.equal(message.tensors[0], sent[number][0])
        assert endpoint.refused.messages == connections.num_refused == 0


@pytest.mark.long
def test_a_tensor_of_100_megabytes():
    limits = FrameLimits(kinds=frozenset({1}), num_tensors=1, tensor_bytes=100_000_000)
    with server(limits=limits) as endpoint, worker(endpoint.address, limits=limits) as connections:
        meet(endpoint, connections)
        sent = torch.randint(-(2**62), 2**62, (12_500_000,))
        connections.send(1, Header(kind=1), [sent])
        [message] = receive(endpoint, 1)
        assert torch.equal(message.tensors[0], sent)


def test_several_workers_and_several_servers():
    with (
        server() as first,
        server() as second,
        worker(first.address, second.address) as one,
        worker(second.address, first.address) as other,
    ):
        happened = poll_until(
            lambda happened: all(len(events) == 2 for events in happened.values()), first, second, one, other
        )
        assert all(kinds_of(events) == ["Joined", "Joined"] for events in happened.values())
        assert list(one.peers.values()) == [first.address, second.address]
        assert list(other.peers.values()) == [second.address, first.address]
        for sequence, connections in enumerate([one, other]):
            for peer, address in connections.peers.items():
                connections.send(
                    peer,
                    Header(
                        kind=1,
                        worker=sequence,
                        sequence=port_of(first) if address == first.address else port_of(second),
                    ),
                )
        for endpoint in (first, second):
            messages = receive(endpoint, 2)
            assert {message.header.worker for message in messages} == {0, 1}
            assert {message.header.sequence for message in messages} == {port_of(endpoint)}
            assert {message.peer for message in messages} == endpoint.peers


def test_who_leaves_is_lost_on_the_other_side_after_its_last_words():
    with server() as endpoint:
        connections = worker(endpoint.address)
        meet(endpoint, connections)
        for sequence in range(5):
            connections.send(1, Header(kind=1, sequence=sequence), [torch.full((1000,), float(sequence))])
        connections.close()
        events = poll_until(lambda happened: is_lost(happened[endpoint]), endpoint)[endpoint]
        assert kinds_of(events) == ["ReceivedMessage"] * 5 + ["Lost"]
        assert [event.header.sequence for event in events if isinstance(event, ReceivedMessage)] == list(
            range(5)
        )
        assert not endpoint.peers
        with pytest.raises(PeerLostError, match="Peer 1 is gone"):
            endpoint.send(1, Header(kind=1))


def test_a_server_s_last_words_arrive():
    endpoint = server()
    with worker(endpoint.address) as connections:
        [there] = meet(endpoint, connections)
        for sequence in range(5):
            endpoint.send(there, Header(kind=1, sequence=sequence))
        endpoint.close()
        events = poll_until(lambda happened: is_lost(happened[connections]), connections)[connections]
        assert kinds_of(events) == ["ReceivedMessage"] * 5 + ["Lost"]
        with pytest.raises(PeerLostError, match="Connection 1 has ended"):
            connections.send(1, Header(kind=1))


@pytest.mark.long
def test_a_server_that_comes_back_is_found_and_gets_nothing_of_old_connections():
    endpoint = server()
    address = endpoint.address
    with worker(address) as connections:
        for life in range(1, 5):
            meet(endpoint, connections)
            assert list(connections.peers) == [life]
            for sequence in range(3):  # never read by this server, so never by another
                connections.send(life, Header(kind=1, sequence=sequence))
            if life % 2:
                endpoint.close()
                assert kinds_of(
                    poll_until(lambda happened: happened[connections], connections)[connections]
                ) == ["Lost"]
                endpoint = server(address)
            else:
                endpoint.close()
                endpoint = server(address)  # back before anybody has noticed
                assert kinds_of(
                    poll_until(lambda happened: happened[connections], connections)[connections]
                ) == ["Lost"]
        meet(endpoint, connections)
        connections.send(5, Header(kind=2))
        assert receive(endpoint, 1)[0].header.kind == 2
        endpoint.close()


@pytest.mark.long
def test_a_worker_waits_for_a_server_that_is_not_there_yet():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    with worker(address) as connections:
        assert connections.poll(0.5) == [] and not connections.peers
        with server(address) as endpoint:
            meet(endpoint, connections)


def test_a_thousand_connections_one_after_another_to_a_server_that_is_away():
    """A worker whose servers stayed away ended up in `context.term()` for ever: one connection in some thirty
    could not be watched, because the name of its monitor, made from an address in memory, was still in use by
    one before it, and what had been opened by then was never closed."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        away = f"127.0.0.1:{listener.getsockname()[1]}"
    with worker(away) as connections:
        [line] = connections._connections  # pyright: ignore[reportPrivateUsage]
        for _ in range(1000):
            line.look()  # makes a socket and a watch, and may see already that nobody listens
            line.end()
            line._turn = 0.0  # pyright: ignore[reportPrivateUsage]  # at once, not a fifth of a second later


def test_what_a_failed_connection_has_opened_does_not_keep_a_worker(monkeypatch: pytest.MonkeyPatch):
    def no_watch(*_: object) -> None:
        raise zmq.ZMQError(zmq.EADDRINUSE)

    connections = worker("127.0.0.1:9")
    monkeypatch.setattr("meshloom.comm.messaging.server_connection.ConnectionMonitor", no_watch)
    with pytest.raises(zmq.ZMQError):
        connections.poll(0.0)
    closing = threading.Thread(target=connections.close, args=(0.0,), daemon=True)
    closing.start()
    closing.join(WAIT_SECONDS)
    assert not closing.is_alive()


@pytest.mark.long
def test_a_connection_that_is_dropped_is_made_again():
    with server() as endpoint, worker(endpoint.address) as connections:
        meet(endpoint, connections)
        connections.drop(1)
        happened = poll_until(
            lambda happened: all(len(events) == 2 for events in happened.values()), endpoint, connections
        )
        assert happened[endpoint] == [Lost(1, "127.0.0.1"), Joined(2, "127.0.0.1")]
        assert happened[connections] == [Lost(1, endpoint.address), Joined(2, endpoint.address)]


def test_a_peer_that_is_dropped_is_not_heard_again():
    with server() as endpoint, worker(endpoint.address) as connections:
        meet(endpoint, connections)
        endpoint.drop(1)
        connections.send(1, Header(kind=1))
        assert endpoint.poll(0.0) == [Lost(1, "127.0.0.1")]
        deadline = time.monotonic() + WAIT_SECONDS
        while not endpoint.refused.messages and time.monotonic() < deadline:
            assert endpoint.poll(0.01) == []
        assert endpoint.refused.messages == 1 and not endpoint.peers


@pytest.mark.long
def test_what_waits_for_a_stuck_peer_is_bounded_and_arrives_once():
    """The peer's socket takes what its queue and the system's buffers take; the rest waits here, to the mark
    and no further."""
    patience = SocketLimits(queue_messages=3)
    tensor = torch.zeros(1 << 18)  # 1 MiB
    with server(patience=patience) as endpoint, worker(endpoint.address, patience=patience) as connections:
        [there] = meet(endpoint, connections)
        sent = 0
        with suppress(MessageError):
            for sent in range(100):
                endpoint.send(there, Header(kind=1, sequence=sent), [tensor])
                time.sleep(0.02)
        with pytest.raises(MessageError, match="3 messages"):
            endpoint.send(there, Header(kind=1), [tensor])
        assert 3 <= sent < 30  # two queues of 3, and what the system buffers: some MiB
        assert [message.header.sequence for message in receive(connections, sent)] == list(range(sent))
        endpoint.send(there, Header(kind=2), [tensor])
        assert receive(connections, 1)[0].header.kind == 2


@pytest.mark.slow
def test_slices_let_heartbeats_through_a_slow_link():
    """4 MB at 0.8 MB/s: as one tensor it takes longer than peers may be silent, and its connection ends; in
    slices it arrives."""
    patience = SocketLimits(lost_after_seconds=3.0)
    limits = FrameLimits(kinds=frozenset({1}), num_tensors=20, tensor_bytes=4_000_000)
    tensor = torch.randn(1_000_000)
    for slices in (1, 20):
        with (
            server(limits=limits, patience=patience) as endpoint,
            slow_link(port_of(endpoint), bytes_per_second=8e5) as address,
            worker(address, limits=limits, patience=patience) as connections,
        ):
            [there] = meet(endpoint, connections)
            connections.send(1, Header(kind=1), tensor.chunk(slices))
            [event, *_] = poll_until(
                lambda happened, endpoint=endpoint: happened[endpoint], endpoint, connections
            )[endpoint]
            if slices == 1:
                assert event == Lost(there, "127.0.0.1")
            else:
                assert isinstance(event, ReceivedMessage) and torch.equal(torch.cat(event.tensors), tensor)


# --- Keys


def refusal_of(endpoint: Endpoint, connections: Connections) -> str:
    with connections, pytest.raises(EndpointError) as refused:
        poll_until(lambda happened: any(happened.values()), endpoint, connections)
    return str(refused.value)


@pytest.mark.slow
def test_a_worker_without_the_job_s_key_is_refused():
    others_server, others = make_keys()
    forged = WorkerKey(public=others.public, secret=others.secret, servers_public=SERVER.public)
    server_itself = WorkerKey(public=SERVER.public, secret=SERVER.secret, servers_public=SERVER.public)
    with server() as endpoint, worker(endpoint.address) as member:
        meet(endpoint, member)
        for number, key in enumerate([forged, server_itself], start=1):
            assert "refuses this worker's key" in refusal_of(endpoint, worker(endpoint.address, key=key))
            assert endpoint.refused.keys == number
        assert "no server of this worker key's job" in refusal_of(
            endpoint, worker(endpoint.address, key=others)
        )
        assert endpoint.refused.keys == 2 and endpoint.refused.connections >= 5
        with Endpoint("127.0.0.1:0", others_server, LIMITS) as elsewhere:
            assert "no server of this worker key's job" in refusal_of(elsewhere, worker(elsewhere.address))
        member.send(1, Header(kind=1))
        assert kinds_of(endpoint.poll(WAIT_SECONDS)) == ["ReceivedMessage"] and endpoint.peers == {1}


def test_a_client_without_any_key_is_refused():
    with server() as endpoint, dealer(endpoint, keys=False) as client:
        client.send(write_header(Header(kind=1), []))
        deadline = time.monotonic() + WAIT_SECONDS
        while not endpoint.refused.connections and time.monotonic() < deadline:
            assert endpoint.poll(0.01) == []
        assert endpoint.refused.connections and not endpoint.refused.messages


# --- Bytes that are no messages


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.long
def test_random_bytes_at_the_port_have_no_effect(count: int):
    """Each is a connection of its own. Half of them begin as ZeroMQ's protocol does, with this or another
    mechanism."""
    draw = random.Random(1)
    greeting = b"\xff\0\0\0\0\0\0\0\1\x7f\3\0"
    with server() as endpoint, worker(endpoint.address) as member:
        meet(endpoint, member)
        events: list[Event] = []
        for number in range(count):
            begins = [
                b"",
                b"",
                greeting + b"CURVE".ljust(20, b"\0") + bytes(32),
                greeting + b"NULL".ljust(20, b"\0") + bytes(32),
            ][number % 4]
            say(endpoint, begins + draw.randbytes(draw.randrange(200)))
            if number % 50 == 0:
                events += endpoint.poll(0.0)
        deadline = time.monotonic() + WAIT_SECONDS
        while endpoint.refused.connections < count and time.monotonic() < deadline:
            events += endpoint.poll(0.01)
        assert endpoint.refused.connections == count and not endpoint.refused.messages and not events
        member.send(1, Header(kind=1, sequence=5))
        [message] = receive(endpoint, 1)
        assert message.header.sequence == 5 and endpoint.peers == {1}


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_random_frames_of_a_member_are_refused_and_counted(count: int):
    """Random frames, true messages that were cut off or went on, and tensors that are not as long as they
    say."""
    draw = random.Random(2)
    true = write_header(Header(kind=1), [TensorSpec(dtype=torch.float32, shape=(4,))])
    with server() as endpoint, worker(endpoint.address) as member, dealer(endpoint) as client:
        poll_until(lambda happened: len(endpoint.peers) == 2, endpoint, member)
        events: list[Event] = []
        for number in range(count):
            frames = [
                [draw.randbytes(draw.randrange(200)) for _ in range(draw.randrange(1, 60))],
                [true[: draw.randrange(len(true))], bytes(16)],
                [true, draw.randbytes(draw.choice([0, 15, 17, 1000]))],
                [true, bytes(16), b""],
                [b""],
            ][number % 5]
            while not client.poll(0, zmq.POLLOUT):
                events += endpoint.poll(0.01)
            client.send_multipart(frames)
        deadline = time.monotonic() + WAIT_SECONDS
        while endpoint.refused.messages < count and time.monotonic() < deadline:
            events += endpoint.poll(0.01)
        assert endpoint.refused.messages == count and not events, endpoint.refused
        [here] = member.peers
        member.send(here, Header(kind=1, sequence=5))
        client.send_multipart([true, bytes(16)])
        messages = receive(endpoint, 2)
        assert {message.header.sequence for message in messages} == {0, 5} and len(endpoint.peers) == 2


@pytest.mark.parametrize("begins", [b"\x06", b"\x02"], ids=["command", "message"])
def test_who_claims_an_enormous_frame_is_hung_up_on(begins: bytes):
    """Of 2^40 bytes, before any key was shown: nobody waits for it, and no memory is taken."""
    greeting = b"\xff\0\0\0\0\0\0\0\1\x7f\3\0" + b"CURVE".ljust(20, b"\0") + bytes(32)
    with server() as endpoint, socket.create_connection(("127.0.0.1", port_of(endpoint))) as client:
        client.sendall(greeting + begins + (1 << 40).to_bytes(8, "big"))
        began = time.monotonic()
        # before the handshake's time is over
        while not endpoint.refused.connections and time.monotonic() - began < WAIT_SECONDS / 2:
            assert endpoint.poll(0.01) == []
        assert endpoint.refused.connections == 1


def test_who_does_not_greet_is_not_heard():
    with server() as endpoint, dealer(endpoint, greets=False) as client:
        client.send(write_header(Header(kind=1), []))
        deadline = time.monotonic() + WAIT_SECONDS
        while not endpoint.refused.messages and time.monotonic() < deadline:
            assert endpoint.poll(0.01) == []
        assert endpoint.refused.messages == 1 and "nobody" in endpoint.refused.last


def test_a_frame_larger_than_any_expected_ends_its_connection_alone():
    with server() as endpoint, worker(endpoint.address) as member, dealer(endpoint) as client:
        poll_until(lambda happened: len(endpoint.peers) == 2, endpoint, member)
        client.send(bytes(LIMITS.frame_bytes + 10_000))
        events = poll_until(lambda happened: is_lost(happened[endpoint]), endpoint)[endpoint]
        assert kinds_of(events) == ["Lost"] and len(endpoint.peers) == 1
        member.send(next(iter(member.peers)), Header(kind=1))
        assert kinds_of(poll_until(lambda happened: happened[endpoint], endpoint)[endpoint])[0] in {
            "ReceivedMessage",
            "Joined",
        }


# --- Addresses


def test_nothing_listens_but_the_address_that_was_given():
    before = listening_ports()
    with server() as endpoint, worker(endpoint.address) as connections:
        meet(endpoint, connections)
        assert listening_ports() - before == {("127.0.0.1", port_of(endpoint))}
    assert listening_ports() == before


def test_names_and_addresses_of_the_other_kind():
    with server("localhost:0") as endpoint, worker(f"localhost:{port_of(endpoint)}") as connections:
        meet(endpoint, connections)
    try:
        endpoint = server("[::1]:0")
    except EndpointError:
        pytest.skip("this machine has no IPv6")
    with endpoint, worker(endpoint.address) as connections:
        assert endpoint.address.startswith("[::1]:")
        meet(endpoint, connections)
        assert ("::1", port_of(endpoint)) in listening_ports()


def test_addresses_that_cannot_be_are_said():
    with server() as endpoint:
        for address, why in [
            (endpoint.address, "in use"),
            ("192.0.2.1:0", "Cannot listen at 192.0.2.1:0"),
            ("127.0.0.1", "Write HOST:PORT"),
            ("127.0.0.1:70000", "Write HOST:PORT"),
            (":5000", "Write HOST:PORT"),
        ]:
            with pytest.raises(EndpointError, match=why):
                server(address)
    with pytest.raises(EndpointError, match="Write HOST:PORT"):
        worker("127.0.0.1:port")
    with pytest.raises(EndpointError, match="queue_messages=0"):
        SocketLimits(queue_messages=0)


# --- Coming and going


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_whoever_comes_and_goes_is_told_once_and_in_order(seed: int):
    """Descriptors of connections are used again and again, also while the server looks away."""
    draw = random.Random(seed)
    there: dict[int, list[Event]] = {}
    sent = 0

    def look(seconds: float) -> None:
        for event in endpoint.poll(seconds):
            there.setdefault(event.peer, []).append(event)

    with server() as endpoint:
        present: list[Connections] = []
        for _ in range(80):
            choice = draw.random()
            if choice < 0.4 and len(present) < 6:
                present.append(worker(endpoint.address))
            elif choice < 0.7 and present:
                present.pop(draw.randrange(len(present))).close(draw.choice([0.0, 1.0]))
            for each in present:
                for event in each.poll(0.0):
                    if isinstance(event, Joined):
                        sent += 1
                        each.send(event.peer, Header(kind=1, sequence=sent))
            if draw.random() < 0.5:
                look(draw.choice([0.0, 0.0, 0.02]))
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline and not (
            len(endpoint.peers) == len(present) == sum(len(each.peers) for each in present)
        ):
            look(0.02)
            for each in present:
                each.poll(0.0)
        look(0.1)
        assert len(endpoint.peers) == len(present), there
        for peer, events in there.items():
            kinds = kinds_of(events)
            assert kinds[0] == "Joined" and kinds.count("Joined") == 1, kinds
            assert kinds.count("Lost") == (peer not in endpoint.peers) and "Lost" not in kinds[:-1], kinds
        heard = [
            event.header.sequence
            for events in there.values()
            for event in events
            if isinstance(event, ReceivedMessage)
        ]
        assert len(heard) == len(set(heard)) <= sent
        for each in present:
            each.close()


def test_the_worker_s_key_is_what_is_asked_for():
    """The server knows workers by what their file holds, so that the file may be given to further workers of
    the job."""
    with server() as endpoint, worker(endpoint.address) as one, worker(endpoint.address, key=WORKER) as other:
        assert meet(endpoint, one, other) == [1, 2]
