"""OutputQueues: output that waits for clients, and how long and how much of it they leave unread.

What waits for a client is bounded in time, in number and in bytes. It names the sequences that are to end for
that, and ends none itself.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from detokenizer_proc.clients import Clients, ConnectedClient
from detokenizer_proc.tensors import Tensors
from detokenizer_proc.text_stream import Outgoing
from runtime.wire.messages import ControlReply, TensorEntry
from runtime.wire.transport import Frame

logger = logging.getLogger(__name__)

# Number of terminals and replies that a client may leave unread: more than any sensible queue holds.
MAX_UNREAD = 1 << 16
# Bytes of raw logits and prompt logprobs that a client may leave unread: enough for four sequences by
# default.
MAX_UNREAD_BYTES = 1 << 30


class OutputQueues:
    """Queues of all clients for which output waits."""

    def __init__(self, clients: Clients, slow_reader_timeout_s: float) -> None:
        """slow_reader_timeout_s: seconds for which a client may read nothing before its sequences end. After
        twice that time it is dropped.
        """
        self._clients = clients
        self._slow_reader_timeout_s = slow_reader_timeout_s
        self._unsent: dict[ConnectedClient, None] = {}
        """Clients with waiting output."""
        self._tensors = Tensors()

    def __bool__(self) -> bool:
        return bool(self._unsent)

    def put(self, client: ConnectedClient, item: Outgoing) -> None:
        """Queue the new output of a stream, or a refusal, for its client."""
        if not item.is_queued:
            item.is_queued = True
            client.outgoing.append(item)
        self._unsent[client] = None

    def put_reply(self, reply: ControlReply) -> None:
        """Queue a reply for its client. It is dropped if the client is gone."""
        client = self._clients.get(reply.client)
        if client is not None:
            client.replies.append(reply)
            self._unsent[client] = None

    def put_tensor(self, client: ConnectedClient, entry: TensorEntry, frame: Frame) -> None:
        """Queue a raw frame for a client, ahead of the outputs that wait."""
        self._tensors.add(client, entry, frame)
        self._unsent[client] = None

    def deliver(self, now: float) -> None:
        """Send each client as much of its output as it has room for. The rest stays queued."""
        for client in list(self._unsent):
            # Raw logits go first, so they are there before the terminal.
            if self._tensors.deliver(self._clients, client, now) and self._clients.deliver(client, now):
                del self._unsent[client]

    def drop_tensors(self, client: ConnectedClient, handles: Collection[bytes]) -> None:
        """Drop the raw frames of these sequences that still wait to be sent."""
        self._tensors.drop(client, handles)

    def forget(self, client: ConnectedClient) -> None:
        """Drop everything that waits for a client, which is gone."""
        self._unsent.pop(client, None)
        self._tensors.forget(client)

    def too_large(self, client: ConnectedClient, prompt_bytes: Mapping[bytes, int]) -> list[bytes]:
        """Return the handles of the sequences whose raw frames or prompt logprobs wait for a client, if these
        are too many bytes. Clients of a tenant have equal parts of what a client of the owner may leave
        unread. prompt_bytes: size of the waiting prompt logprobs of each of its live sequences.
        """
        num_bytes = sum(prompt_bytes.values()) + client.num_ended_bytes + self._tensors.num_bytes(client)
        if num_bytes <= self._clients.part_of(client, MAX_UNREAD_BYTES):
            return []
        of_tensors = self._tensors.handles(client)
        handles = [handle for handle, size in prompt_bytes.items() if size or handle in of_tensors]
        logger.info("a client leaves %d bytes unread: %d of its sequences end", num_bytes, len(handles))
        return handles

    def cut_off_slow_readers(self, now: float) -> list[bytes]:
        """Return the handles of sequences whose clients have not read for too long, and drop clients that
        continue like that.
        """
        lagging: list[bytes] = []
        for client in self._unsent:
            if client.blocked_since is None:
                continue
            blocked_s = now - client.blocked_since
            if blocked_s >= 2 * self._slow_reader_timeout_s or client.num_waiting > MAX_UNREAD:
                logger.info("a client that does not read is dropped: %d messages unread", client.num_waiting)
                self._clients.drop(client)
            elif blocked_s >= self._slow_reader_timeout_s and client.handles:
                logger.info(
                    "a client has not read for too long: %d of its sequences end", len(client.handles)
                )
                lagging += client.handles
        return lagging
