"""LiveSequences: table of the sequences without a terminal message yet, each in one attempt."""

from __future__ import annotations

from typing import NamedTuple

from detokenizer_proc.clients import ConnectedClient
from detokenizer_proc.text_stream import TextStream
from runtime.wire.handle import sequence_key


class Live(NamedTuple):
    """A sequence without a terminal message yet."""

    stream: TextStream
    client: ConnectedClient
    place: bytes = b""
    """Content of its place in the roster while it is in hand; empty if nothing is shown."""


class LiveSequences:
    def __init__(self) -> None:
        self.by_handle: dict[bytes, Live] = {}
        """The sequences by handle, to be read only."""
        self._handle_of: dict[bytes, bytes] = {}
        """Handle of the live attempt by sequence key."""

    def __len__(self) -> int:
        return len(self.by_handle)

    def attempt_of(self, handle: bytes) -> bytes | None:
        """Return the handle of the live attempt of the same sequence; None if there is none."""
        return self._handle_of.get(sequence_key(handle))

    def add(self, live: Live) -> None:
        """Add the only live attempt of a sequence."""
        handle = live.stream.handle
        self.by_handle[handle] = live
        self._handle_of[sequence_key(handle)] = handle
        live.client.handles.add(handle)

    def remove(self, handle: bytes) -> None:
        """Remove a sequence. No effect if it is not there."""
        live = self.by_handle.pop(handle, None)
        if live is not None:
            live.client.handles.discard(handle)
            del self._handle_of[sequence_key(handle)]
