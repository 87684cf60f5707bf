"""QuietStreams: writes a line into each stream that has had nothing to say for a while, so that no proxy
between server and caller takes its connection for dead.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Self

from carousel.server.answer.sse import AnswerWriter

AT_ONCE = 128
"""Streams that get a line in one turn of the event loop: about 2 ms."""
UNSEEN = -1


class QuietStream:
    """Stream with the line that keeps its connection open."""

    __slots__ = ("_watched", "is_between", "line", "num_seen", "writer")

    def __init__(self, writer: AnswerWriter, line: bytes, watched: dict[QuietStream, None]) -> None:
        """`watched` has the streams that get lines. This one leaves them at the end of a `with` block."""
        self._watched = watched
        self.writer = writer
        self.line = line
        self.is_between = True
        """True while its task waits for output, so that no event is half written."""
        self.num_seen = UNSEEN
        """Number of bytes that it had written when it was last looked at; UNSEEN before, and after a line."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._watched.pop(self, None)


class QuietStreams:
    """Streams of one event loop. Each is looked at twice in an interval, and gets the line if nothing was
    written since the last look.
    """

    def __init__(self, interval_s: float) -> None:
        """`interval_s` is the longest time for which a stream says nothing, in seconds; 0 for any time."""
        self._look_s = interval_s / 2
        self._streams: dict[QuietStream, None] = {}
        self._left: deque[QuietStream] = deque()
        """Streams that are still to be looked at in this round."""
        self._timer: asyncio.TimerHandle | None = None

    def watched(self, writer: AnswerWriter, line: bytes) -> QuietStream:
        """Write `line` whenever the stream is quiet while a `with` block runs, so that no proxy closes it."""
        stream = QuietStream(writer, line, self._streams)
        if self._look_s:
            self._streams[stream] = None
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(self._look_s, self._look)
        return stream

    def _look(self) -> None:
        self._timer = None
        if not self._left:
            self._left.extend(self._streams)
        try:
            for _ in range(min(AT_ONCE, len(self._left))):
                stream = self._left.popleft()
                if stream in self._streams:
                    _look_at(stream)
        finally:  # the others get their lines when that of one fails
            self._look_again()

    def _look_again(self) -> None:
        if self._streams:
            delay_s = 0.0 if self._left else self._look_s
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._look)
        else:
            self._left.clear()


def _look_at(stream: QuietStream) -> None:
    num_written = stream.writer.num_written
    if stream.is_between and stream.num_seen == num_written:
        stream.writer.write_now(stream.line)
        stream.num_seen = UNSEEN
    else:
        stream.num_seen = num_written
