"""Interfaces of the two ends of a link from one pipeline stage to the next, whatever transports the data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from model_worker.distributed.group import GroupError
from model_worker.distributed.shared_memory import SLICE_S


class GivingEnd(Protocol):
    def send(self, step: int, num_rows: int, parts: Sequence[Tensor]) -> None:
        """Send a step's tensors, one after the other. They may change afterwards. Waits while the receiving
        stage has no free slot. Raises GroupError.
        """

    def close(self) -> None: ...


class TakingEnd(Protocol):
    def receive(self, step: int) -> int:
        """Wait for the step, and return how many rows it has. The data is in `slot`. Raises GroupError."""

    def has_come(self) -> bool:
        """Return True if a step has arrived that was not received yet."""

    def slot(self) -> Tensor:
        """Return the bytes of the step that was received last, which stay until `let_go`."""

    def let_go(self) -> None:
        """Release the slot of the step that was received last. Raises GroupError."""

    def close(self) -> None: ...


class Waiting(NamedTuple):
    """Settings of a stage that waits for another one."""

    on_wait: Callable[[], None]
    """Called about every SLICE_S while waiting."""
    patience_s: float

    def until(self, look: Callable[[float], bool], stage: int) -> None:
        """Return when `look`, which gets the seconds to look for, returns True. Slices are counted (see
        SharedMemoryGroup). Raises GroupError when it takes too long.
        """
        for _ in range(max(1, round(self.patience_s / SLICE_S))):
            if look(SLICE_S):
                return
            self.on_wait()
        raise GroupError(f"pipeline stage {stage} has not come to a step within {self.patience_s:g} s")


def has_ended(stage: int) -> GroupError:
    """Return the error for a stage whose process is gone."""
    return GroupError(f"pipeline stage {stage} has ended")


def check_number(number: int, step: int, stage: int) -> None:
    """Raise GroupError if a stage has sent another step than the expected one."""
    if number != step:
        raise GroupError(f"pipeline stage {stage} gave step {number} where step {step} was due")
