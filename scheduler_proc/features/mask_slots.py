"""MaskSlots: whose are which slots of the memory in which masks lie. A sequence has some that lie side by
side: one for its next token, and one behind each of its guesses.

    take ──► a guided sequence's, until that ends
         ──► nobody's, but steps that were launched until then may still read them
         ──► free, once they are committed

The grammar process writes a sequence's next masks when it is told a token, which is when the step that read
the masks before is committed, or guesses, which is when no step that counts reads any. So one slot is enough
for a place. A step whose row was taken back may read what is written for another one: what it draws then is
dropped.
"""

from __future__ import annotations

from collections import deque

from runtime.base.mask_memory import MaskMemory

NO_SLOT = -1


class MaskSlots:
    def __init__(self, memory: MaskMemory, num_sequences: int, width: int = 1) -> None:
        """`width`: slots of a sequence. The memory has `num_sequences * width`."""
        self.memory = memory
        self.width = width
        self._free = list(range((num_sequences - 1) * width, -1, -width))
        """The one that was used last is taken first: its pages are there."""
        self._leaving: deque[tuple[int, int]] = deque()
        """Slots that are still read, as (step after which they are free, the first of them)."""
        self._launched = 0
        self._committed = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def memory_name(self) -> str:
        return self.memory.name

    def take(self) -> int:
        """Return the first of some slots that nobody uses; NO_SLOT when there are none."""
        return self._free.pop() if self._free else NO_SLOT

    def let_go(self, slot: int) -> None:
        """Give back the slots of a sequence that has ended, or whose writer has."""
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
