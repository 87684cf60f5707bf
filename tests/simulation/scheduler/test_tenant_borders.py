"""Borders between tenants: sequences of others, and whom the scheduler answers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from runtime.ring.tenants import OWNER, Tenant, Tenants
from runtime.wire.messages import AbortRequest, ControlRequest, ErrorInfo
from scheduler_proc.waiting.account import MINUTE_S
from tests.harness.scheduler.scheduler_parts import run_until_idle, running
from tests.harness.scheduler.tenant_parts import PROMPT, a, b, limited, send

# -- other tenants' sequences ------------------------------------------------------------------------------


def test_an_abort_ends_only_what_is_the_tenants_own_and_the_owners_ends_all() -> None:
    with limited() as system:
        own, other, owners = a(1, max_tokens=30), b(2, max_tokens=30), a(3, max_tokens=30, tenant=OWNER)
        send(system, own, other, owners)
        handles = tuple(each.handle for each in (own, other, owners))
        send(system, AbortRequest(handles, tenant="a"))
        assert [each.handle in system.detokenizer.closed for each in (own, other, owners)] == [
            True,
            False,
            False,
        ]
        send(system, AbortRequest(client=1, tenant="b"))
        assert [each.handle in system.detokenizer.closed for each in (own, other, owners)] == [
            True,
            True,
            False,
        ]
        send(system, later := b(4, max_tokens=30))
        send(system, AbortRequest(client=1))
        assert {later.handle, owners.handle} <= system.detokenizer.closed.keys()
        system.check_empty()


def test_an_abort_that_comes_first_is_the_tenants_own_or_the_owners() -> None:
    with limited() as system:
        requests = [a(1), a(2), a(3)]
        for request, tenant in zip(requests, ("b", "a", OWNER), strict=True):
            send(system, AbortRequest((request.handle,), tenant=tenant))
        run_until_idle(system, *requests)
        reasons = [system.detokenizer.closed[each.handle].reason for each in requests]
        assert reasons == ["length", "abort", "abort"]


def test_a_tenant_takes_the_place_of_no_other_tenants_sequence() -> None:
    with limited() as system:
        victim = a(1, max_tokens=20)
        send(system, victim)
        run_until_idle(system, a(1, attempt=1, tenant="b"), a(1, attempt=2, tenant="b", is_again=True))
        assert list(system.detokenizer.closed) == [victim.handle]
        assert system.detokenizer.closed[victim.handle].reason == "length"
        assert len(system.detokenizer.tokens[victim.handle]) == 20


# -- who may ask -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "op",
    [
        *("server_info", "flush_cache", "iteration_stats", "request_stats", "pause_generation"),
        *("continue_generation", "start_profile", "stop_profile", "snapshot"),
    ],
)
@pytest.mark.parametrize("role", ["user", "metrics", "admin"])
def test_only_an_admin_is_answered(op: Any, role: Any) -> None:
    with running() as system:
        system.lifecycle.room.change_tenants(Tenants((Tenant("a", role),)))
        for tenant in ("a", "unknown"):
            send(system, ControlRequest(1, 1, op, tenant=tenant))
        for reply, its_role in zip(system.detokenizer.replies, (role, "user"), strict=True):
            if its_role == "admin":
                assert b"permission_denied" not in bytes(reply.body)
                continue
            assert not reply.ok
            assert msgspec.msgpack.decode(reply.body, type=ErrorInfo) == ErrorInfo(
                f"{op} needs the role admin; this key has the role {its_role}", "permission_denied", None, 403
            )
        if role != "admin":
            assert not system.scheduler.controls.is_paused


def test_server_info_counts_by_tenant() -> None:
    with limited(max_running=1) as system:
        send(system, *[a(number, max_tokens=20) for number in range(3)], b(5, max_tokens=20))
        for _ in range(4):
            system.step()
        send(system, ControlRequest(7, 1, "server_info"))
        info = msgspec.msgpack.decode(system.detokenizer.replies[-1].body)
        assert info["num_waiting"] == 2
        assert info["queued_tokens"] == 2 * len(PROMPT)
        assert info["tenants"]["a"] == {
            "num_running": 1,
            "num_waiting": 2,
            "tokens_this_minute": 3 * 5 + 5,
            "num_tokens": 3 * 5 + 5,
        }
        assert info["tenants"]["b"]["num_running"] == 1
        run_until_idle(system)
        assert system.lifecycle.accounts.figures()["b"]["num_tokens"] == 25
        system.pass_time(MINUTE_S)
        assert system.lifecycle.accounts.figures()["b"]["tokens_this_minute"] == 0


def test_who_has_gone_and_has_no_entry_is_forgotten() -> None:
    with limited() as system:
        run_until_idle(system, a(1, tenant="far"), a(2))
        assert set(system.lifecycle.accounts.figures()) == {"a", "b", "far"}
        system.pass_time(2 * MINUTE_S)
        system.lifecycle.accounts.settle()
        assert set(system.lifecycle.accounts.figures()) == {"a", "b"}
