"""Requests with adapters in the real scheduler, over a worker that loads them while it computes."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import msgspec
import pytest

from runtime.wire.format import unpack_ids
from runtime.wire.messages import TokenizedRequest
from runtime.wire.plan import AdapterRef
from scheduler_proc.capacity.slots import MAX_PASSED
from scheduler_proc.observe.snapshot import SnapshotMaker
from tests.harness.scheduler.scheduler_parts import SETTING, message, run_until_idle, running
from tests.harness.simulation.fakes import BAD_ADAPTER
from tests.harness.simulation.sim_reference import Spec, reference
from tests.harness.simulation.sim_system import System
from tokenizer_proc.sequences import namespace


def adapter(name: str, version: str = "1", number: int = 0) -> AdapterRef:
    return AdapterRef(name, number or 1 + ord(name[0]), version, f"/adapters/{name}")


def with_adapter(number: int, name: str, num_tokens: int = 4, **fields: object) -> TokenizedRequest:
    return message(
        number,
        [number % 90] * 8,
        num_tokens,
        adapter=adapter(name),
        namespace=bytes(8) + name.encode(),
        **fields,
    )


def text_of(system: System, request: TokenizedRequest) -> list[int]:
    return system.detokenizer.tokens.get(request.handle, [])


def wanted(request: TokenizedRequest) -> list[int]:
    assert request.sampling.max_tokens is not None
    num_prompt = len(unpack_ids(request.input_ids))
    return reference(Spec(request, frozenset(), num_prompt + request.sampling.max_tokens))[0]


def test_rows_of_one_batch_have_their_own_adapters() -> None:
    requests = [message(1, [7] * 8), with_adapter(2, "a"), with_adapter(3, "b"), with_adapter(4, "a")]
    with running(has_adapters=True, num_slots=1) as system:
        run_until_idle(system, *requests)
        assert [text_of(system, each) for each in requests] == [wanted(each) for each in requests]
        assert system.slots.counts.num_loads == 2
        system.check_empty()


def test_an_adapter_without_slots_is_refused_by_name() -> None:
    request = with_adapter(1, "a")
    with running() as system:
        run_until_idle(system, request)
        error = system.detokenizer.closed[request.handle].error
        assert error is not None
        assert (error.code, error.status) == ("lora_not_enabled", 400)
        assert "--enable-lora" in error.message


def test_an_id_that_was_used_with_another_path_is_refused() -> None:
    first = with_adapter(1, "a")
    other = msgspec.structs.replace(
        with_adapter(2, "a"), adapter=msgspec.structs.replace(adapter("a"), path="/elsewhere")
    )
    with running(has_adapters=True, num_slots=1) as system:
        run_until_idle(system, first, other, with_adapter(3, "a"))
        error = system.detokenizer.closed[other.handle].error
        assert error is not None
        assert (error.param, error.status) == ("lora_request", 400)
        assert "another path" in error.message
        assert system.detokenizer.closed[first.handle].reason == "length"


def test_what_cannot_be_loaded_fails_its_requests_alone() -> None:
    bad = [with_adapter(number, BAD_ADAPTER) for number in (1, 2)]
    good = [with_adapter(3, "c"), message(4, [4] * 8)]
    with running(has_adapters=True, num_slots=1) as system:
        run_until_idle(system, *bad, *good)
        for each in bad:
            error = system.detokenizer.closed[each.handle].error
            assert error is not None
            assert (error.code, error.status) == ("invalid_adapter", 400)
        assert [text_of(system, each) for each in good] == [wanted(each) for each in good]


def test_300_requests_whose_adapter_cannot_come_do_not_hold_up_one_of_the_base() -> None:
    """One of two slots is loading, the other one is leased for long."""
    with running(has_adapters=True, num_slots=0, num_pages=400) as system:
        long = with_adapter(1, "a", 80)
        system.inbox.send(long)
        while not text_of(system, long):
            system.step()
        waiting = [with_adapter(2 + number, "b") for number in range(300)]
        base = message(500, [5] * 8)
        for each in (*waiting, base):
            system.inbox.send(each)
        system.step()
        system.step()
        assert not any(text_of(system, each) for each in waiting)
        assert text_of(system, base)
        shown = SnapshotMaker(system.lifecycle, system.port.now_s, system.port.wall_s).make().waiting
        assert set(shown.reason) == {"adapter"}


def passed(system: System, counts: Counter[int], running_before: set[int]) -> None:
    """Count for each that waits for an adapter those that came later, want one and got a row now."""
    new = [req for req in system.rows.running_requests() if req.seq not in running_before]
    for req in system.lifecycle.waiting:
        if req.adapter is not None:
            counts[req.seq] += sum(each.seq > req.seq for each in new if each.adapter is not None)


@pytest.mark.parametrize("num_live", [100, pytest.param(200, marks=pytest.mark.full)])
def test_three_adapters_in_turn_and_room_for_two(num_live: int) -> None:
    """So many requests live at any time, some of four sequences, with pages so short that rows are taken
    back.
    """
    rng = random.Random(3)
    setting = dataclasses.replace(
        SETTING, has_adapters=True, num_slots=1, num_pages=18, max_rows=8, budget=16, depth=2,
        max_passed=MAX_PASSED, conservativeness=0.05,
    )  # fmt: skip
    system = System(setting, random.Random(0))
    requests: list[TokenizedRequest] = []
    counts: Counter[int] = Counter()
    num_requests = num_live * 3 // 2
    while len(requests) < num_requests or not system.scheduler.is_idle:
        while len(requests) < num_requests and len(system.lifecycle.requests) < num_live:
            number = len(requests)
            request = with_adapter(number, "abc"[number // rng.choice([1, 4]) % 3], rng.randrange(4, 24))
            requests.append(request)
            system.inbox.send(request)
            break
        before = {req.seq for req in system.rows.running_requests()}
        system.step()
        passed(system, counts, before)
    system.executor.close()
    system.check_empty()
    assert [text_of(system, each) for each in requests] == [wanted(each) for each in requests]
    assert max(counts.values()) <= MAX_PASSED
    assert system.lifecycle.num_retracted
    assert 10 < system.slots.counts.num_loads < len(requests) / 4, "an adapter serves many once it is there"


def test_a_version_of_its_own_has_a_cache_of_its_own() -> None:
    """The prompt is the same; the second version reads nothing that the first one has computed."""

    def asked(number: int, ref: AdapterRef | None) -> TokenizedRequest:
        space = namespace("", "", b"secret", ref)
        return message(number, [9] * 40, adapter=ref, namespace=space)

    refs = [adapter("a"), adapter("a", "2"), adapter("b"), None]
    with running(has_adapters=True, num_slots=3) as system:
        for again in range(2):
            for index, ref in enumerate(refs):
                request = asked(10 * again + index, ref)
                run_until_idle(system, request)
                assert text_of(system, request) == wanted(request)
                assert system.detokenizer.closed[request.handle].cached_tokens == 36 * again
