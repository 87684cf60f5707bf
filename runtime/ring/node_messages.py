"""Messages between node 0's launcher and the agents of other nodes. An agent's first frame and its answer are
maps with field names, so that builds of different versions can report the difference. All later frames have
the wire's header and a typed union.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from runtime.wire.format import Count, Label, Message, Record, ShortText, schema_hash
from runtime.wire.messages import UNIONS, ProcessFailed, ProcessReady
from runtime.wire.status_page import STATES

HELLO_MAGIC = b"CRNH"
MAX_FACTS = 256
MAX_FRAME_BYTES = 1 << 20
LINGER_MS = 300
"""Milliseconds for which each end still sends its last messages when it closes."""
Nanoseconds: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
State: TypeAlias = Annotated[int, Meta(ge=0, lt=len(STATES))]


class NodeHello(msgspec.Struct, frozen=True):
    """First message of an agent: its identity, and the facts that must be equal on all nodes."""

    node: Annotated[int, Meta(ge=0, lt=64)]
    address: Label
    facts: Annotated[dict[Label, ShortText], Meta(max_length=MAX_FACTS)]


class NodeAnswer(msgspec.Struct, frozen=True):
    """Answer of node 0: empty if the node is accepted."""

    refusal: ShortText = ""


class RankBeat(Record, frozen=True):
    """Slot of a rank on its own node's status page."""

    index: Count
    epoch: Count
    pid: Count
    state: State
    heartbeat_ns: Nanoseconds
    """Time on its own node's clock, of which only changes are meaningful."""
    loaded: float
    is_stopped: bool


class NodeBeat(Message, frozen=True):
    ranks: Annotated[tuple[RankBeat, ...], Meta(max_length=64)]


class RankEnded(Message, frozen=True):
    index: Count
    epoch: Count
    code: Annotated[int, Meta(ge=-255, le=255)]


class NodeLeft(Message, frozen=True):
    """The agent ends, because its user wants so or because it cannot continue."""

    reason: ShortText


class NodePing(Message, frozen=True):
    """Sign of life of node 0."""


class StartRank(Message, frozen=True):
    index: Count
    epoch: Count


class KillRank(Message, frozen=True):
    index: Count
    epoch: Count


class Rejoin(Message, frozen=True):
    """Node 0 does not know the agent, or has given it up. The agent ends its ranks and sends a new hello."""


class StopNode(Message, frozen=True):
    """Order to end, because the launch is over."""

    reason: ShortText
    exit_code: Annotated[int, Meta(ge=0, le=255)]


FromAgent: TypeAlias = NodeBeat | ProcessReady | ProcessFailed | RankEnded | NodeLeft
ToAgent: TypeAlias = NodePing | StartRank | KillRank | Rejoin | StopNode
NODE_SCHEMA = schema_hash([*UNIONS.values(), FromAgent, ToAgent]).hex()


def encode_first(message: NodeHello | NodeAnswer) -> bytes:
    """Encode the first message of a connection."""
    return HELLO_MAGIC + msgspec.msgpack.encode(message)


def is_first(frame: bytes) -> bool:
    """Return True if a frame is the first message of a connection."""
    return frame.startswith(HELLO_MAGIC)


def decode_first(frame: bytes, kind: type[Any]) -> Any:
    """Decode the first message of a connection. Raises msgspec.MsgspecError."""
    return msgspec.msgpack.decode(frame[len(HELLO_MAGIC) :], type=kind)
