"""Executor: the interface of whatever runs the model for the scheduler.
Implementations live in the model worker; this imports none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

from runtime.wire.plan import (
    AdapterFailed,
    AdapterLoaded,
    AdapterRef,
    BatchPlan,
    SampleMasks,
    StepResult,
)
from runtime.wire.transport import Frame


class StepHandle(Protocol):
    """One launched step."""

    def result(self) -> StepResult:
        """Wait until the step is done. Raises ExecutorError when the worker failed or is gone."""

    def done(self) -> bool:
        """True if `result` would return at once."""

    @property
    def frames(self) -> tuple[Frame, ...]:
        """The raw logits that the result's `tensors` describe, one frame each. Valid once `result` has
        returned; what they point to does not change for as long as somebody holds them.
        """


Handle = TypeVar("Handle", bound=StepHandle)


class Executor(Protocol[Handle]):
    """Runs plans strictly in the order of their launch."""

    max_in_flight: int
    """Number of steps launched before one must be committed: 1 = no overlap, 2 = overlap, P + 1 = a pipeline
    of P stages with overlap.
    """
    feeds_back: bool
    """True where a token sampled by one step reaches the next step of its row on the device (FutureMap), so a
    plan may say -1.
    """

    def launch(self, plan: BatchPlan) -> Handle:
        """Start a step; does not wait. Raises ExecutorError when the worker is gone."""

    def sample(self, handle: Handle, masks: SampleMasks) -> None:
        """Give a step whose plan says `defer_sampling` what it waits for; exactly once for each such step."""

    def close(self) -> None:
        """Stop the worker; steps in flight may be lost."""


AnyExecutor: TypeAlias = Executor[Any]
"""Type of an executor for code that hands it none but its own handles."""


class AdapterDevice(Protocol):
    """An executor whose worker has slots for adapters."""

    def load_adapter(self, slot: int, ref: AdapterRef) -> None:
        """Begin to read an adapter into a slot, in the place of the one there; does not wait. Plans launched
        before have the earlier one; the slot may be used by plans launched once it is said to be loaded.
        """

    def drop_adapter(self, slot: int) -> None:
        """Give back the memory of a slot, which no plan uses that is launched from now on."""

    def adapter_answers(self) -> Sequence[AdapterLoaded | AdapterFailed]:
        """Take what has become of loads since the last call: one answer to each, of all ranks together."""
