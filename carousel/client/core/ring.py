"""Ring: interface of the connection to a ring, as a session uses it."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

from runtime.base.errors import CarouselError
from runtime.wire.messages import ToTokenizer


class Ring(Protocol):
    """Connection to the ring, as the session uses it. A request's number decides which tokenizer receives it
    and which detokenizer answers.
    """

    opened: Future[None]
    """Future that is resolved once all detokenizers have answered."""
    error: CarouselError | None
    """Reason why the connection has ended; None while it is open."""
    max_waiting: int
    """Maximum number of sequences that may wait in the ring. Like the following attributes, valid once
    `opened` is resolved.
    """
    client_ids: tuple[int, ...]
    """Client ids of the connection, one for each detokenizer."""
    run_dir: Path | None
    """The ring's run directory if it is on this machine; None over TCP."""

    @property
    def generation(self) -> int:
        """Number of restarts that were seen."""

    @property
    def has_room(self) -> bool:
        """Return True if the ring accepts requests, as far as is known."""

    def check_usable(self) -> None:
        """Raise the error with which any message would be refused, if there is one."""

    def client_of(self, number: int) -> int:
        """Return the client id with which the handles of this request start."""

    def lane_of(self, number: int) -> int:
        """Return the index of the detokenizer that answers this request."""

    def tokenizer_of(self, number: int) -> int:
        """Return the index of the tokenizer that receives this request."""

    def submit(self, message: ToTokenizer, number: int) -> None:
        """Send a message about request `number`, in order. Never blocks. Raises Overloaded if the server
        takes messages more slowly than they come, InvalidRequest if the message exceeds the bounds of the
        wire, and the connection's error if it has ended; nothing is then sent.
        """

    def resubmit(self, message: ToTokenizer, number: int) -> None:
        """Do what `submit` does, but never refuse for lack of room: resubmitted requests are bounded by those
        that were accepted.
        """

    def abort(self, handles: tuple[bytes, ...], number: int) -> None:
        """Abort these sequences of request `number`. Never refused, because aborts are bounded by accepted
        requests.
        """

    def abort_all(self) -> None:
        """Abort everything of this connection."""

    def close(self) -> None:
        """Send waiting messages within a moment, and end. May be called again."""
