"""The detokenizer's end of its link to the scheduler: columns of the token batches that come, and an outbox
for what goes back.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from runtime.wire.format import TOKEN_BYTES
from runtime.wire.handle import HANDLE_BYTES, MAX_ABORT_HANDLES
from runtime.wire.messages import AbortRequest, StopMatched, TokenBatch
from runtime.wire.outbox import KeepingOutbox

_HANDLES = struct.Struct(f"{HANDLE_BYTES}s")
_IDS = struct.Struct(f"{TOKEN_BYTES}s")


class TokenColumns(NamedTuple):
    """Tokens of a batch, in order."""

    rows: Iterable[tuple[tuple[bytes], int, tuple[bytes]]]
    """Handle of the sequence, id, and bytes of the id, for each token."""
    stops: Collection[int]
    """Positions of the tokens that ended their sequence, which have no text."""


def token_columns(batch: TokenBatch) -> TokenColumns:
    """Return the tokens of a batch. Raises ValueError if handles and tokens differ in number."""
    handles, packed = batch.handles, batch.tokens
    if len(packed) % TOKEN_BYTES or len(handles) * TOKEN_BYTES != len(packed) * HANDLE_BYTES:
        raise ValueError(f"{len(handles)} bytes of handles for {len(packed)} bytes of tokens")
    tokens = array("i", packed)
    stops = _stop_positions(batch, tokens) if batch.closed else ()
    # The loop over the rows is the cost of each step, so they are put together without Python code.
    rows = zip(_HANDLES.iter_unpack(handles), tokens, _IDS.iter_unpack(packed), strict=True)
    return TokenColumns(rows, stops)


def _stop_positions(batch: TokenBatch, tokens: Sequence[int]) -> set[int]:
    """Return the positions of the tokens that ended their sequence. A stop token and the Closed that names it
    are in the same batch.
    """
    stop_tokens = {closed.handle: closed.stop_token for closed in batch.closed if closed.reason == "stop"}
    if not stop_tokens:
        return set()
    last: dict[bytes, int] = {}
    for index in range(len(tokens)):
        handle = batch.handles[HANDLE_BYTES * index : HANDLE_BYTES * (index + 1)]
        if handle in stop_tokens:
            last[handle] = index
    return {index for handle, index in last.items() if tokens[index] == stop_tokens[handle]}


class SchedulerOutbox(KeepingOutbox[AbortRequest | StopMatched]):
    """Messages to the scheduler, kept while it has no room."""

    def abort(self, handles: Sequence[bytes]) -> None:
        """Tell the scheduler to end these sequences."""
        for start in range(0, len(handles), MAX_ABORT_HANDLES):
            self.add(AbortRequest(tuple(handles[start : start + MAX_ABORT_HANDLES])))

    def tell_matched(self, handle: bytes, num_tokens: int) -> None:
        """Tell the scheduler that output token number `num_tokens` completed a stop string."""
        self.add(StopMatched(handle, num_tokens))
