"""Parts of tests of tenants: a system with two tenants, and their requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from runtime.ring.tenants import Tenant, TenantLimits, Tenants
from runtime.wire.messages import ErrorInfo, TokenizedRequest
from scheduler_proc.intake.limits import QueueShare
from tests.harness.scheduler.scheduler_parts import message, running
from tests.harness.simulation.sim_system import System

PROMPT = [1, 2, 3, 4, 6]


@contextmanager
def limited(*, share: QueueShare | None = None, changes: Any = None, **limits: Any) -> Iterator[System]:
    """A system with a tenant `a` of these limits, and one `b` without any."""
    with running(**(changes or {})) as system:
        system.lifecycle.room.change_tenants(Tenants((of("a", **limits), of("b"))))
        if share is not None:
            intake = system.scheduler.intake
            intake.maker.tenant_limits._share = share
        yield system


def of(name: str, **limits: Any) -> Tenant:
    return Tenant(name, "user", TenantLimits(**limits))


def a(number: int, tokens: list[int] = PROMPT, **fields: Any) -> TokenizedRequest:
    return message(number, tokens, **{"tenant": "a", "client": 1, **fields})


def b(number: int, tokens: list[int] = PROMPT, **fields: Any) -> TokenizedRequest:
    return a(number, tokens, **{"tenant": "b", **fields})


def send(system: System, *requests: Any) -> None:
    for each in requests:
        system.inbox.send(each)
    system.step()


def error_of(system: System, request: TokenizedRequest) -> ErrorInfo | None:
    """Why it was refused; None: it was not."""
    closed = system.detokenizer.closed.get(request.handle)
    return None if closed is None else closed.error


def refused(system: System, *requests: TokenizedRequest) -> list[bool]:
    errors = [error_of(system, request) for request in requests]
    assert all(e is None or (e.status, e.code) == (429, "rate_limit_exceeded") for e in errors)
    assert all(error is None or error.retry_after_s > 0.0 for error in errors)
    return [error is not None for error in errors]
