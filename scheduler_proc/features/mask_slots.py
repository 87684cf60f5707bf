"""MaskSlots: whose is which slot of the memory in which masks lie.

    take ──► a guided sequence's, until that ends
         ──► nobody's, but steps that were launched until then may still read it
         ──► free, once they are committed

The grammar process writes a sequence's next mask when it is told a token, which is when the step that read
the mask before is committed. So one slot is enough for a sequence.
"""

from __future__ import annotations

from collections import deque

from runtime.base.mask_memory import MaskMemory

NO_SLOT = -1


class MaskSlots:
    def __init__(self, memory: MaskMemory, num_slots: int) -> None:
        self.memory = memory
        self._free = list(range(num_slots - 1, -1, -1))
        """The one that was used last is taken first: its pages are there."""
        self._leaving: deque[tuple[int, int]] = deque()
        """Slots that are still read, as (step after which it is free, slot)."""
        self._launched = 0
        self._committed = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def memory_name(self) -> str:
        return self.memory.name

    def take(self) -> int:
        """Return a slot that nobody uses; NO_SLOT when there is none."""
        return self._free.pop() if self._free else NO_SLOT

    def let_go(self, slot: int) -> None:
        """Give back a slot whose sequence has ended, or whose writer has."""
        if slot != NO_SLOT:
            self._leaving.append((self._launched, slot))
            self._reuse()

    def note_launch(self, step: int) -> None:
        """A step is about to be told slots."""
        self._launched = step

    def note_commit(self, step: int) -> None:
        """A step has been computed, and all before it."""
        self._committed = step
        self._reuse()

    def _reuse(self) -> None:
        while self._leaving and self._leaving[0][0] <= self._committed:
            self._free.append(self._leaving.popleft()[1])
