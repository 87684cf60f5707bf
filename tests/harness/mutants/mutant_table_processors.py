"""Planted mistakes with rows that have logits processors: see tests.harness.mutants.mutant_table."""

from __future__ import annotations

from scheduler_proc.core.batch import ScheduleBatch
from scheduler_proc.features.logits_processors import Processed
from tests.harness.mutants.mutant_table import Mutant

PROCESSED = {"processed": 0.7}

PROCESSOR_MUTANTS = [
    Mutant(
        "processors told of tokens twice",
        Processed,
        "_unseen",
        "start, self._num_seen = self._num_seen, len(tokens)",
        "start = self._num_seen",
        0,
        changes=PROCESSED,
    ),
    Mutant(
        "processors told of tokens that the setup of the row has",
        Processed,
        "row_opened",
        "self._req.num_tokens",
        "self._req.num_tokens - 1",
        0,
        changes=PROCESSED,
    ),
    Mutant(
        "a processor that raises passed over",
        Processed,
        "accept",
        "if sampled.error:",
        "if False:",
        0,
        changes=PROCESSED,
    ),
    Mutant(
        "tokens drawn before processors have seen the last one",
        ScheduleBatch,
        "launch",
        "scheduled.make_masks is not None or scheduled.unseen is not None for",
        "scheduled.make_masks is not None for",
        0,
        changes=PROCESSED,
    ),
    Mutant(
        "processors told of rows that have another tenant",
        ScheduleBatch,
        "processed",
        "if scheduled.unseen is not None and is_held",
        "if scheduled.unseen is not None",
        4,
        changes=PROCESSED,
    ),
]
