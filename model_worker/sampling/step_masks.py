"""MaskMap: masks of a step by row, from messages or from shared memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from runtime.base.mask_memory import MaskMemory
from runtime.wire.format import MaskBits
from runtime.wire.plan import SampleMasks


class MaskReader:
    """Keeps the shared memory of masks mapped. Only the rank that samples opens it; on other machines its
    name means nothing.
    """

    def __init__(self) -> None:
        self._memory: MaskMemory | None = None

    def read(self, name: str, slot: int) -> memoryview:
        """Return the mask in a slot. Raises OSError if the scheduler is gone."""
        if self._memory is None or self._memory.name != name:
            self._memory = MaskMemory.open(name)
        return self._memory.slot(slot)


class MaskMap(Mapping[int, Sequence[MaskBits]]):
    """Mapping from rows to masks (RowMasks) that looks masks up when they are applied."""

    def __init__(self, masks: SampleMasks, reader: MaskReader) -> None:
        self._masks: dict[int, list[bytes | int]] = {}
        for row, mask in masks.masks:
            self._masks.setdefault(row, []).append(mask)
        self._memory = masks.memory
        self._reader = reader

    def __getitem__(self, row: int) -> list[MaskBits]:
        return [
            self._reader.read(self._memory, mask) if isinstance(mask, int) else mask
            for mask in self._masks[row]
        ]

    def __iter__(self) -> Iterator[int]:
        return iter(self._masks)

    def __len__(self) -> int:
        return len(self._masks)

    def __contains__(self, row: object) -> bool:
        return row in self._masks
