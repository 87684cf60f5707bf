"""MaxUtilization: the estimate, who gives way, and how it learns."""

from __future__ import annotations

from scheduler_proc.capacity.max_utilization import (
    DECAY_STEPS,
    FLOOR_OF_INITIAL,
    INITIAL_RATIO,
    MaxUtilization,
)
from tests.harness.scheduler.scheduler_parts import manager, request, seat


def test_the_ratio_decays_to_its_floor_and_comes_back_when_idle() -> None:
    kv = manager()
    capacity = MaxUtilization(kv, 1.0)
    assert capacity.new_token_ratio == INITIAL_RATIO
    for _ in range(DECAY_STEPS + 10):
        capacity.note_step()
    assert abs(capacity.new_token_ratio - INITIAL_RATIO * FLOOR_OF_INITIAL) < 1e-9
    capacity.note_idle()
    assert capacity.new_token_ratio == INITIAL_RATIO


def test_a_retraction_raises_the_ratio_and_never_above_one() -> None:
    kv = manager()
    capacity = MaxUtilization(kv, 0.01)
    seat(kv, request(kv, 1, [1] * 8, max_tokens=40))
    capacity.note_retraction()
    assert 0.4 < capacity.new_token_ratio < 0.6, "20 more of 40"
    seat(kv, request(kv, 2, [2] * 8, max_tokens=1))
    capacity.note_retraction()
    capacity.note_retraction()
    assert capacity.new_token_ratio <= 1.0


def test_pages_wanted_rounds_each_row_to_pages_and_counts_what_it_holds() -> None:
    kv = manager(num_pages=32)
    capacity = MaxUtilization(kv, 10.0)
    assert capacity.pages_wanted() == 0
    seat(kv, request(kv, 1, [1] * 7, max_tokens=2))
    assert capacity.pages_wanted() == 1, "nine tokens, two pages held"
    seat(kv, request(kv, 2, [2] * 8, max_tokens=8))
    assert capacity.pages_wanted() == 3


def test_a_retracted_request_needs_more_room_each_time() -> None:
    kv = manager(max_len=256)
    capacity = MaxUtilization(kv, 0.01)
    fresh = request(kv, 1, [1] * 16, max_tokens=200)
    again = request(kv, 2, [1] * 16, max_tokens=200, num_retractions=1)
    often = request(kv, 3, [1] * 16, max_tokens=200, num_retractions=3)
    assert capacity.pages_for(fresh) == 5
    assert capacity.pages_for(again) == 9
    assert capacity.pages_for(often) == 19


def test_the_victim_has_the_lowest_priority_and_started_last() -> None:
    kv = manager(num_pages=32)
    capacity = MaxUtilization(kv, 1.0)
    reqs = [request(kv, i, [i] * 4, priority=priority) for i, priority in enumerate((0, 5, 0, 5))]
    for req in reqs:
        seat(kv, req)
    assert capacity.victim(reqs) is reqs[2]
    assert capacity.victim([reqs[1], reqs[3]]) is reqs[3]
    assert sorted(reqs, key=capacity.rank) == [reqs[1], reqs[3], reqs[0], reqs[2]]
