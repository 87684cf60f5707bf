"""Format and StreamFormat: what an endpoint gives Generation to spell its answers with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from carousel.client.core.result import Completion, Delta
from runtime.base.errors import RequestError


class Format(Protocol):
    """Spelling of an endpoint's answers."""

    @property
    def is_parsed(self) -> bool:
        """True if the text of an answer is parsed, for calls or reasoning, and not only copied."""

    def pieces(self, completions: Sequence[Completion]) -> Iterable[bytes]:
        """Yield the body of an answer that is not streamed, in pieces. Each is made when it is asked for,
        with a few milliseconds' work. Only the first, which may be made in another thread, takes longer, and
        only it fails: later ones are made while the answer is written.
        """


class StreamFormat(Format, Protocol):
    """Format of an endpoint that can stream."""

    def events(self, prompt: int, delta: Delta) -> Iterable[bytes]:
        """Yield events for a delta of the prompt's sequences, if there is anything to send. Large ones come
        in several items. Each item is made when it is asked for, with a few milliseconds' work. An item
        without bytes is work that has no event yet.
        """

    @property
    def done(self) -> bytes:
        """Return the event that ends a stream without an error; empty for none."""

    @property
    def keeps_open(self) -> bytes:
        """Return the line, without a meaning, that keeps a connection open until there is another event."""

    def last_events(self) -> bytes:
        """Return the events after the end of all sequences, except `done`."""

    def failure_events(self, error: RequestError) -> Iterable[bytes]:
        """Yield the events that end a stream that has begun and failed, in pieces as `events`."""

    @property
    def num_kept_bytes(self) -> int:
        """Number of bytes of logprobs that it keeps, because later events have them, too."""

    @property
    def write_cost(self) -> int:
        """Cost of a byte of a large event, in bytes that are only written."""
