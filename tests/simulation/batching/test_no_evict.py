"""GUARANTEED_NO_EVICT and STATIC_BATCH: the peak estimate, the guard of growth, and what they promise."""

from __future__ import annotations

import pytest

from scheduler_proc.cache.kv_cache_manager import KVCacheManager
from scheduler_proc.capacity.no_evict import GuaranteedNoEvict, Outlook, StaticBatch
from scheduler_proc.core.request import Request
from tests.harness.scheduler.scheduler_parts import manager, message, request, running, seat


def promised(kv: KVCacheManager, capacity: GuaranteedNoEvict, req: Request) -> bool:
    prefix = kv.match(req)
    kv.cache.lock(prefix.node)
    fits = capacity.admits() and capacity.try_promise(req, prefix, 0)
    kv.cache.unlock(prefix.node)
    return fits


def test_the_peak_is_the_largest_sum_when_one_of_them_ends() -> None:
    kv = manager(num_pages=64, page_size=1)
    for number, (num_prompt, max_tokens) in enumerate([(10, 5), (4, 10), (1, 20)]):
        seat(kv, request(kv, number, [number] * num_prompt, max_tokens=max_tokens))
    # Ends after 20, 10 and 5 more tokens: (1) + 20, (1 + 4) + 2 * 10, (1 + 4 + 10) + 3 * 5.
    assert Outlook(kv).peak_pages() == 30
    assert Outlook(kv).final_pages() == 21 + 14 + 15


def test_requests_that_never_peak_together_run_together() -> None:
    kv = manager(num_pages=30, page_size=1)
    capacity = GuaranteedNoEvict(kv)
    for number, (num_prompt, max_tokens) in enumerate([(10, 5), (4, 10), (1, 20)]):
        req = request(kv, number, [number] * num_prompt, max_tokens=max_tokens)
        assert promised(kv, capacity, req), "the sum of their ends is 50, their peak 30"
        seat(kv, req)
    assert not promised(kv, capacity, request(kv, 9, [9] * 14, max_tokens=2))


def test_a_shared_prefix_counts_once_and_until_its_last_user_ends() -> None:
    kv = manager(num_pages=24, page_size=1, max_rows=4)
    stem = list(range(10))
    first = request(kv, 1, [*stem, 50], max_tokens=2)
    seat(kv, first)
    kv.publish_prefill(first)
    second = request(kv, 2, [*stem, 60], max_tokens=6)
    capacity = GuaranteedNoEvict(kv)
    assert promised(kv, capacity, second)
    seat(kv, second)
    assert Outlook(kv).final_pages() == 10 + 3 + 7
    assert Outlook(kv).pages_in_turn() == 10 + 7, "the second, once the first has ended"
    kv.release(first)
    assert Outlook(kv).final_pages() == 17


def test_who_fell_behind_waits_for_pages_and_keeps_its_row() -> None:
    """Two requests that never need more than 21 pages at one pace; here the second is held up."""
    kv = manager(num_pages=21, page_size=1, max_len=21)
    capacity = GuaranteedNoEvict(kv)
    ahead = request(kv, 1, [1], max_tokens=10)
    assert promised(kv, capacity, ahead)
    seat(kv, ahead)
    behind = request(kv, 2, [2] * 10, max_tokens=5)
    assert promised(kv, capacity, behind), "1 + 10 tokens, and 1 + 5 beside 10 + 5"
    seat(kv, behind)
    for num_tokens in range(2, 8):
        assert capacity.may_grow(ahead.row, num_tokens)
        assert kv.try_reserve(ahead, num_tokens)
    assert kv.num_available == 4
    assert not capacity.may_grow(behind.row, 11), (
        "four more for either of them, and three left: none could end"
    )
    assert capacity.may_grow(ahead.row, 8)


@pytest.mark.parametrize("policy", [GuaranteedNoEvict, StaticBatch])
def test_nobody_has_to_give_way(policy: type[GuaranteedNoEvict]) -> None:
    kv = manager()
    req = request(kv, 1, [1] * 4)
    seat(kv, req)
    assert policy(kv).victim([req]) is None


def test_a_static_batch_is_open_only_while_nothing_runs() -> None:
    kv = manager()
    capacity = StaticBatch(kv)
    assert capacity.admits()
    req = request(kv, 1, [1] * 4)
    seat(kv, req)
    assert not capacity.admits()
    kv.release(req)
    assert capacity.admits()


def test_under_overload_no_row_is_taken_back_and_the_pool_is_used() -> None:
    requests = [message(i, [i + 1] * 10, max_tokens=30) for i in range(6)]
    most = {}
    for capacity in ("guaranteed_no_evict", "max_utilization"):
        with running(num_pages=26, conservativeness=0.01, max_len=56, capacity=capacity) as system:
            for item in requests:
                assert system.inbox.send(item)
            most[capacity] = 0
            for _ in range(400):
                system.step()
                most[capacity] = max(most[capacity], system.rows.num_running)
            assert system.scheduler.is_idle
            assert (system.lifecycle.num_retracted == 0) == (capacity == "guaranteed_no_evict")
    assert most["guaranteed_no_evict"] >= 2
    assert most["max_utilization"] > most["guaranteed_no_evict"]


def test_a_head_that_does_not_fit_is_waited_for() -> None:
    with running(num_pages=12, max_len=48, capacity="guaranteed_no_evict") as system:
        small = message(1, [1] * 10, max_tokens=38)
        big = message(2, [2] * 10, max_tokens=38)
        third = message(3, [3] * 4, max_tokens=4)
        for item in (small, big, third):
            assert system.inbox.send(item)
        started: list[int] = []
        while not system.scheduler.is_idle or not started:
            system.step()
            started += [req.seq for req in system.rows.running_requests() if req.seq not in started]
        assert started == [1, 2, 3], "there was room for the third all the time"
