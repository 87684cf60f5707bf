"""Stop tokens: finds the tokens of a batch that ended their sequence, which have no text."""

from __future__ import annotations

from runtime.wire.handle import HANDLE_BYTES
from runtime.wire.messages import TokenBatch


def stop_positions(batch: TokenBatch, tokens: list[int]) -> set[int]:
    """Return the positions of stop tokens in the batch. A stop token and the Closed that names it are in the
    same batch.
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
