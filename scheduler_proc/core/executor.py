"""Executor: interface of the component that runs the model for the scheduler. Implementations are in the
model worker; this module imports none of them.
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
        """Return the step's result, waiting until it is done. Raises ExecutorError when the worker failed or
        is gone.
        """

    def done(self) -> bool:
        """True if `result` would return at once."""

    def waits_for_masks(self) -> bool:
        """Return True if the worker is known to have nothing to compute until the masks of this step come.
        Never blocks.
        """

    @property
    def frames(self) -> tuple[Frame, ...]:
        """Return the raw logits that the result's `tensors` describe, one frame each. Valid once `result` has
        returned. Their memory does not change while a reference to it is held.
        """


Handle = TypeVar("Handle", bound=StepHandle)


class Executor(Protocol[Handle]):
    """Runs plans strictly in the order of their launch."""

    max_in_flight: int
    """Number of steps launched before one must be committed: 1 = no overlap, 2 = overlap, P + 1 = a pipeline
    of P stages with overlap.
    """
    feeds_back: bool
    """True if a token sampled by one step reaches the next step of its row on the device (FutureMap). A plan
    may then contain -1 for it.
    """

    def launch(self, plan: BatchPlan) -> Handle:
        """Launch a step without waiting for it. Raises ExecutorError when the worker is gone."""

    def sample(self, handle: Handle, masks: SampleMasks) -> None:
        """Send the masks to a step whose plan says `defer_sampling`. Call it exactly once for each
        such step.
        """

    def close(self) -> None:
        """Stop the worker; steps in flight may be lost."""


AnyExecutor: TypeAlias = Executor[Any]
"""Type of an executor in code that passes it only handles that it returned."""


class AdapterDevice(Protocol):
    """Executor whose worker has slots for adapters."""

    def load_adapter(self, slot: int, ref: AdapterRef) -> None:
        """Start to load an adapter into a slot, replacing the one there; does not wait. Plans launched
        earlier use the old adapter. Plans may use the slot once the load is reported as done.
        """

    def drop_adapter(self, slot: int) -> None:
        """Free the memory of a slot, which no plan launched from now on uses."""

    def adapter_answers(self) -> Sequence[AdapterLoaded | AdapterFailed]:
        """Return and clear the results of loads since the last call: one answer for each load, combined over
        all ranks.
        """
