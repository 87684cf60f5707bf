"""Hypotheses of searches that are followed all at once."""

from __future__ import annotations

from typing import Any

from grammar_proc.branches import Branches
from runtime.wire.hypotheses import BranchMatchers, BranchStates


def branched(branches: Branches, start: Any, message: BranchMatchers) -> BranchStates | None:
    """Follow all hypotheses of a message, from the matcher at the start of their guide."""
    branches.add(message)
    states = None
    while states is None and branches.has_work(message.handle):
        states = branches.step(start, message.handle)
    return states
