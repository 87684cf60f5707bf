"""The simulation notices each planted mistake. `python -m tests.harness.mutants.mutants` hunts all of them
afresh.
"""

from __future__ import annotations

import logging

import pytest

from tests.harness.mutants.mutant_table import Mutant
from tests.harness.mutants.mutants import MUTANTS, try_catch

# Left to the hunt: it is noticed by a run that never ends.
SLOW = {"rejected guesses kept in the KV length"}


@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m.name not in SLOW], ids=lambda mutant: mutant.name)
def test_mutant_is_caught(mutant: Mutant, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    assert try_catch(mutant, mutant.seed) is not None, (
        "find a seed with `python -m tests.harness.mutants.mutants`"
    )
