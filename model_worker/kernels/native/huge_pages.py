"""Memory in pages of 2 MiB, where the system gives them, for what is read from one end to the other."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor

LEAST_BYTES = 1 << 22  # two of them: of less, most lies beside them


def move_to_huge_pages(weight: Tensor) -> None:
    """Give weight, contiguous, other memory, for which huge pages are asked. Not where it is small or a part
    of a larger tensor, whose memory would stay.
    """
    if weight.nbytes < LEAST_BYTES or weight.untyped_storage().nbytes() != weight.nbytes:
        return
    memory = mmap.mmap(-1, weight.nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # another system, or a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    weight.data = torch.frombuffer(memory, dtype=weight.dtype).view(weight.shape).copy_(weight)
