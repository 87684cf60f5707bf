"""Exit: a way out of the tokenizer, with what it had no room for."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from runtime.wire.format import Message
from runtime.wire.transport import Outbox


@dataclass(slots=True, eq=False)
class Exit:
    """Keeps the order of what is sent. Never blocks."""

    outbox: Outbox
    kept: deque[Message] = field(default_factory=deque)

    def send(self, message: Message) -> None:
        """Send a message, or keep it."""
        self.kept.append(message)
        self.try_flush()

    def try_flush(self) -> bool:
        """Send what was kept. False: there is no room for all of it."""
        while self.kept:
            if not self.outbox.send(self.kept[0]):
                return False
            self.kept.popleft()
        return True
