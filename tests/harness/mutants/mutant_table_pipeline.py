"""Planted mistakes in a pipeline of stages: see tests.harness.mutants.mutant_table."""

from __future__ import annotations

from scheduler_proc.batching.micro_batches import MicroBatches
from scheduler_proc.core.batch import ScheduleBatch
from scheduler_proc.scheduler import Scheduler
from tests.harness.mutants.mutant_table import Mutant

PIPELINE = {"num_stages": 4, "feeds_back": True, "max_rows": 8, "request_scheduler": ""}

PIPELINE_MUTANTS = [
    Mutant(
        "tokens of two micro-batches exchanged",
        Scheduler,
        "_commit_oldest",
        "batch, handle = self.in_flight.popleft()",
        "batch, handle = self.in_flight.popleft()\n"
        "    if self.in_flight:\n"
        "        other, result = self.in_flight.popleft()\n"
        "        self.in_flight.appendleft((other, handle)); handle = result",
        0,
        changes=PIPELINE,
    ),
    Mutant(
        "a row in two micro-batches at once",
        MicroBatches,
        "_are_in_two_steps",
        "in_flight > 1",
        "in_flight > 2",
        2,
        changes=PIPELINE,
    ),
    Mutant(
        "an empty batch drains the pipe",
        Scheduler,
        "_commit_one",
        "max(0, len(self.in_flight) - 1)",
        "0",
        0,
        changes=PIPELINE,
    ),
    Mutant(
        "the first micro-batch is everybody",
        MicroBatches,
        "_share",
        "// self.num_stages",
        "// 1",
        0,
        changes=PIPELINE,
    ),
    Mutant(
        "a prompt behind the token of a young step",
        MicroBatches,
        "choose",
        "if len(decodes) == len(ready) and not others_wait:",
        "if True:",
        0,
        changes=PIPELINE,
    ),
    Mutant(
        "masks without the tokens before them",
        ScheduleBatch,
        "waits_for_tokens",
        "> 1",
        "> 9",
        0,
        changes=PIPELINE,
    ),
]
