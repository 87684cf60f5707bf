"""runtime.wire.outbox: what the other end has no room for is kept, in order."""

from __future__ import annotations

from runtime.wire.outbox import KeepingOutbox


def test_what_there_is_no_room_for_is_kept_and_goes_first() -> None:
    sent: list[int] = []
    room = 2

    def send(message: int) -> bool:
        if len(sent) < room:
            sent.append(message)
            return True
        return False

    outbox = KeepingOutbox(send)
    assert outbox.flush()
    for message in (1, 2, 3):
        outbox.send(message)
    outbox.add(4)
    assert (sent, len(outbox)) == ([1, 2], 2)
    assert not outbox.flush()
    room = 3
    outbox.send(5)
    assert (sent, len(outbox)) == ([1, 2, 3], 2)
    room = 9
    assert outbox.flush()
    assert (sent, len(outbox)) == ([1, 2, 3, 4, 5], 0)
