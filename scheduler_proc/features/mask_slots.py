"""MaskSlots: allocator of slots in the shared memory for masks. A sequence has adjacent slots: one for its
next token, and one behind each of its guesses.

    take ──► slots of a guided sequence, until it ends
         ──► slots of nobody, which steps launched until then may still read
         ──► free, once these steps are committed

The grammar process writes a sequence's next masks when it is sent a token, which is after the step that read
the earlier masks was committed, or guesses, at a time when no valid step reads any. So one slot for each
position is enough. A step whose row was retracted may read a mask that is written for another sequence; the
token that it samples is dropped.
"""

from __future__ import annotations

from collections import deque

from runtime.base.mask_memory import MaskMemory

NO_SLOT = -1


class MaskSlots:
    def __init__(self, memory: MaskMemory, num_sequences: int, width: int = 1) -> None:
        """width: slots for each sequence. The memory has `num_sequences * width` slots."""
        self.memory = memory
        self.width = width
        self._free = list(range((num_sequences - 1) * width, -1, -width))
        """First slots of free groups. The group that was used last is taken first, because its memory is
        mapped already.
        """
        self._leaving: deque[tuple[int, int]] = deque()
        """Slots that may still be read, as (step after which they are free, first slot)."""
        self._launched = 0
        self._committed = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def memory_name(self) -> str:
        return self.memory.name

    def take(self) -> int:
        """Return the first of `width` free slots; NO_SLOT if there are none."""
        return self._free.pop() if self._free else NO_SLOT

    def let_go(self, slot: int) -> None:
        """Free the slots of a sequence once no step reads them: it has ended, or its grammar process has."""
        if slot != NO_SLOT:
            self._leaving.append((self._launched, slot))
            self._reuse()

    def note_launch(self, step: int) -> None:
        """Record that a step is about to be launched with slot numbers."""
        self._launched = step

    def note_commit(self, step: int) -> None:
        """Record that a step, and all before it, has been computed."""
        self._committed = step
        self._reuse()

    def _reuse(self) -> None:
        while self._leaving and self._leaving[0][0] <= self._committed:
            self._free.append(self._leaving.popleft()[1])
