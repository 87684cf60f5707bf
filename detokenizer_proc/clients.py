"""Clients: table of connected clients with their signs of life and unread output. Knows no token."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from detokenizer_proc.router import Delivery, PeerChannel
from detokenizer_proc.text_stream import Outgoing
from runtime.base.client_id import draw_client_id, is_client_of
from runtime.base.errors import ProtocolMismatch
from runtime.ring.tenants import OWNER
from runtime.wire.format import MAGIC, PING_S, PROTOCOL_VERSION, SILENCE_S, Message
from runtime.wire.messages import UNIONS, ControlReply, Hello, HelloAck, OutputBatch, Ping
from runtime.wire.status_page import RingStatus
from runtime.wire.transport import DECODE_ERRORS, SCHEMA, BadFrames, Frame, MessageCodec

logger = logging.getLogger(__name__)

CHECK_S = 0.25
MAX_CLIENTS = 4096
# Number of these places that only clients of the run directory may take: more than a launch has HTTP servers.
NUM_LOCAL_ONLY = 128
# Clients that a tenant may have while any place is free. For a further one, more places must be free than it
# has clients.
NUM_OF_EACH_TENANT = 32
# Greetings and pings handled in a turn, which takes at most 2 ms for them.
MAX_DRAIN = 128
# Far below the size of one frame that a client's socket accepts.
MAX_BATCH_BYTES = 8 << 20
STATUS_S = 1.0


@dataclass(frozen=True, slots=True)
class RingShape:
    """Properties of the ring that a client needs in order to send requests."""

    index: int = 0
    """Index of this detokenizer."""
    num_tokenizers: int = 1
    num_detokenizers: int = 1
    max_waiting: int = 0


@dataclass(slots=True, eq=False)
class ConnectedClient:
    """One connection of a client."""

    id: int
    """Random id of the client, the first half of its handles. A caller who does not know it cannot name any
    of its sequences.
    """
    peer: bytes
    """Routing id of the client on the socket."""
    tenant: str
    """Tenant of the key that the client used."""
    heard_at: float
    sent_at: float
    status_at: float = float("-inf")
    """Time at which the client last got a RingStatus. Only clients that ask for it get one."""
    blocked_since: float | None = None
    """Time since which it has not read its output; None while it reads. A ping that gets through is no sign
    of reading: there may be room for small messages while raw frames wait.
    """
    handles: set[bytes] = field(default_factory=set)
    """Handles of its live sequences."""
    outgoing: list[Outgoing] = field(default_factory=list)
    """Streams with new output for the client, each once."""
    num_ended_bytes: int = 0
    """Number of bytes of prompts' logprobs in `outgoing`, of sequences that have ended."""
    replies: deque[ControlReply] = field(default_factory=deque)

    @property
    def num_waiting(self) -> int:
        """Number of outputs to be sent to it, before they are combined into messages."""
        return len(self.outgoing) + len(self.replies)


class Clients:
    """Table of clients and their channel. Nothing that a peer sends can raise here."""

    def __init__(
        self,
        channel: PeerChannel,
        epoch: int,
        secret: bytes,
        shape: RingShape = RingShape(),
        ring_status: Callable[[], RingStatus] = lambda: RingStatus("ready", 0, 0, 0),
        sees_load: Callable[[str], bool] = lambda tenant: tenant == OWNER,
    ) -> None:
        """secret: key of the launch, used in drawn ids. ring_status: returns the state of the ring, for
        clients that cannot see it themselves. Only tenants for which `sees_load` is true are told its load.
        """
        self._channel = channel
        self.num_sent = 0
        """Number of messages sent to clients since the start."""
        self._secret = secret
        self._shape = shape
        self._ring_status = ring_status
        self._sees_load = sees_load
        self._incoming = MessageCodec(UNIONS["client_in"], epoch)
        self._codec = MessageCodec(UNIONS["client_out"], epoch)
        self._by_peer: dict[bytes, ConnectedClient] = {}
        self._by_id: dict[int, ConnectedClient] = {}
        self._num_of: Counter[str] = Counter()
        """Number of clients of each tenant."""
        self._gone: list[ConnectedClient] = []
        self._watchers: dict[ConnectedClient, None] = {}
        """Clients that want to be told the state of the ring."""
        self._told_state = ""
        self._next_check_at = 0.0
        self.bad_frames = BadFrames("client_out")
        self.returned_at = 0.0
        """Time at which a client last came back under its earlier id; 0.0: never."""
        self.on_return: Callable[[], object] | None = None
        """Called when a client comes back, before the client learns that it may send."""

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, client_id: int) -> ConnectedClient | None:
        return self._by_id.get(client_id)

    def part_of(self, client: ConnectedClient, amount: int) -> int:
        """Return a client's equal part of an amount that is for all clients of its tenant. Clients of the
        owner have all of it.
        """
        return amount if client.tenant == OWNER else amount // max(1, self._num_of[client.tenant])

    def take_gone(self) -> list[ConnectedClient]:
        """Return the clients that have gone since the last call. They are no longer in the table."""
        gone, self._gone = self._gone, []
        return gone

    def receive(self, now: float) -> None:
        """Handle the messages of clients."""
        for peer, frame, tenant in self._channel.drain(MAX_DRAIN):
            try:
                # This process makes the routing ids, so no greeting with one is older than the process. But a
                # first Hello cannot know the epoch yet.
                message = self._incoming.decode(frame, any_epoch=True)
            except ProtocolMismatch as error:
                self.bad_frames.add(error)
                if frame[: len(MAGIC)] == MAGIC:
                    self._show_version(peer)
                continue
            except DECODE_ERRORS as error:
                self.bad_frames.add(error)
                continue
            client = self._by_peer.get(peer)
            if client is not None and client.tenant != tenant:
                self.drop(client)  # its key belongs to another tenant now
            elif isinstance(message, Hello):
                self._greet(peer, message, tenant, now)
            elif client is not None:
                client.heard_at = now

    def is_check_due(self, now: float) -> bool:
        """Return True if `maintain` will look for silent clients. Call `receive` before it."""
        return now >= self._next_check_at

    def maintain(self, now: float) -> None:
        """Ping clients that have not been sent anything for a while, and drop those that have been silent for
        too long.
        """
        if self._watchers:
            self._tell_status(self._ring_status(), now)
        if not self.is_check_due(now):
            return
        self._next_check_at = now + CHECK_S
        for client in list(self._by_id.values()):
            if now - client.heard_at > SILENCE_S:
                logger.info("a client has been silent for %.0f s", SILENCE_S)
                self.drop(client)
            elif now - client.sent_at >= PING_S:
                self._send(client, Ping(client.id), now)

    def say_farewell(self, now: float) -> None:
        """Tell clients that this process and its ring end, so that they need not wait for its silence."""
        status = self._ring_status()
        state = "failed" if status.state == "failed" else "absent"
        self._tell_status(msgspec.structs.replace(status, state=state), now)

    def deliver(self, client: ConnectedClient, now: float) -> bool:
        """Send waiting output. Returns False if not all of it could be sent; the rest stays."""
        # Output that a client has not read is encoded again with each attempt, so a small message first
        # checks whether it reads.
        if client.blocked_since is not None and not self._send(client, Ping(client.id), now):
            return False
        while client.replies:
            if not self._send(client, client.replies[0], now):
                return False
            client.replies.popleft()
            client.blocked_since = None
        items = client.outgoing
        if not items:
            client.blocked_since = None
            return True
        num_sent = self._send_outputs(client, items, now)
        if num_sent:
            client.blocked_since = None if num_sent == len(items) else now
        for item in items[:num_sent]:
            if client.num_ended_bytes:
                client.num_ended_bytes -= item.num_ended_bytes
            item.mark_sent()
            item.is_queued = False
        del items[:num_sent]
        return not items

    def send_framed(
        self, client: ConnectedClient, message: Message, frames: Sequence[Frame], now: float
    ) -> bool:
        """Send a message with raw frames, before waiting output. Returns False if there is no room, or the
        client is gone.
        """
        if not self._send_frame(client, self._codec.encode(message), now, frames):
            return False
        client.blocked_since = None
        return True

    def drop(self, client: ConnectedClient) -> None:
        """Drop a client that is gone, or is treated as such. Nothing more is read from it or sent to it."""
        if self._by_id.pop(client.id, None) is not None:
            del self._by_peer[client.peer]
            self._num_of[client.tenant] -= 1
            self._watchers.pop(client, None)
            self._gone.append(client)

    def _tell_status(self, status: RingStatus, now: float) -> None:
        """Send the state of the ring to each client that wants it, once a second, and at once when it has
        changed.
        """
        is_news = status.state != self._told_state
        self._told_state = status.state
        without_load = msgspec.structs.replace(status, num_running=0, num_waiting=0, num_free_pages=0)
        for client in list(self._watchers):
            if is_news or now - client.status_at >= STATUS_S:
                client.status_at = now
                self._send(client, status if self._sees_load(client.tenant) else without_load, now)

    def _send_outputs(self, client: ConnectedClient, items: list[Outgoing], now: float) -> int:
        """Send the outputs of `items` in one message, or in several if it is too long. Returns how many
        outputs were sent.
        """
        frame = self._codec.encode(OutputBatch(tuple([item.output() for item in items])))
        if len(frame) > MAX_BATCH_BYTES and len(items) > 1:
            half = len(items) // 2
            num_sent = self._send_outputs(client, items[:half], now)
            if num_sent == half:
                num_sent += self._send_outputs(client, items[half:], now)
            return num_sent
        return len(items) if self._send_frame(client, frame, now) else 0

    def _send(self, client: ConnectedClient, message: Message, now: float) -> bool:
        return self._send_frame(client, self._codec.encode(message), now)

    def _send_frame(
        self, client: ConnectedClient, frame: bytes, now: float, frames: Sequence[Frame] = ()
    ) -> bool:
        delivery = self._channel.send(client.peer, frame, frames)
        if delivery is Delivery.SENT:
            self.num_sent += 1
            client.sent_at = now
            return True
        if delivery is Delivery.GONE:
            self.drop(client)
        elif client.blocked_since is None:
            client.blocked_since = now
        return False

    def _greet(self, peer: bytes, hello: Hello, tenant: str, now: float) -> None:
        if (hello.version, hello.schema) != (PROTOCOL_VERSION, SCHEMA.hex()):
            self._show_version(peer)
            return
        client = self._by_peer.get(peer) or self._admit(peer, hello.client, tenant, now)
        if client is None:
            return
        client.heard_at = now
        shape = self._shape
        ack = HelloAck(
            client.id,
            self._codec.epoch,
            PROTOCOL_VERSION,
            SCHEMA.hex(),
            shape.num_tokenizers,
            shape.num_detokenizers,
            shape.max_waiting,
        )
        self._send(client, ack, now)
        if hello.wants_status and client.id in self._by_id:
            self._watchers[client] = None

    def _admit(self, peer: bytes, claimed: int, tenant: str, now: float) -> ConnectedClient | None:
        """Accept a new connection. It keeps the id that it had before this process was restarted or its
        connection was lost, unless another client that is still connected has the id; then it must ask again.

        A client only keeps an id of its own tenant. Within a tenant, anybody who knows an id could take it
        once its owner is gone; but it is told to its owner only.
        """
        fault = self._fault_of(peer, claimed, tenant)
        if fault is not None:
            self.bad_frames.add(ValueError(fault))
            return None
        if claimed % self._shape.num_detokenizers != self._shape.index:
            claimed = 0  # id of another detokenizer: no output would come to it here
        holder = self._by_id.get(claimed)
        if holder is not None:
            # Ping it, because a lost connection is noticed only when something is sent on it.
            self._send(holder, Ping(holder.id), now)
            if claimed in self._by_id:
                return None
        if claimed:
            self.returned_at = now
            if self.on_return is not None:
                self.on_return()
        client = ConnectedClient(claimed or self._draw_id(tenant), peer, tenant, heard_at=now, sent_at=now)
        self._by_peer[peer] = self._by_id[client.id] = client
        self._num_of[tenant] += 1
        return client

    def _fault_of(self, peer: bytes, claimed: int, tenant: str) -> str | None:
        """Return why a client cannot be accepted; None if it can."""
        if claimed and not is_client_of(claimed, tenant, self._secret):
            return "a client claims the id of another tenant's"
        limit = MAX_CLIENTS if self._channel.is_local(peer) else MAX_CLIENTS - NUM_LOCAL_ONLY
        num_free = limit - len(self._by_id)
        if num_free <= 0:
            return f"more than {limit} clients"
        num_own = self._num_of[tenant]
        if tenant != OWNER and num_own >= max(num_free, NUM_OF_EACH_TENANT):
            return f"more than {num_own} clients of {tenant}"
        return None

    def _show_version(self, peer: bytes) -> None:
        """Answer with the bare header, in which every version finds our version."""
        self._channel.send(peer, self._codec.header)

    def _draw_id(self, tenant: str) -> int:
        """Draw a random id that shows its tenant and this detokenizer."""
        shape = self._shape
        while True:
            client_id = draw_client_id(tenant, self._secret, shape.index, shape.num_detokenizers)
            if client_id not in self._by_id:
                return client_id
