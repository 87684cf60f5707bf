"""Format of all messages: base classes, bounds, packed arrays, and the header in front of every message.

    magic (4) | version (2) | schema hash (6) | epoch (4)        little endian, 16 bytes

The schema hash covers every union of runtime.wire.messages, so that two builds that would misread each other
refuse each other's first frame. `epoch` belongs to the sender: it counts the restarts of a launch. Scheduler
and worker, which are started together, drop messages of other epochs.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from runtime.base.errors import InvalidRequest
from runtime.wire.handle import HANDLE_BYTES

PROTOCOL_VERSION = 2
MAGIC = b"CRSL"
HEADER_BYTES = 16
PREFIX_BYTES = 12
TOKEN_BYTES = 4
TENANT_BYTES = 8
"""First bytes of a namespace, which identify the tenant; zeros for the owner."""
MAX_PROMPT_TOKENS = 1 << 22
MAX_TEXT_CHARS = 1 << 24
CONTENT_BYTES = 8
NO_CONTENT = bytes(CONTENT_BYTES)
MAX_LABEL_CHARS = 256
MAX_TURNS = 4096
MAX_TEMPLATE_VALUES = 4096
"""Maximum number of values in a chat template's variables, in all lists and maps: 10 ms of work."""
MAX_SHORT_CHARS = 4096
MAX_PRIORITY = 1000
PING_S = 1.0
"""Seconds between two pings of client and detokenizer."""
SILENCE_S = 15.0
"""Seconds without a message after which client and detokenizer give each other up."""

_NESTING = frozenset({dict, list, tuple})
# NumPy makes these of the classes in each call, which takes longer than to read bytes.
_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)

Handle: TypeAlias = Annotated[bytes, Meta(min_length=HANDLE_BYTES, max_length=HANDLE_BYTES)]
TURNS = Meta(max_length=MAX_TURNS)
"""Maximum number of messages of one conversation."""
Label: TypeAlias = Annotated[str, Meta(max_length=MAX_LABEL_CHARS)]
Content: TypeAlias = Annotated[bytes, Meta(min_length=CONTENT_BYTES, max_length=CONTENT_BYTES)]
"""Digest of what a request asks for (runtime/ring/suspects/content.py)."""
Text: TypeAlias = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
ShortText: TypeAlias = Annotated[str, Meta(max_length=MAX_SHORT_CHARS)]
PackedIds: TypeAlias = Annotated[bytes, Meta(max_length=MAX_PROMPT_TOKENS * TOKEN_BYTES)]
MaskBits: TypeAlias = bytes | memoryview
"""Bitmask of ids, in a message or in shared memory."""
RowMasks: TypeAlias = Mapping[int, Sequence[MaskBits]]
"""Masks by row: that of its next token, then those behind its guesses, as far as there are any."""
Count: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 31)]
Priority: TypeAlias = Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
"""Scheduling priority of a request; higher goes first."""
ClientId: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
IntArray: TypeAlias = npt.NDArray[np.int32]
LongArray: TypeAlias = npt.NDArray[np.int64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
FloatArray: TypeAlias = npt.NDArray[np.float32]


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """Base of all messages. The name of the class is its tag on the wire."""

    @property
    def num_frames(self) -> int:
        """Number of raw frames that follow the message in the same multipart message."""
        return 0


class Record(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """Base of structs that travel inside messages."""


def pack_ids(ids: Sequence[int] | npt.NDArray[np.integer[Any]]) -> bytes:
    return np.asarray(ids, np.int32).tobytes()


def unpack_ids(data: bytes) -> IntArray:
    """Return a read-only view [n] of packed int32. Raises ValueError if the length is not a multiple
    of four.
    """
    return np.frombuffer(data, _INT32)


def unpack_floats(data: bytes) -> FloatArray:
    """Return a read-only view [n] of packed float32. Raises ValueError if the length is not a multiple of
    four.
    """
    return np.frombuffer(data, _FLOAT32)


def schema_hash(unions: Iterable[Any]) -> bytes:
    """Return six bytes that change whenever a field, a bound or a union of the messages changes."""
    schemas, components = msgspec.json.schema_components(list(unions))
    canonical = json.dumps([schemas, components], sort_keys=True).encode()
    return hashlib.sha256(canonical).digest()[: PREFIX_BYTES - 6]


def header(schema: bytes, epoch: int) -> bytes:
    return MAGIC + struct.pack("<H", PROTOCOL_VERSION) + schema + struct.pack("<I", epoch)


def describe_header(head: bytes) -> str:
    """Return version and schema of a header as text, for the error that names both sides."""
    if head[:4] != MAGIC or len(head) < HEADER_BYTES:
        return "no Carousel header"
    return f"version {int.from_bytes(head[4:6], 'little')}, schema {head[6:PREFIX_BYTES].hex()}"


def check_template_kwargs(variables: Mapping[str, Any]) -> None:
    """Check how many values the variables of a chat template have. Raises InvalidRequest."""
    num_values, waiting = 0, [*variables.values()]
    while waiting:
        num_values += len(waiting)
        if num_values > MAX_TEMPLATE_VALUES:
            raise InvalidRequest(
                f"chat_template_kwargs: at most {MAX_TEMPLATE_VALUES} values in all lists and maps",
                param="chat_template_kwargs",
            )
        waiting = [
            inner
            for value in waiting
            if type(value) in _NESTING
            for inner in (value.values() if type(value) is dict else value)
        ]
