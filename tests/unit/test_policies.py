"""Policies: the order they give, and what becomes of an order that is none."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from scheduler_proc.cache.kv_cache_manager import KVCacheManager
from scheduler_proc.policy.base import InvalidOrder, WaitingView, checked_order
from scheduler_proc.policy.fcfs import Fcfs
from scheduler_proc.policy.longest_prefix import MAX_SORTED, LongestPrefix
from scheduler_proc.request import Request
from scheduler_proc.waiting_queue import WaitingQueue
from tests.unit.scheduler_parts import manager, message, request, run_until_idle, running, seat


def view_of(kv: KVCacheManager, requests: Sequence[Request]) -> tuple[WaitingView, WaitingQueue]:
    queue = WaitingQueue()
    for req in requests:
        queue.add(req)
    return WaitingView(queue, kv), queue


def seqs(queue: WaitingQueue, order: Sequence[int]) -> list[int]:
    return [queue[position].seq for position in order]


def test_the_queue_is_kept_by_priority_then_retraction_then_arrival() -> None:
    kv = manager()
    reqs = [
        request(kv, 1, [1] * 4),
        request(kv, 2, [1] * 4, priority=3),
        request(kv, 3, [1] * 4, num_retractions=1),
        request(kv, 4, [1] * 4, priority=3),
        request(kv, 5, [1] * 4, priority=-1, num_retractions=2),
    ]
    view, queue = view_of(kv, reqs)
    assert seqs(queue, Fcfs().order(view)) == [2, 4, 3, 1, 5]
    queue.remove(reqs[2])
    assert [req.seq for req in queue] == [2, 4, 1, 5]
    queue.remove_at([0, 1])
    assert [req.seq for req in queue] == [1, 5]
    queue.remove_at([1])
    assert [req.seq for req in queue] == [1]
    assert queue.num_tokens() == 4


def test_longest_prefix_goes_first_within_a_priority() -> None:
    kv = manager()
    cached = request(kv, 0, list(range(12)))
    seat(kv, cached)
    kv.publish_prefill(cached)
    reqs = [
        request(kv, 1, [50] * 12),
        request(kv, 2, [*range(4), *[60] * 8]),
        request(kv, 3, list(range(12))),
        request(kv, 4, [70] * 12, priority=1),
    ]
    view, queue = view_of(kv, reqs)
    policy = LongestPrefix()
    assert seqs(queue, policy.order(view)) == [4, 3, 2, 1]
    kv.release(cached)
    kv.flush()
    assert seqs(queue, policy.order(view)) == [4, 1, 2, 3], "matched anew when the cache has changed"


def test_longest_prefix_sorts_the_head_of_a_long_queue_only() -> None:
    kv = manager()
    cached = request(kv, 0, list(range(12)))
    seat(kv, cached)
    kv.publish_prefill(cached)
    reqs = [request(kv, i + 1, [50] * 12) for i in range(MAX_SORTED)]
    reqs += [request(kv, MAX_SORTED + 1, list(range(12)))]
    view, _ = view_of(kv, reqs)
    assert list(LongestPrefix().order(view)) == list(range(MAX_SORTED + 1))


def test_a_view_shows_facts_and_cannot_change_them() -> None:
    kv = manager()
    req = request(kv, 7, [1] * 6, max_tokens=3, priority=2, namespace=b"n", arrived_s=1.5)
    view = view_of(kv, [req])[0][0]
    assert (view.seq, view.priority, view.num_prompt, view.num_output, view.max_len) == (7, 2, 6, 0, 9)
    assert (view.namespace, view.arrived_s, view.num_retractions, view.cached_len()) == (b"n", 1.5, 0, 0)
    with pytest.raises(AttributeError):
        view.priority = 3  # type: ignore[misc]


@pytest.mark.parametrize("order", [[0, 2, 1], [1], [], (2, 0), range(3), range(1, 3)])
def test_an_order_of_some_positions_is_accepted(order: Sequence[int]) -> None:
    assert list(checked_order(order, 3)) == list(order)


@pytest.mark.parametrize("order", [[0, 0], [3], [-1], [True], ["0"], None, 5, {0, 1}, range(5), range(-1, 2)])
def test_anything_else_is_refused(order: object) -> None:
    with pytest.raises(InvalidOrder):
        checked_order(order, 3)


class LastFirst:
    """What a user might write."""

    def order(self, waiting: WaitingView) -> Sequence[int]:
        return sorted(range(len(waiting)), key=lambda i: -waiting[i].seq)


class Broken:
    def order(self, waiting: WaitingView) -> Sequence[int]:
        raise ZeroDivisionError


def test_a_policy_of_the_users_own_is_loaded_and_obeyed() -> None:
    with running(policy=f"{__name__}:LastFirst", max_rows=1) as system:
        run_until_idle(system, *(message(i, [i] * 5) for i in range(3)))
        assert [handle[8] for handle in system.detokenizer.closed] == [2, 1, 0]


def test_a_policy_that_raises_costs_its_order_only(caplog: pytest.LogCaptureFixture) -> None:
    with running(policy=f"{__name__}:Broken", max_rows=1) as system, caplog.at_level(logging.ERROR):
        run_until_idle(system, *(message(i, [i] * 5) for i in range(3)))
        assert [handle[8] for handle in system.detokenizer.closed] == [0, 1, 2]
    assert "first come, first served" in caplog.text
