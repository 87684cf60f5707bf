"""Raw logits and additional outputs that wait to be sent, by client. Frames are passed on unchanged."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from detokenizer_proc.clients import Clients, ConnectedClient
from runtime.wire.messages import TensorBatch, TensorEntry
from runtime.wire.transport import Frame

# A message is sent as a whole or not at all, so it is smaller than what a client may leave unread.
MAX_MESSAGE_BYTES = 16 << 20
MAX_MESSAGE_FRAMES = 1024


class TensorQueue:
    """Queue of raw frames that wait for one client."""

    __slots__ = ("_waiting", "num_bytes")

    def __init__(self) -> None:
        self._waiting: deque[tuple[TensorEntry, Frame]] = deque()
        self.num_bytes = 0

    def handles(self) -> frozenset[bytes]:
        """Return the handles of the sequences whose frames wait."""
        return frozenset(entry.handle for entry, _ in self._waiting)

    def add(self, entry: TensorEntry, frame: Frame) -> None:
        self._waiting.append((entry, frame))
        self.num_bytes += _size(frame)

    def drop(self, handles: Collection[bytes]) -> None:
        """Drop the tensors of these sequences that still wait to be sent."""
        self._waiting = deque(item for item in self._waiting if item[0].handle not in handles)
        self.num_bytes = sum(_size(frame) for _, frame in self._waiting)

    def deliver(self, clients: Clients, client: ConnectedClient, now: float) -> bool:
        """Send waiting frames in order. Returns False if not all of them could be sent; the rest stays."""
        while self._waiting:
            entries, frames = self._next_message()
            if not clients.send_framed(client, TensorBatch(tuple(entries)), frames, now):
                return False
            for frame in frames:
                self._waiting.popleft()
                self.num_bytes -= _size(frame)
        return True

    def _next_message(self) -> tuple[list[TensorEntry], list[Frame]]:
        entries: list[TensorEntry] = []
        frames: list[Frame] = []
        num_bytes = 0
        for entry, frame in self._waiting:
            num_bytes += _size(frame)
            if entries and (num_bytes > MAX_MESSAGE_BYTES or len(entries) == MAX_MESSAGE_FRAMES):
                break
            entries.append(entry)
            frames.append(frame)
        return entries, frames


class Tensors:
    """Queues of all clients for which raw frames wait."""

    def __init__(self) -> None:
        self._queues: dict[ConnectedClient, TensorQueue] = {}

    def add(self, client: ConnectedClient, entry: TensorEntry, frame: Frame) -> None:
        self._queues.setdefault(client, TensorQueue()).add(entry, frame)

    def num_bytes(self, client: ConnectedClient) -> int:
        queue = self._queues.get(client)
        return 0 if queue is None else queue.num_bytes

    def handles(self, client: ConnectedClient) -> frozenset[bytes]:
        """Return the handles of the sequences whose frames wait for a client."""
        queue = self._queues.get(client)
        return frozenset() if queue is None else queue.handles()

    def drop(self, client: ConnectedClient, handles: Collection[bytes]) -> None:
        """Drop the tensors of these sequences that still wait to be sent."""
        queue = self._queues.get(client)
        if queue is not None:
            queue.drop(handles)

    def forget(self, client: ConnectedClient) -> None:
        self._queues.pop(client, None)

    def deliver(self, clients: Clients, client: ConnectedClient, now: float) -> bool:
        """Send the waiting frames of a client in order. Returns False if not all of them could be sent."""
        queue = self._queues.get(client)
        if queue is None:
            return True
        if not queue.deliver(clients, client, now):
            return False
        self.forget(client)
        return True


def _size(frame: Frame) -> int:
    return len(frame) if isinstance(frame, bytes) else frame.nbytes
