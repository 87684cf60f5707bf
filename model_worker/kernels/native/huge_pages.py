"""HugePages: allocates large weights in memory of 2 MiB pages, which is faster to read from one end to the
other. Without huge pages in the system, ordinary memory is used.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import torch
from torch import Tensor

LEAST_BYTES = 1 << 16  # minimum size of a weight to move: smaller ones are read from a cache
PAGE_BYTES = 1 << 21
CHUNK_BYTES = 1 << 28  # of addresses; memory is taken as pages are written
ALIGNMENT = 64
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class HugePages:
    """Allocator of adjacent pieces of memory from large chunks. A chunk is freed when no piece of it is in
    use.
    """

    def __init__(self, setting: Path = SETTING) -> None:
        """setting: the system's file that says whether programs may have huge pages."""
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._exist = setting.is_file() and "[never]" not in setting.read_text()
        self._taken: set[int] = set()

    def empty(self, num_bytes: int) -> Tensor:
        """Return num_bytes uninitialised bytes."""
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if size > CHUNK_BYTES // 2:
            return _chunk(size)[:num_bytes]
        if size > len(self._chunk):
            self._chunk = _chunk(CHUNK_BYTES)
        piece, self._chunk = self._chunk[:num_bytes], self._chunk[size:]
        return piece

    def start_over(self) -> None:
        """Give out nothing more of the memory so far, which goes back when all that lies in it is gone."""
        self._chunk = torch.empty(0, dtype=torch.uint8)

    def take(self, weight: Tensor, rows: int) -> None:
        """Move the contiguous weight [N, K] into huge pages, with room for `rows` rows. Does nothing for a
        small weight, for a part of a larger tensor (whose memory would stay allocated), and without huge
        pages.
        """
        row_bytes = weight.shape[1] * weight.element_size()
        is_part = weight.untyped_storage().nbytes() > rows * row_bytes
        if not self._exist or is_part or weight.nbytes < LEAST_BYTES:
            return
        # A separate storage, like that of a single tensor.
        piece = torch.frombuffer(self.empty(rows * row_bytes).numpy(), dtype=weight.dtype)
        weight.data = piece.view(rows, -1)[: len(weight)].copy_(weight)
        self._taken.add(weight.data_ptr())

    def has(self, weight: Tensor) -> bool:
        """Return True if the weight was moved into huge pages."""
        return weight.data_ptr() in self._taken


def _chunk(size: int) -> Tensor:
    """Return `size` bytes of new memory, aligned to a huge page."""
    memory = mmap.mmap(-1, size + PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    chunk = torch.frombuffer(memory, dtype=torch.uint8)
    first = -chunk.data_ptr() % PAGE_BYTES
    return chunk[first : first + size]
