"""Planted mistakes in capacity, batching and order: see tests.harness.mutants.mutant_table."""

from __future__ import annotations

from scheduler_proc.batching.admission import Admission
from scheduler_proc.batching.batch_builder import BatchBuilder
from scheduler_proc.batching.chosen_batch import ChosenBatch
from scheduler_proc.batching.phases import InTurns, PromptsFirst
from scheduler_proc.batching.preemption import Preemption
from scheduler_proc.batching.prefill_adder import PrefillAdder
from scheduler_proc.capacity.max_utilization import MaxUtilization
from scheduler_proc.capacity.no_evict import GuaranteedNoEvict, Outlook, StaticBatch
from tests.harness.mutants.mutant_table import Mutant

# No row is ever taken back, pages are scarce, and rejected guesses make some requests slower than others.
TIGHT = {
    "capacity": "guaranteed_no_evict",
    "policy": "fcfs",
    "request_scheduler": "",
    "page_size": 4,
    "num_pages": 22,
    "max_rows": 8,
    "max_len": 88,
    "budget": 8,
    "max_output": 60,
    "refusal": 0.0,
    "turbulence": 0.0,
    "expiring": 0.0,
}
STATIC = {"capacity": "static_batch", "policy": "fcfs", "request_scheduler": "", "batching": "static"}
CHOSEN = {
    "capacity": "max_utilization",
    "policy": "fcfs",
    "batching": "inflight_fused",
    "request_scheduler": "tests.harness.models.stand_ins:RandomScheduler",
}
PREEMPTING = {"capacity": "max_utilization", "policy": "priority", "request_scheduler": "", "max_rows": 2}
IN_TURNS = {"batching": "inflight", "capacity": "max_utilization", "request_scheduler": ""}

BATCHING_MUTANTS = [
    Mutant(
        "newcomers overcommit the pool",
        MaxUtilization,
        "try_promise",
        "num_missing > room",
        "False",
        5,
    ),
    Mutant(
        "pages taken without asking who could still end",
        PrefillAdder,
        "_try_reserve",
        "not self._capacity.may_grow(req.row, upto)",
        "False",
        8,
        changes=TIGHT,
    ),
    Mutant(
        "growth never guarded", GuaranteedNoEvict, "try_promise", "= is_roomy\n", "= True\n", 8, changes=TIGHT
    ),
    Mutant(
        "the pages asked for not counted",
        GuaranteedNoEvict,
        "may_grow",
        "outlook.private += grown[self._rows.running]",
        "pass",
        8,
        changes=TIGHT,
    ),
    Mutant(
        "slack given out twice",
        GuaranteedNoEvict,
        "may_grow",
        "self._slack -= num_grown",
        "pass",
        8,
        changes=TIGHT,
    ),
    Mutant(
        "who ends last counted as the first to end",
        Outlook,
        "pages_in_turn",
        "np.argsort(-missing)",
        "np.argsort(missing)",
        0,
        changes=TIGHT,
    ),
    Mutant(
        "room for the prompt only",
        GuaranteedNoEvict,
        "try_promise",
        "kv.most_pages_of(req.num_tokens, req.max_len)",
        "kv.most_pages_of(req.num_tokens, req.num_tokens)",
        0,
        changes=TIGHT,
    ),
    Mutant(
        "what a preempted request found in the cache never given back",
        Preemption,
        "preempt",
        "self._kv.cache.unlock(prefix.node)",
        "pass",
        5,
        changes=PREEMPTING,
    ),
    Mutant(
        "a scheduler's choice taken for everybody",
        ChosenBatch,
        "_applied",
        "np.isin(ready, rows)",
        "ready >= 0",
        0,
        changes=CHOSEN,
    ),
    Mutant(
        "places in the queue taken before it changed",
        Admission,
        "_positions",
        "positions[req.seq]",
        "positions[req.seq] + 1",
        0,
        changes=CHOSEN,
    ),
    Mutant(
        "a newcomer joins a closed batch",
        StaticBatch,
        "admits",
        "return not self._rows.num_running",
        "return True",
        0,
        changes=STATIC,
    ),
    Mutant(
        "a forward of decodes is all there is",
        InTurns,
        "of",
        "yield second",
        "return",
        7,
        changes=IN_TURNS,
    ),
    Mutant(
        "prompts are for ever",
        PromptsFirst,
        "of",
        "yield ready[decodes], False",
        "return",
        1,
        changes=STATIC,
    ),
    Mutant(
        "the same requests in every step",
        BatchBuilder,
        "_longest_unserved",
        "self._served_at[chosen] = self._num_turns",
        "self._served_at[chosen] = -self._num_turns",
        14,
        changes=TIGHT | {"max_requests": 1},
    ),
    Mutant(
        "more requests in a step than may be",
        PrefillAdder,
        "_schedule",
        "self._request_budget -= 1",
        "pass",
        0,
        changes={"max_requests": 1},
    ),
]
