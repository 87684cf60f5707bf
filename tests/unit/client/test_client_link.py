"""carousel.client.connection.lane: what a connection that was lost leaves to see."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from carousel.client.connection.lane import Link

WAIT_S = 20.0


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
    dealer.connect(f"tcp://127.0.0.1:{port}")
    link = Link(dealer)
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
