"""Pipeline of stages in virtual time: the times at which each stage has computed each step."""

from __future__ import annotations

import random
from collections.abc import Callable

from runtime.wire.format import unpack_ids
from runtime.wire.plan import BatchPlan, StepResult
from tests.harness.simulation.fakes import FakeExecutor, FakeHandle


class VirtualPipe(FakeExecutor):
    """Stage s computes a step when it has computed the one before and stage s - 1 this one; the first one
    waits for tokens that a plan says are on the device. Time passes where the scheduler waits for a result.
    """

    num_stages: int
    spread: float
    """Part of its time that a stage takes more or less from step to step."""

    def begin(
        self, num_stages: int, spread: float, seed: int = 0, work: Callable[[BatchPlan], float] | None = None
    ) -> VirtualPipe:
        """Set the clock to 0. work: how long a stage takes for a step, 1 of time when not given."""
        self._work = work or (lambda _: 1.0)
        self.num_stages, self.spread = num_stages, spread
        self.now = 0.0
        self.ends = [0.0] * num_stages
        self.num_waited = 0
        self._random = random.Random(seed)
        self._token_at: dict[int, float] = {}
        self._ends_of: dict[int, float] = {}
        return self

    def launch(self, plan: BatchPlan) -> FakeHandle:
        rows, ids = unpack_ids(plan.rows).tolist(), unpack_ids(plan.input_ids)
        lens = [1] * plan.num_decodes + unpack_ids(plan.lens).tolist()
        starts_at, at = self.now, 0
        for row, n in zip(rows, lens, strict=True):
            if (ids[at : at + n] < 0).any():
                starts_at = max(starts_at, self._token_at[row])
            at += n
        work = self._work(plan)
        for stage in range(self.num_stages):
            lasts = work * (1.0 + self.spread * self._random.uniform(-1.0, 1.0))
            starts_at = self.ends[stage] = max(starts_at, self.ends[stage]) + lasts
        samples = [1] * plan.num_decodes + unpack_ids(plan.samples).tolist()
        self._token_at |= {row: starts_at for row, n in zip(rows, samples, strict=True) if n}
        handle = super().launch(plan)
        self._ends_of[id(handle)] = starts_at
        result = handle.result

        def wait() -> StepResult:
            self.now = max(self.now, self._ends_of.pop(id(handle)))
            return result()

        handle.result = wait  # type: ignore[method-assign]
        return handle
