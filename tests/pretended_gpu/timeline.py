"""What may run at the same time on a GPU, and whether it may: streams, events, what the host has waited for.

Work is done at once, in the order in which it is launched. What a real GPU might do in another order is found
by vector clocks: each stream, each event and the host know up to which time of each stream all is finished.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.pretended_gpu.memory import Allocation

Clock = dict["Stream", int]


class PretendedGpuError(AssertionError):
    """What would go wrong, or could, on a GPU."""


def join(into: Clock, other: Clock) -> None:
    for stream, time in other.items():
        into[stream] = max(into.get(stream, 0), time)


class Stream:
    """torch.cuda.Stream; of a subclass that knows its timeline."""

    timeline: Timeline

    def __init__(self, device: Any = None) -> None:
        self.clock: Clock = {self: 0}
        self._name = f"stream {len(self.timeline.streams)}"
        self.timeline.streams.append(self)

    def __repr__(self) -> str:
        return self._name

    def wait_event(self, event: Event) -> None:
        join(self.clock, event.clock)

    def synchronize(self) -> None:
        self.timeline.wait_for(self.clock, "Stream.synchronize")


class Event:
    """torch.cuda.Event; of a subclass that knows its timeline."""

    timeline: Timeline

    def __init__(self, enable_timing: bool = False) -> None:
        self.clock: Clock = {}
        self._num_queries = 0

    def record(self, stream: Stream | None = None) -> None:
        self.clock = dict((stream or self.timeline.current).clock)
        self._num_queries = 0

    def synchronize(self) -> None:
        """Waiting for an event is how the host is meant to wait: no mistake but in a recording."""
        assert not self.timeline.is_recording, "an event was waited for in a recording"
        join(self.timeline.host, self.clock)

    def query(self) -> bool:
        """The first time the answer is no."""
        self._num_queries += 1
        if self._num_queries == 1:
            return False
        join(self.timeline.host, self.clock)
        return True

    def elapsed_time(self, later: Event) -> float:
        """Milliseconds: launches between the two, on whatever stream."""
        return float(sum(later.clock.values()) - sum(self.clock.values()))


class Timeline:
    """A device's. Its streams and events are of the classes that it makes."""

    def __init__(self) -> None:
        self.host: Clock = {}
        self.streams: list[Stream] = []
        self.is_recording = False
        self.forbids_waits = False
        self.problems: list[str] = []
        known = {"timeline": self}
        self.stream_class: type[Stream] = type("Stream", (Stream,), known)
        self.event_class: type[Event] = type("Event", (Event,), known)
        self.current = self.stream_class()

    def launch(self, name: str, read: Iterable[Allocation], written: Iterable[Allocation]) -> None:
        """Work on the current stream. Raises PretendedGpuError where other work may use its memory too."""
        stream = self.current
        clock = stream.clock
        join(clock, self.host)
        clock[stream] += 1
        for allocation in written:
            for other, time in [
                *allocation.read.items(),
                *([allocation.written] if allocation.written else []),
            ]:
                self._check(name, "writes what", other, time)
        for allocation in read:
            if allocation.written is not None:
                self._check(name, "reads what", *allocation.written)
            allocation.read[stream] = clock[stream]
        for allocation in written:
            allocation.written = (stream, clock[stream])
            allocation.read = {}

    def _check(self, name: str, does: str, other: Stream, time: int) -> None:
        if time > self.current.clock.get(other, 0):
            self.problem(f"{name} on {self.current} {does} {other} may not have finished with")

    def free(self, allocation: Allocation) -> None:
        """Its memory goes to whoever allocates next on its home stream."""
        known = dict(self.host)
        join(known, allocation.home.clock)
        last = dict(allocation.read)
        if allocation.written is not None:
            join(last, {allocation.written[0]: allocation.written[1]})
        for stream, time in last.items():
            if stream not in allocation.recorded and not allocation.of_graph and time > known.get(stream, 0):
                # Raised by the next launch: this runs where nothing can be raised.
                self.problems.append(
                    f"{allocation.num_bytes} bytes of {allocation.home} are free again while {stream} may "
                    "use them"
                )

    def wait_for(self, clock: Clock, why: str) -> None:
        """The host waits. Raises PretendedGpuError where it must not."""
        if self.is_recording:
            self.problem(f"{why} in a recording")
        if self.forbids_waits:
            self.problem(f"the host waits for the device: {why}")
        join(self.host, clock)

    def host_reads(self, allocation: Allocation) -> None:
        if allocation.written is not None and allocation.written[1] > self.host.get(allocation.written[0], 0):
            self.problem(f"the host reads what {allocation.written[0]} may not have written yet")

    def problem(self, text: str) -> None:
        self.problems.append(text)
        raise PretendedGpuError(text)

    def check(self) -> None:
        """Raises PretendedGpuError for all that was found."""
        if self.problems:
            raise PretendedGpuError("; ".join(dict.fromkeys(self.problems)))


@contextmanager
def on_stream(timeline: Timeline, stream: Stream) -> Iterator[None]:
    """torch.cuda.stream."""
    before, timeline.current = timeline.current, stream
    try:
        yield
    finally:
        timeline.current = before
