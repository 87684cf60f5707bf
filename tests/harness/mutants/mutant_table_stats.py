"""Planted mistakes in the statistics of iterations: see tests.harness.mutants.mutant_table.
tests.harness.simulation.sim_stats counts them independently.
"""

from __future__ import annotations

from scheduler_proc.batching.prefill_adder import PrefillAdder
from scheduler_proc.core.lifecycle import Lifecycle
from scheduler_proc.observe.step_stats import StaticBatchCounts, StepStats
from tests.harness.mutants.mutant_table import Mutant
from tests.harness.mutants.mutant_table_batching import STATIC

IN_FLIGHT = {"batching": "inflight_fused", "capacity": "max_utilization", "request_scheduler": ""}
SHORT_OF_PAGES = IN_FLIGHT | {"page_size": 4, "num_pages": 22, "max_rows": 6, "max_len": 88, "max_output": 60}
DEEP = IN_FLIGHT | {"depth": 3, "feeds_back": True}

STATS_MUTANTS = [
    Mutant(
        "tokens of a retracted request not counted as computed again",
        Lifecycle,
        "retract",
        "req.computed_len = max(req.computed_len, req.kv_len)",
        "pass",
        0,
        changes=SHORT_OF_PAGES | {"conservativeness": 0.05},
    ),
    Mutant(
        "what is computed again counted from the start of the prompt",
        PrefillAdder,
        "_schedule",
        "max(start, req.computed_len)",
        "start",
        0,
        changes=SHORT_OF_PAGES | {"conservativeness": 0.05},
    ),
    Mutant(
        "context tokens of the next step",
        StepStats,
        "note_commit",
        "totals = launched.totals",
        "totals = (self._pending[0] if self._pending else launched).totals;"
        " launched = msgspec.structs.replace(launched, totals=totals)",
        0,
        changes=DEEP,
    ),
    Mutant(
        "one page is neither free nor used",
        StepStats,
        "_iteration_stats",
        "kv.pages.num_pages - done.num_free",
        "kv.pages.num_pages - done.num_free - 1",
        0,
    ),
    Mutant(
        "cached pages that nobody uses counted as used",
        StepStats,
        "note_commit",
        "self._kv.num_available",
        "self._kv.pages.num_free",
        0,
        changes={"cache": "radix"},
    ),
    Mutant(
        "who was admitted counted in every step after it",
        StepStats,
        "note_launch",
        "self._num_admitted = queue.num_added",
        "pass",
        0,
    ),
    Mutant(
        "a paused request that gets a row again counted as new",
        Lifecycle,
        "note_admitted",
        "if not req.num_retractions:",
        "if True:",
        1,
        changes=SHORT_OF_PAGES | {"conservativeness": 0.05},
    ),
    Mutant(
        "the waiting of those before added again",
        StepStats,
        "note_launch",
        "self._queue_s = queue.sum_s",
        "pass",
        0,
    ),
    Mutant(
        "the latency of a step from its launch, not from the end of the one before",
        StepStats,
        "note_commit",
        "max(launched.launched_s, self._ended_at)",
        "launched.launched_s",
        0,
        changes=DEEP,
    ),
    Mutant(
        "the step launched last taken for the one that ended",
        StepStats,
        "note_commit",
        "self._pending.popleft()",
        "self._pending.pop()",
        0,
        changes=DEEP,
    ),
    Mutant(
        "paused requests counted in the queue",
        StepStats,
        "note_commit",
        "len(lifecycle.room) - num_paused",
        "len(lifecycle.room)",
        0,
        changes=SHORT_OF_PAGES | {"conservativeness": 0.05},
    ),
    Mutant(
        "a paused request that is aborted paused for ever",
        Lifecycle,
        "_remove",
        "self.num_paused -= 1",
        "pass",
        0,
        changes=SHORT_OF_PAGES | {"conservativeness": 0.05, "turbulence": 1.0},
    ),
    Mutant(
        "who has ended counted again",
        StepStats,
        "note_commit",
        "self._num_completed = 0",
        "pass",
        0,
    ),
    Mutant(
        "context tokens of the batch before in a static batch",
        StaticBatchCounts,
        "take",
        "self._outputs, self._num_ctx_tokens = [], 0",
        "self._outputs = []",
        0,
        changes=STATIC,
    ),
]
