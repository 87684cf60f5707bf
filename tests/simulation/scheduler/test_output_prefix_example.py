"""examples/output_prefix.py, the complete capability of docs/adding_a_feature.md, in the real scheduler."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from runtime.base.registry import resolve
from runtime.wire.messages import TokenizedRequest
from tests.harness.scheduler.scheduler_parts import SETTING, message, run_until_idle
from tests.harness.simulation.sim_system import System

attach_output_prefix = resolve("feature", "examples.output_prefix:attach_output_prefix", {})
PREFIX = (61, 5, 17)
PROMPTS = [[i + 1] * 9 for i in range(3)]


@contextmanager
def serving(prefix: tuple[int, ...] = PREFIX, **changes: Any) -> Iterator[System]:
    system = System(
        dataclasses.replace(SETTING, **changes),
        random.Random(0),
        (attach_output_prefix({"support": prefix}),),
    )
    try:
        yield system
    finally:
        system.executor.close()


def outputs(system: System, requests: list[TokenizedRequest]) -> list[list[int]]:
    run_until_idle(system, *requests)
    system.kv.check()
    return [system.detokenizer.tokens[each.handle] for each in requests]


def requests_of(*tenants: str, max_tokens: int = 8) -> list[TokenizedRequest]:
    return [message(i, PROMPTS[i], max_tokens=max_tokens, tenant=tenant) for i, tenant in enumerate(tenants)]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_answers_of_a_tenant_in_the_table_begin_with_its_prefix(depth: int) -> None:
    requests = requests_of("support", "", "support")
    with serving(prefix=(), depth=depth) as plain:
        without = outputs(plain, requests)
    with serving(depth=depth) as system:
        forced = outputs(system, requests)
    assert [tuple(each[:3]) == PREFIX for each in forced] == [True, False, True]
    assert [len(each) for each in forced] == [8, 8, 8]
    assert forced[1] == without[1]
    assert tuple(without[0][:3]) != PREFIX


def test_a_retracted_request_goes_on_behind_what_it_has_of_the_prefix() -> None:
    with serving() as roomy:
        expected = outputs(roomy, requests_of("support", "support", "support", max_tokens=40))
    with serving(num_pages=24, conservativeness=0.01) as tight:
        assert outputs(tight, requests_of("support", "support", "support", max_tokens=40)) == expected
        assert tight.lifecycle.num_retracted > 0


def test_a_request_that_allows_other_ids_only_is_refused() -> None:
    request = message(1, PROMPTS[0], tenant="support", sampling={"allowed_token_ids": (1, 2)})
    with serving() as system:
        run_until_idle(system, request)
        closed = system.detokenizer.closed[request.handle]
        assert system.executor.num_computed == 0
    assert closed.error is not None
    assert (closed.reason, closed.error.param) == ("error", "allowed_token_ids")
