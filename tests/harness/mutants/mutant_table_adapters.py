"""Planted mistakes with adapters and their slots."""

from __future__ import annotations

from typing import Any

from scheduler_proc.capacity.slots import SlotPool
from scheduler_proc.core.request import Request
from scheduler_proc.scheduler import Scheduler
from tests.harness.mutants.mutant_table import Mutant
from tokenizer_proc import sequences

WITH_ADAPTERS = {"has_adapters": True}
MODULE: Any = sequences

ADAPTER_MUTANTS = [
    Mutant(
        "a leased slot evicted",
        SlotPool,
        "_room",
        "not slot.num_leases",
        "True",
        0,
        WITH_ADAPTERS,
    ),
    Mutant(
        "a row planned before its adapter is ready",
        SlotPool,
        "_try_load",
        "slot.is_ready = self.device is None",
        "slot.is_ready = True",
        0,
        WITH_ADAPTERS,
    ),
    Mutant(
        "a namespace without the adapter's version",
        MODULE,
        "namespace",
        "each.version, ",
        "",
        7,
        WITH_ADAPTERS,
    ),
    Mutant(
        "a row whose slot the device is not told",
        Request,
        "row_setup",
        "adapter_slot=self.adapter_slot",
        "adapter_slot=-1",
        0,
        WITH_ADAPTERS,
    ),
    Mutant(
        "a stay with the slot of the one before",
        Request,
        "row_setup",
        "adapter_slot=self.adapter_slot",
        "adapter_slot=min(self.adapter_slot, 0)",
        0,
        WITH_ADAPTERS,
    ),
    Mutant(
        "what has been loaded is never heard of",
        Scheduler,
        "_receive_adapters",
        "slots.num_loading",
        "False",
        0,
        WITH_ADAPTERS,
    ),
]
