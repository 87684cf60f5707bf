"""Rules for concurrent work on a GPU: streams, events, and the host's waits.

Work is done at once, in the order in which it is launched. Vector clocks detect that a real GPU might use
another order: each stream, each event and the host know up to which time of each stream all work has
finished.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.harness.pretended_gpu.memory import Allocation

Clock = dict["Stream", int]


class PretendedGpuError(AssertionError):
    """Error for what would go wrong, or could, on a GPU."""


def join(into: Clock, other: Clock) -> None:
    for stream, time in other.items():
        into[stream] = max(into.get(stream, 0), time)


class Stream:
    """torch.cuda.Stream; of a subclass that knows its timeline."""

    timeline: Timeline

    def __init__(self, device: Any = None) -> None:
        self.device = self.timeline.index_of(device)
        self.clock: Clock = {self: 0}
        self._name = f"stream {len(self.timeline.streams)}"
        self.timeline.streams.append(self)

    def __repr__(self) -> str:
        return self._name

    def wait_event(self, event: Event) -> None:
        timeline = self.timeline
        if event.is_recorded and not timeline.is_recording:
            timeline.problem(f"{self} waits for an event of a recording that has ended")
        if self in timeline.recording_streams and not event.is_recorded:
            timeline.problem(f"{self} waits in a recording for an event from outside of it")
        join(self.clock, event.clock)
        if event.is_recorded:
            timeline.recording_streams.add(self)

    def synchronize(self) -> None:
        self.timeline.wait_for(self.clock, "Stream.synchronize")


class Event:
    """torch.cuda.Event; of a subclass that knows its timeline."""

    timeline: Timeline

    def __init__(self, enable_timing: bool = False) -> None:
        self.clock: Clock = {}
        self.is_recorded = False
        """In a recording: a stream that waits for it becomes part of that."""
        self._num_queries = 0

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.timeline.current
        self.clock = dict(stream.clock)
        self.is_recorded = stream in self.timeline.recording_streams
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
    """Timeline of a process and its devices. Its streams and events are of the classes that it makes."""

    def __init__(self, num_devices: int = 1) -> None:
        self.host: Clock = {}
        self.streams: list[Stream] = []
        self.recording_streams: set[Stream] = set()
        """Streams whose launches are recorded; empty: no recording is made."""
        self.forbids_waits = False
        self.num_devices = num_devices
        self.device = 0
        """The current one: work on any other is refused."""
        self.problems: list[str] = []
        known = {"timeline": self}
        self.stream_class: type[Stream] = type("Stream", (Stream,), known)
        self.event_class: type[Event] = type("Event", (Event,), known)
        self._currents = [self.stream_class(device) for device in range(num_devices)]

    @property
    def current(self) -> Stream:
        return self._currents[self.device]

    @property
    def is_recording(self) -> bool:
        return bool(self.recording_streams)

    def index_of(self, device: Any) -> int:
        """A device as torch names it: nothing and one without a number are the current one."""
        named = device if isinstance(device, int) or device is None else torch.device(device).index
        index = self.device if named is None else named
        if not 0 <= index < self.num_devices:
            self.problem(f"there is no device {index}: there are {self.num_devices}")
        return index

    def set_device(self, device: Any) -> None:
        self.device = self.index_of(device)

    def launch(self, name: str, read: Iterable[Allocation], written: Iterable[Allocation]) -> None:
        """Work on the current stream. Raises PretendedGpuError where other work may use its memory too."""
        stream = self.current
        if self.is_recording and stream not in self.recording_streams:
            self.problem(f"{name} on {stream}, which is no part of the recording that is being made")
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
    device, before = timeline.device, timeline._currents[stream.device]
    timeline.device, timeline._currents[stream.device] = stream.device, stream
    try:
        yield
    finally:
        timeline.device, timeline._currents[stream.device] = device, before


@contextmanager
def recording_on(timeline: Timeline, stream: Stream) -> Iterator[None]:
    """Record what is launched on the stream, and on those that wait for it, instead of doing it."""
    with on_stream(timeline, stream):
        timeline.recording_streams = {stream}
        try:
            yield
            for other in timeline.recording_streams:
                if other.clock[other] > stream.clock.get(other, 0):
                    timeline.problem(f"a recording ends for whose work on {other} nobody has waited")
        finally:
            timeline.recording_streams = set()
