"""SharedParts: keeps what the sequences of one request have in common once.

Each sequence comes in a message of its own, with all that its request asks for. Of `n` sequences that wait,
`n` copies of a prompt, of a guide or of a thousand biases would be kept.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from runtime.wire.handle import REQUEST_BYTES
from runtime.wire.messages import TokenizedRequest

_PARTS = ("input_ids", "guide", "draft_ids", "prediction_ids", "processors", "retention")


class SharedParts:
    """Sequences of one request come one after another, so only the latest message is compared."""

    def __init__(self) -> None:
        self._latest: TokenizedRequest | None = None

    def share(self, message: TokenizedRequest) -> TokenizedRequest:
        """Return the message with parts of the latest one in the place of equal parts of its own, if both are
        of one request.
        """
        latest = self._latest
        if latest is not None and latest.handle[:REQUEST_BYTES] == message.handle[:REQUEST_BYTES]:
            parts: dict[str, Any] = {
                name: part for name in _PARTS if (part := getattr(latest, name)) == getattr(message, name)
            }
            sampling = replace(latest.sampling, seed=message.sampling.seed)
            if sampling == message.sampling:
                parts["sampling"] = sampling
            message = replace(message, **parts)
        self._latest = message
        return message
