"""Accounts of a large table of tenants."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from runtime.ring.tenants import OWNER, Tenant, Tenants
from scheduler_proc.waiting.tenant_accounts import Accounts

NUM_TENANTS = 10_000
MAX_CPU_S = 2.0
"""Twenty times what it takes. It took 15 s and more, and no other request had a step meanwhile."""


def new_accounts() -> Accounts:
    rows: Any = SimpleNamespace(running_requests=list)
    return Accounts(rows, time.monotonic)


def test_a_table_of_very_many_tenants_is_applied_in_time_that_grows_with_their_number() -> None:
    accounts = new_accounts()
    began_s = time.thread_time()
    accounts.change(Tenants(tuple(Tenant(f"t{number}") for number in range(NUM_TENANTS))))
    assert time.thread_time() - began_s < MAX_CPU_S
    assert len(list(accounts)) == NUM_TENANTS


def test_there_are_several_tenants_once_one_that_is_not_in_the_table_has_come() -> None:
    accounts = new_accounts()
    accounts.change(Tenants((Tenant("alice"),)))
    accounts.of("alice")
    accounts.of(OWNER)
    assert not accounts.has_several()
    accounts.of("bob")
    assert accounts.has_several()
    accounts.settle()  # bob has nothing here
    assert not accounts.has_several()
