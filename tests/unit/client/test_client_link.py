"""carousel.client.connection.lane: what a connection that was lost leaves to see."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from zmq.auth.thread import ThreadAuthenticator

from carousel.client.connection.lane import Link, TokenizerOutbox
from carousel.client.connection.target import RunDirTarget
from runtime.wire.messages import ToTokenizer
from runtime.wire.transport import MessageCodec
from tests.harness.ring.launched import wait_until

WAIT_S = 20.0
NUM_INTERRUPTIONS = 500
FIRST_S = 1e-4
MAX_CALLS = 100_000


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(linger=0)


def listen(context: zmq.Context[Any], port: int = 0) -> tuple[zmq.Socket[Any], int]:
    """A ROUTER at a port, as soon as that is free."""
    socket = context.socket(zmq.ROUTER)
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            socket.bind(f"tcp://127.0.0.1:{port or '*'}")
        except zmq.ZMQError:
            assert time.monotonic() < deadline
            time.sleep(0.005)
            continue
        return socket, int(socket.last_endpoint.rpartition(b":")[2])


def test_a_connection_that_stands_again_before_anybody_looked_was_lost_all_the_same(
    context: zmq.Context[Any],
) -> None:
    """The other end takes the new one for somebody else, who has to introduce himself."""
    first, port = listen(context)
    dealer = context.socket(zmq.DEALER)
    address = f"tcp://127.0.0.1:{port}"
    link = Link(dealer, address)
    dealer.connect(address)
    dealer.send(b"hello")
    assert first.poll(int(WAIT_S * 1000))
    assert not link.was_lost
    first.close(linger=0)
    second, _ = listen(context, port)
    deadline = time.monotonic() + WAIT_S
    while not second.poll(10):  # what was sent before the loss was noticed has gone with the connection
        assert time.monotonic() < deadline
        dealer.send(b"hello again")
    assert not link.is_lost
    assert link.was_lost
    link.forgive()
    assert not link.was_lost
    link.close()
    for socket in (dealer, second):
        socket.close(linger=0)


class Keys:
    """Decides who is let in."""

    are_read = False

    def callback(self, domain: str, key: bytes) -> bool:
        return self.are_read


@pytest.mark.parametrize("kind", [zmq.PUSH, zmq.DEALER])
def test_a_connection_that_was_refused_is_made_again_only_when_we_ask(
    context: zmq.Context[Any], kind: int
) -> None:
    """A server may read a client's key later than the client connects, each of its processes for itself."""
    authenticator, keys = ThreadAuthenticator(context), Keys()
    authenticator.start()
    authenticator.configure_curve_callback(domain="test", credentials_provider=keys)
    server = context.socket(zmq.ROUTER if kind == zmq.DEALER else zmq.PULL)
    server.curve_server = True
    public, server.curve_secretkey = zmq.curve_keypair()
    server.setsockopt_string(zmq.ZAP_DOMAIN, "test")
    server.bind("tcp://127.0.0.1:*")
    address = server.last_endpoint.decode()
    client = context.socket(kind)
    client.curve_publickey, client.curve_secretkey = zmq.curve_keypair()
    client.curve_serverkey = public
    link = Link(client, address)
    client.connect(address)
    wait_until(lambda: link.was_lost, WAIT_S, "it is refused")
    assert not link.stands
    assert link.forgive()
    keys.are_read = True
    link.retry()
    wait_until(lambda: link.stands, WAIT_S, "it is let in")
    link.retry()  # asks for nothing: it stands
    client.send(b"x", zmq.NOBLOCK)
    assert server.poll(int(WAIT_S * 1000))
    assert not link.was_lost
    link.close()
    for socket in (client, server):
        socket.close(linger=0)
    authenticator.stop()


class Interrupted(Exception):
    pass


def interrupt(*_: object) -> None:
    raise Interrupted


def test_a_caller_who_is_interrupted_while_it_sends_leaves_the_socket_to_others(
    context: zmq.Context[Any], tmp_path: Path
) -> None:
    """By Ctrl-C in a notebook, say, whose client is used further. The I/O thread waits for the socket."""
    codec = MessageCodec(ToTokenizer, 0)
    outbox = TokenizerOutbox(context, RunDirTarget(tmp_path), "inproc://tokenizer", codec)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        assert outbox.try_send()
        num_missed = 0
        for number in range(NUM_INTERRUPTIONS):
            with contextlib.suppress(Interrupted):
                signal.setitimer(signal.ITIMER_REAL, FIRST_S + number % 50 * 1e-6)
                for _ in range(MAX_CALLS):  # a destructor that is interrupted swallows it
                    outbox.send_now()
                signal.setitimer(signal.ITIMER_REAL, 0)
                num_missed += 1
            assert not outbox.is_in_use, number
        assert outbox.send_now()
        assert num_missed < NUM_INTERRUPTIONS / 2
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
