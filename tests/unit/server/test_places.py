"""Sequences of an HTTP process: how many each tenant may have, and what one beyond is told."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from carousel.server.tenancy.places import Places
from runtime.base.errors import InvalidRequest, Overloaded, RateLimited, RequestError
from runtime.ring.tenants import THE_OWNER, Tenant, TenantLimits
from runtime.settings.config import RuntimeConfig

CONFIG = RuntimeConfig(max_running_requests=8, max_queued_requests=32)
ALICE, BOB = Tenant("alice"), Tenant("bob")


def places(*, has_tenants: bool = True, is_alone: bool = True) -> Places:
    return Places(CONFIG, lambda: has_tenants, lambda: is_alone)


def refusal(held: Places, tenant: Tenant, num_sequences: int) -> RequestError:
    with pytest.raises(RequestError) as refused, held.hold(tenant, num_sequences):
        pass
    return refused.value


def test_without_keys_one_caller_may_have_all_that_there_is() -> None:
    held = places(has_tenants=False)
    with held.hold(THE_OWNER, 30), held.hold(THE_OWNER, 10):
        error = refusal(held, THE_OWNER, 1)
        assert (type(error), error.code) == (Overloaded, "client_overloaded")
    with held.hold(THE_OWNER, 40):
        pass
    error = refusal(held, THE_OWNER, 41)
    assert isinstance(error, InvalidRequest)
    assert "this server runs and queues 40 at most" in error.message


def test_where_the_ring_has_other_clients_a_quarter_of_its_queue_is_theirs() -> None:
    held = places(has_tenants=False, is_alone=False)
    with held.hold(THE_OWNER, 32):
        assert type(refusal(held, THE_OWNER, 1)) is Overloaded
    with held.hold(THE_OWNER, 40):
        pass  # nobody else waits for what there is


def test_a_tenant_that_has_its_share_is_told_so_and_another_finds_room() -> None:
    held = places()
    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(held.hold(ALICE, 8))
        error = refusal(held, ALICE, 1)
        assert isinstance(error, RateLimited)
        assert (error.status, error.code) == (429, "rate_limit_exceeded")
        assert "32 sequences of this API key" in error.message
        with held.hold(BOB, 4):
            pass
        # What is not its own doing is no limit of its key.
        assert type(refusal(held, BOB, 8)) is Overloaded
        for _ in range(7):
            stack.enter_context(held.hold(BOB, 1))
        assert isinstance(refusal(held, BOB, 1), RateLimited)
        stack.enter_context(held.hold(Tenant("carol"), 1))
    with held.hold(ALICE, 32):
        pass
    assert "this API key may have 32 at most" in refusal(held, ALICE, 33).message


def test_places_come_back_as_sequences_end() -> None:
    held = places()
    with held.hold(ALICE, 32) as own:
        own.give_back(3)
        with held.hold(ALICE, 3):
            assert isinstance(refusal(held, ALICE, 1), RateLimited)
    with held.hold(ALICE, 32):
        pass


def test_what_a_key_may_have_running_and_waiting_is_counted_here_too() -> None:
    held = places()
    small = Tenant("small", limits=TenantLimits(max_running=2, max_waiting=3))
    with held.hold(small, 4):
        assert isinstance(refusal(held, small, 2), RateLimited)
        with held.hold(small, 1):
            pass
    assert isinstance(refusal(held, small, 6), InvalidRequest)
    assert held.most_at_once(small, 32) == 3
    assert held.most_at_once(ALICE, 24) == 24
    assert held.most_at_once(ALICE, 1000) == 32
