"""Memory in pages of 2 MiB, where the system gives them, for what is read from one end to the other."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch
from torch import Tensor

LEAST_BYTES = 1 << 16  # of what moves: less is read from a cache
PAGE_BYTES = 1 << 21
CHUNK_BYTES = 1 << 28  # of addresses; pages are taken as they are written
ALIGNMENT = 64
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class HugePages:
    """Memory that is given out piece by piece, one behind the other. What holds a piece keeps its chunk."""

    def __init__(self, setting: Path = SETTING) -> None:
        """setting: the system's, of who may have such pages."""
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._exist = setting.is_file() and "[never]" not in setting.read_text()
        self._taken: set[int] = set()

    def empty(self, num_bytes: int) -> Tensor:
        """Return so many bytes, uninitialised."""
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if size > CHUNK_BYTES // 2:
            return _chunk(size)[:num_bytes]
        if size > len(self._chunk):
            self._chunk = _chunk(CHUNK_BYTES)
        piece, self._chunk = self._chunk[:num_bytes], self._chunk[size:]
        return piece

    def take(self, weight: Tensor, rows: int) -> None:
        """Move weight [N, K], contiguous, here, with room for so many rows. Not where it is small or a part
        of a larger tensor, whose memory would stay, nor where the system has no huge pages.
        """
        row_bytes = weight.shape[1] * weight.element_size()
        is_part = weight.untyped_storage().nbytes() > rows * row_bytes
        if not self._exist or is_part or weight.nbytes < LEAST_BYTES:
            return
        # A storage of its own, as if it were alone.
        piece = torch.frombuffer(self.empty(rows * row_bytes).numpy(), dtype=weight.dtype)
        weight.data = piece.view(rows, -1)[: len(weight)].copy_(weight)
        self._taken.add(weight.data_ptr())

    def has(self, weight: Tensor) -> bool:
        """Tell whether the weight was moved here."""
        return weight.data_ptr() in self._taken


def _chunk(size: int) -> Tensor:
    """Bytes that begin where a page does."""
    memory = mmap.mmap(-1, size + PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    chunk = torch.frombuffer(memory, dtype=torch.uint8)
    first = -chunk.data_ptr() % PAGE_BYTES
    return chunk[first : first + size]
