"""Planted mistakes of guided rows, whose masks come late or not: see tests.harness.mutants.mutant_table."""

from __future__ import annotations

from scheduler_proc.batching.prefill_adder import PrefillAdder
from scheduler_proc.committer import Committer
from scheduler_proc.features.grammar_client import GrammarClient
from scheduler_proc.features.guided import Guided
from scheduler_proc.features.mask_slots import MaskSlots
from scheduler_proc.intake.intake import Intake
from tests.harness.mutants.mutant_table import Mutant

GUIDES = {"guided": 0.7, "late": 0.3, "max_iterations": 1}

GUIDE_MUTANTS = [
    Mutant(
        "the mask of an earlier token taken for that of the next",
        GrammarClient,
        "wait_for",
        "return sequence.is_current",
        "return True",
        0,
        changes=GUIDES,
    ),
    Mutant(
        "a token drawn without its mask that is late",
        Committer,
        "masks",
        "self.lifecycle.retract(req)",
        "pass",
        0,
        changes=GUIDES,
    ),
    Mutant(
        "a matcher opened again without the output that there is",
        GrammarClient,
        "_open",
        "sequence.output_ids",
        "b''",
        0,
        changes=GUIDES,
    ),
    Mutant(
        "matchers not opened again",
        GrammarClient,
        "take_news",
        "self._open_again()",
        "pass",
        0,
        changes=GUIDES,
    ),
    Mutant(
        "a matcher of a sequence that has ended kept",
        GrammarClient,
        "close",
        "self._outbox.send(CloseMatcher(handle))",
        "pass",
        0,
        changes=GUIDES,
    ),
    Mutant(
        "a slot given away while steps that were told it may read it",
        MaskSlots,
        "let_go",
        "self._launched",
        "0",
        0,
        changes=GUIDES,
    ),
    Mutant(
        "a slot written by the next grammar process while a step reads it",
        GrammarClient,
        "_open_again",
        "self._let_go(handle)",
        "self.slots._free.append(self._slot_of.pop(handle))",
        0,
        changes=GUIDES,
    ),
    Mutant(
        "a mask believed that a dead grammar process has told",
        GrammarClient,
        "_open_again",
        "sequence.state = None",
        "pass",
        0,
        changes=GUIDES,
    ),
    Mutant(
        "a mask taken from another slot than the sequence's",
        GrammarClient,
        "_may_read",
        "== self._slot_of.get(state.handle)",
        ">= 0",
        20,
        changes={**GUIDES, "guided": 0.9, "late": 0.6},
    ),
    Mutant(
        "a slot of a sequence that has ended kept",
        GrammarClient,
        "close",
        "self._let_go(handle)",
        "pass",
        0,
        changes=GUIDES,
    ),
    Mutant(
        "ids of a step not told",
        GrammarClient,
        "_send_ids",
        "tuple(self._new_ids)",
        "tuple(self._new_ids[:1])",
        5,
        changes=GUIDES,
    ),
    Mutant(
        "a complete output goes on",
        Guided,
        "_mask",
        "return NoMask.COMPLETE",
        "return mask.tobytes()",
        0,
        changes=GUIDES,
    ),
    Mutant(
        "a stop id within an output that is not complete",
        Guided,
        "_mask",
        "_without(mask, self._own_stops)",
        "mask",
        0,
        changes=GUIDES,
    ),
    Mutant(
        "a complete output that may not stop",
        Guided,
        "_mask",
        "self._stops if may_stop else",
        "self._stops[:0] if may_stop else",
        0,
        changes=GUIDES,
    ),
    Mutant(
        "allowed ids beside a guide forgotten",
        Guided,
        "_mask",
        "_both(mask, self._allowed), _both(stops, self._allowed)",
        "mask, stops",
        0,
        changes=GUIDES,
    ),
    Mutant(
        "guesses verified with the mask of the first",
        PrefillAdder,
        "_plan_features",
        "scheduled.guesses = ()",
        "pass",
        0,
        changes=GUIDES,
    ),
    Mutant(
        "the refusal of a guide passed over",
        Intake,
        "_guide_refused",
        "req is not None",
        "False",
        0,
        changes=GUIDES,
    ),
]
