"""EventParser: turns the bytes from a socket into the data of server-sent events."""

from __future__ import annotations


class EventParser:
    """Incremental parser: an event may be split anywhere, and several may come at once. Lines end in LF or
    CRLF.
    """

    __slots__ = ("_data", "_tail")

    def __init__(self) -> None:
        self._tail = b""
        self._data: list[bytes] = []

    def feed(self, received: bytes) -> list[bytes]:
        """Return the data of all events that are complete now, in order."""
        # Nearly always a chunk is one whole event of one line, and needs no splitting.
        if (
            received.startswith(b"data: ")
            and received.find(b"\n") == len(received) - 2
            and received.endswith(b"\n\n")
            and not self._tail
            and not self._data
        ):
            return [received[6:-2].removesuffix(b"\r")]
        lines = (self._tail + received).split(b"\n")
        self._tail = lines.pop()
        events: list[bytes] = []
        for line in lines:
            self._take_line(line, events)
        return events

    def finish(self) -> list[bytes]:
        """Return the events that the end of the body completes: some servers leave out the blank line after
        the last event.
        """
        events: list[bytes] = []
        self._take_line(self._tail, events)
        self._take_line(b"", events)
        self._tail = b""
        return events

    def _take_line(self, line: bytes, events: list[bytes]) -> None:
        line = line.removesuffix(b"\r")
        if line.startswith(b"data:"):
            self._data.append(line[6:] if line[5:6] == b" " else line[5:])
        elif not line and self._data:
            events.append(b"\n".join(self._data))
            self._data = []
