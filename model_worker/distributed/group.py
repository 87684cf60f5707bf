"""RankGroup: collective operations of the ranks of one model. Every rank makes the same calls in the same
order.

On a CPU a call raises GroupError on every rank when one of them has ended or does not come; the group is then
unusable. On CUDA a call is only a launch: the device waits, and the launcher or torch ends the processes.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from runtime.base.errors import ExecutorError

# Ranks compute the same plan, so they come to a call within milliseconds of each other; what takes long, such
# as loading, comes before the first one, which has the time of a start. Arbitrary.
LATE_S = 60.0


class GroupError(ExecutorError):
    """A rank has ended, or has not come to a call in time; the message names it."""


class RankGroup(Protocol):
    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' x, with the same bits on each; may reuse x's memory. x must be
        contiguous.
        """

    def gather(self, x: Tensor, width: int, out: Tensor | None = None) -> Tensor | None:
        """Join all ranks' x [n, m] side by side in rank order, and return the first `width` columns [n,
        width] on rank 0, in `out` if it is given; None on other ranks.
        """

    def broadcast(self, x: Tensor) -> Tensor:
        """Return rank 0's x, which has the same shape and dtype on all ranks; may reuse x's memory."""

    def smallest(self, number: int) -> int:
        """Return the smallest of all ranks' numbers. Waits as long as a start may take, because others may
        still be loading.
        """

    def close(self) -> None: ...


class SoloGroup:
    """Group of a single rank."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor, width: int, out: Tensor | None = None) -> Tensor | None:
        return x[:, :width] if out is None else out.copy_(x[:, :width])

    def broadcast(self, x: Tensor) -> Tensor:
        return x

    def smallest(self, number: int) -> int:
        return number

    def close(self) -> None:
        """Do nothing: the group holds no resources."""


SOLO = SoloGroup()
