"""Planted mistakes with additional outputs: see tests.harness.mutants.mutant_table."""

from __future__ import annotations

from scheduler_proc.core.results import LooseResults
from scheduler_proc.features.generation_logits import GenerationLogits
from scheduler_proc.features.prompt_outputs import PromptOutputs
from tests.harness.mutants.mutant_table import Mutant

TAPPED = {"tapped": 0.7}

OUTPUT_MUTANTS = [
    Mutant(
        "a row of an output counted from the sequence's beginning",
        GenerationLogits,
        "accept",
        'TensorEntry(req.handle, name, "float32", shape, kept.start - req.num_prompt)',
        'TensorEntry(req.handle, name, "float32", shape, kept.start)',
        0,
        changes=TAPPED,
    ),
    Mutant(
        "rows of tokens that were cut off kept",
        GenerationLogits,
        "accept",
        "rows.upto(end - 1)",
        "rows.upto(end + 100)",
        5,
        changes=TAPPED,
    ),
    Mutant(
        "rows of a prompt given again to one who resumes",
        PromptOutputs,
        "__init__",
        "wants_context(req) and not req.num_output",
        "wants_context(req)",
        6,
        changes=TAPPED,
    ),
    Mutant(
        "rows of a prompt that the cache has left out",
        PromptOutputs,
        "__init__",
        "self._done_upto(0 if wants_rows else self._first)",
        "self._done_upto(0 if self._wants_logits else self._end if wants_rows else self._first)",
        0,
        changes=TAPPED,
    ),
    Mutant(
        "rows of one sequence given to the next in the batch",
        LooseResults,
        "take_next",
        "self._outputs.get((place, False), ())",
        "self._outputs.get((place - 1, False), ())",
        0,
        changes=TAPPED,
    ),
]
