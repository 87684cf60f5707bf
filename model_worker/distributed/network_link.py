"""Stage link between two machines. Each step travels by gloo, in a group of the two ranks, as a header and
its data; a thread at either end transfers it while the stages compute others.

gloo sends only requested buffers, so free slots at the receiving end control the sending end. The end of a
process is noticed at once, because the kernel closes its connection. A lost machine is not noticed here but
by node 0, through the machine's agent.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor

from model_worker.distributed.link_end import Waiting, check_number, has_ended
from model_worker.distributed.memory_link import lay

GIVER, TAKER = 0, 1
"""Ranks of the two ends in a link's group."""
TAG = 0
LONG = timedelta(days=3650)
"""Timeout of a group. gloo ends a group at its timeout, so it must outlast a ring that gets no requests."""
NO_STEP = -1
"""Number in the last header: no step follows."""


class NetworkGivingEnd:
    """Sending end of a link over the network; see GivingEnd."""

    def __init__(self, group: Any, slot_bytes: int, num_slots: int, *, stage: int, waiting: Waiting) -> None:
        """group: gloo group of two ranks. stage: stage at the other end."""
        self._group, self._stage, self._waiting = group, stage, waiting
        self._slots = [torch.empty(slot_bytes, dtype=torch.uint8) for _ in range(num_slots)]
        self._free: queue.SimpleQueue[Tensor | None] = queue.SimpleQueue()
        for slot in self._slots:
            self._free.put(slot)
        self._due: queue.SimpleQueue[_Step | None] = queue.SimpleQueue()
        threading.Thread(target=self._send_all, daemon=True, name="stage-giver").start()

    def send(self, step: int, num_rows: int, parts: Sequence[Tensor]) -> None:
        slot = _get(self._free, self._stage, self._waiting)
        if slot is None:
            raise has_ended(self._stage)
        self._due.put(_Step(step, num_rows, lay(parts, slot), slot))

    def _send_all(self) -> None:
        # the only exception of gloo, whether the other end or the network is gone
        with suppress(RuntimeError):
            while (given := self._due.get()) is not None:
                self._send([given.step, given.num_rows, given.num_bytes])
                if given.num_bytes:
                    self._group.send([given.slot[: given.num_bytes]], TAKER, TAG).wait(LONG)
                self._free.put(given.slot)
            self._send([NO_STEP, 0, 0])
        self._free.put(None)

    def _send(self, numbers: list[int]) -> None:
        self._group.send([torch.tensor(numbers)], TAKER, TAG).wait(LONG)

    def close(self) -> None:
        self._due.put(None)


class NetworkTakingEnd:
    """Receiving end of a link over the network; see TakingEnd."""

    def __init__(self, group: Any, slot_bytes: int, num_slots: int, *, stage: int, waiting: Waiting) -> None:
        """Start to receive. group: gloo group of two ranks. stage: stage at the other end."""
        self._group, self._stage, self._waiting = group, stage, waiting
        self._free: queue.SimpleQueue[Tensor | None] = queue.SimpleQueue()
        for _ in range(num_slots):
            self._free.put(torch.empty(slot_bytes, dtype=torch.uint8))
        self._come: queue.SimpleQueue[_Step | None] = queue.SimpleQueue()
        self._taken: _Step | None = None
        threading.Thread(target=self._receive_all, daemon=True, name="stage-taker").start()

    def receive(self, step: int) -> int:
        self._taken = _get(self._come, self._stage, self._waiting)
        if self._taken is None:
            raise has_ended(self._stage)
        check_number(self._taken.step, step, self._stage)
        return self._taken.num_rows

    def _receive_all(self) -> None:
        header = torch.empty(3, dtype=torch.int64)
        with suppress(RuntimeError):
            while (slot := self._free.get()) is not None:
                self._group.recv([header], GIVER, TAG).wait(LONG)
                step, num_rows, num_bytes = header.tolist()
                if step == NO_STEP:
                    break
                if num_bytes:
                    self._group.recv([slot[:num_bytes]], GIVER, TAG).wait(LONG)
                self._come.put(_Step(step, num_rows, num_bytes, slot))
        self._come.put(None)

    def has_come(self) -> bool:
        return not self._come.empty()

    def slot(self) -> Tensor:
        assert self._taken is not None
        return self._taken.slot

    def let_go(self) -> None:
        self._free.put(self.slot())

    def close(self) -> None:
        self._free.put(None)


class _Step(NamedTuple):
    """A step that is being transferred."""

    step: int
    num_rows: int
    num_bytes: int
    slot: Tensor


def _get(source: queue.SimpleQueue[Any], stage: int, waiting: Waiting) -> Any:
    """Return the next item of a queue. The end mark, None, is put back for the next caller."""
    found: list[Any] = []

    def look(seconds: float) -> bool:
        with suppress(queue.Empty):
            found.append(source.get(timeout=seconds))
        return bool(found)

    waiting.until(look, stage)
    if found[0] is None:
        source.put(None)
    return found[0]
