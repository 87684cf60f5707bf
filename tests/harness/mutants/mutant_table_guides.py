"""Planted mistakes with guided rows, whose masks come late or not at all: see
tests.harness.mutants.mutant_table.
"""

from __future__ import annotations

from scheduler_proc.batching.prefill_adder import PrefillAdder
from scheduler_proc.core.batch import ScheduleBatch
from scheduler_proc.core.rows import Rows
from scheduler_proc.core.sitting_rows import SittingRows
from scheduler_proc.features.grammar_client import GrammarClient
from scheduler_proc.features.guided import Guided
from scheduler_proc.features.logits_processors import Processed
from scheduler_proc.features.mask_slots import MaskSlots
from scheduler_proc.features.speculation.speculation import SpeculationSettings
from scheduler_proc.intake.intake import Intake
from scheduler_proc.mask_gatherer import MaskGatherer
from tests.harness.mutants.mutant_table import Mutant

GUIDES = {"guided": 0.7, "late": 0.3, "max_iterations": 1}

GUESSED = GUIDES | {"speculation": SpeculationSettings(True, 6)}

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
        MaskGatherer,
        "gather",
        "self.sitting.take_back(scheduled, batch)",
        "pass",
        0,
        changes=GUIDES,
    ),
    Mutant(
        "what a row left out of a step has drawn kept on the device",
        Rows,
        "undo",
        "self._setups[row] = req.row_setup(row)",
        "pass",
        1,
        changes=GUIDES,
    ),
    Mutant(
        "a result kept of a row that was left out of its step",
        ScheduleBatch,
        "leave_out",
        "= NO_STAY",
        "= self._stays[self.order == row]",
        0,
        changes=GUIDES,
    ),
    Mutant(
        "pages of guesses kept that an undone step would have verified",
        SittingRows,
        "take_back",
        "self._lifecycle.kv.give_back_rejected(np.array([row], np.intp))",
        "pass",
        5,
        changes=GUESSED,
    ),
    Mutant(
        "a row sits for the next one that holds it, too",
        Rows,
        "release",
        "self.join_again(row)",
        "pass",
        0,
        changes=GUIDES,
    ),
    Mutant(
        "processors not told that a step was undone",
        Processed,
        "step_undone",
        "self._num_seen = self._req.num_tokens",
        "pass",
        0,
        changes=GUIDES | {"processed": 0.7},
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
        1,
        changes=GUIDES,
    ),
    Mutant(
        "a slot given away while steps that were told it may read it",
        MaskSlots,
        "let_go",
        "self._launched",
        "0",
        32,
        changes=GUIDES,
    ),
    Mutant(
        "a slot written by the next grammar process while a step reads it",
        GrammarClient,
        "_open_again",
        "self._let_go(handle)",
        "self.slots._free.append(self._slot_of.pop(handle))",
        32,
        changes=GUIDES,
    ),
    Mutant(
        "a mask believed that a dead grammar process has told",
        GrammarClient,
        "_open_again",
        "sequence.begin_again()",
        "pass",
        14,
        changes=GUIDES,
    ),
    Mutant(
        "a mask taken from another slot than the sequence's",
        GrammarClient,
        "_may_read",
        "== self._slot_of.get(state.handle)",
        ">= 0",
        64,
        changes={**GUIDES, "guided": 0.9, "late": 0.6},
    ),
    Mutant(
        "a slot of a sequence that has ended kept",
        GrammarClient,
        "close",
        "self._let_go(handle)",
        "pass",
        1,
        changes=GUIDES,
    ),
    Mutant(
        "ids of a step not told",
        GrammarClient,
        "send_news",
        "tuple(self._news_to_send)",
        "tuple(self._news_to_send[:1])",
        5,
        changes=GUIDES,
    ),
    Mutant(
        "a complete output goes on",
        Guided,
        "_masks",
        "return NoMask.COMPLETE",
        "return [bytes(4)]",
        0,
        changes=GUIDES,
    ),
    Mutant(
        "a stop id within an output that is not complete",
        Guided,
        "_allowed_of",
        "_without(mask, self._own_stops)",
        "mask",
        0,
        changes=GUIDES,
    ),
    Mutant(
        "a complete output that may not stop",
        Guided,
        "_allowed_of",
        "self._stops if may_stop else",
        "self._stops[:0] if may_stop else",
        0,
        changes=GUIDES,
    ),
    Mutant(
        "allowed ids beside a guide forgotten",
        Guided,
        "_allowed_of",
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
        changes=GUESSED,
    ),
    Mutant(
        "masks of two places of a row exchanged",
        Guided,
        "_masks",
        "masks.append(allowed)",
        "masks.insert(0, allowed)",
        6,
        changes=GUESSED,
    ),
    Mutant(
        "a token kept that was drawn behind a complete output",
        Guided,
        "accept",
        "ids[: self._num_masked]",
        "ids",
        10,
        changes=GUESSED | {"late": 0.0},
    ),
    Mutant(
        "masks behind other guesses than a step verifies",
        Guided,
        "_is_of_now",
        "state.guesses == self._told",
        "True",
        60,
        changes=GUESSED | {"guided": 0.95},
    ),
    Mutant(
        "the end allowed behind guesses as before them",
        Guided,
        "_masks",
        "self._req.num_tokens + len(masks)",
        "self._req.num_tokens",
        174,
        changes=GUESSED | {"late": 0.0},
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
