"""RankGroup: what the ranks of one model do together. Every rank makes the same calls in the same order.

On a CPU a call ends with GroupError on every rank when one of them has ended or does not come; then the group
is over. On CUDA a call is a launch: the device waits, and the launcher or torch ends the processes.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from runtime.base.errors import ExecutorError

# Ranks compute the same plan, so they come to a call within milliseconds of each other; what takes long, such
# as loading, comes before the first one, which has the time of a start. Arbitrary.
LATE_S = 60.0


class GroupError(ExecutorError):
    """Error that names a rank which has ended, or has not come to a call in time."""


class RankGroup(Protocol):
    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' x, the same bits on each; may be in x's memory. x is contiguous."""

    def gather(self, x: Tensor, width: int, out: Tensor | None = None) -> Tensor | None:
        """The first `width` columns of all ranks' x [n, m] side by side, in the order of the ranks:
        [n, width], in `out` if it is given, on rank 0; None on the others.
        """

    def broadcast(self, x: Tensor) -> Tensor:
        """Return rank 0's x, whose shape and dtype are the other ranks' too; may be in x's memory."""

    def smallest(self, number: int) -> int:
        """Return the least of all ranks' numbers. Waits as long as a start may take: others may still be
        loading.
        """

    def close(self) -> None: ...


class SoloGroup:
    """The group of one."""

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
        """Do nothing: nothing is open."""


SOLO = SoloGroup()
