"""Policies: the order they give, and what becomes of an order that is none."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence

import pytest

from scheduler_proc.cache.kv_cache_manager import KVCacheManager
from scheduler_proc.core.request import Request
from scheduler_proc.policy.base import (
    InvalidOrder,
    RequestView,
    SchedulePolicy,
    WaitingView,
    checked_order,
    sort_key_of,
)
from scheduler_proc.policy.by_length import LongestOutputFirst, ShortestFirst
from scheduler_proc.policy.by_prefix import MAX_SORTED
from scheduler_proc.policy.dfs_weight import DfsWeight
from scheduler_proc.policy.fcfs import Fcfs
from scheduler_proc.policy.longest_prefix import LongestPrefix
from scheduler_proc.policy.random_order import RandomOrder
from scheduler_proc.waiting.waiting_queue import WaitingQueue
from tests.harness.scheduler.scheduler_parts import manager, message, request, run_until_idle, running, seat


def view_of(
    kv: KVCacheManager, requests: Sequence[Request], policy: SchedulePolicy | None = None
) -> tuple[WaitingView, WaitingQueue]:
    queue = WaitingQueue(sort_key_of(policy or Fcfs(), kv))
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
    assert [req.seq for req in queue.take_at([0, 1])] == [2, 4]
    assert [req.seq for req in queue] == [1, 5]
    assert [req.seq for req in queue.take_at([1])] == [5]
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


def test_longest_prefix_remembers_nobody_who_has_gone() -> None:
    kv = manager()
    policy = LongestPrefix()
    view, queue = view_of(kv, [])
    for number in range(20):
        queue.add(request(kv, number, [number] * 4))
        policy.order(view)
        if number > 1:
            queue.remove(queue[0])
    assert len(policy._cached_len) == 3


def test_longest_prefix_sorts_the_head_of_a_long_queue_only() -> None:
    kv = manager()
    cached = request(kv, 0, list(range(12)))
    seat(kv, cached)
    kv.publish_prefill(cached)
    reqs = [request(kv, i + 1, [50] * 12) for i in range(MAX_SORTED)]
    reqs += [request(kv, MAX_SORTED + 1, list(range(12)))]
    view, _ = view_of(kv, reqs)
    assert list(LongestPrefix().order(view)) == list(range(MAX_SORTED)), "the last one waits for its turn"


def test_the_order_of_prefixes_is_kept_until_queue_or_cache_change() -> None:
    kv = manager()
    view, queue = view_of(kv, [request(kv, i, [i] * 8) for i in range(3)])
    policy = LongestPrefix()
    order = policy.order(view)
    assert policy.order(view) is order
    queue.remove(queue[0])
    assert list(policy.order(view)) == [0, 1]


def test_the_branch_that_most_wait_for_goes_first_and_its_deepest_leaf_before_the_rest() -> None:
    kv = manager(num_pages=32)
    stem, light, heavy = [1] * 4, [2] * 4, [3] * 4
    for number, tokens in enumerate((stem + light, stem + heavy, [9] * 4)):
        cached = request(kv, 90 + number, [*tokens, 5])
        seat(kv, cached)
        kv.publish_prefill(cached)
        kv.release(cached)
    prompts = [
        [*stem, *light, 60],
        [*stem, *heavy, 61],
        [*[9] * 4, 62],
        [*stem, *heavy, 63],
        [*stem, 64, 65],
        [70] * 5,
    ]
    reqs = [request(kv, i, tokens) for i, tokens in enumerate(prompts)]
    reqs.append(request(kv, 6, [80] * 5, priority=1))
    view, queue = view_of(kv, reqs)
    assert seqs(queue, DfsWeight().order(view)) == [6, 1, 3, 0, 4, 2, 5]


@pytest.mark.parametrize(
    ("policy", "order"), [(ShortestFirst(), [5, 4, 2, 3, 1]), (LongestOutputFirst(), [5, 4, 1, 3, 2])]
)
def test_a_policy_with_a_key_keeps_the_queue_in_its_order(policy: SchedulePolicy, order: list[int]) -> None:
    kv = manager()
    reqs = [
        request(kv, 1, [1] * 20, max_tokens=8),
        request(kv, 2, [1] * 4, max_tokens=6),
        request(kv, 3, [1] * 4, max_tokens=8),
        request(kv, 4, [1] * 30, max_tokens=1, num_retractions=1),
        request(kv, 5, [1] * 50, max_tokens=1, priority=1),
    ]
    view, queue = view_of(kv, reqs, policy)
    assert seqs(queue, policy.order(view)) == order, "priority, then those that were retracted, then the key"
    queue.remove(reqs[2])
    assert [req.seq for req in queue] == [seq for seq in order if seq != 3]


def test_a_random_place_is_kept_while_a_request_waits() -> None:
    kv = manager()
    policy = RandomOrder(random.Random(0))
    reqs = [request(kv, i, [1] * 4) for i in range(50)]
    _, queue = view_of(kv, reqs, policy)
    assert [req.seq for req in queue] != list(range(50))
    for req in reqs:
        queue.remove(req)
    assert not len(queue)


def test_a_key_that_is_no_number_counts_as_none(caplog: pytest.LogCaptureFixture) -> None:
    class Odd:
        def __init__(self) -> None:
            self.answers = iter([float("nan"), "first", None])

        def key(self, request: RequestView) -> object:
            return next(self.answers)

    kv = manager()
    queue = WaitingQueue(sort_key_of(Odd(), kv))  # type: ignore[arg-type]
    with caplog.at_level(logging.ERROR):
        for i in range(4):
            queue.add(request(kv, i, [1] * 4))
    assert [req.seq for req in queue] == [0, 1, 2, 3]
    assert caplog.text.count("first come, first served") == 4


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
    """Policy as a user might write it."""

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
