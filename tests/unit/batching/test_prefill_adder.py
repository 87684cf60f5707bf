"""PrefillAdder: who gets how many tokens of a step, and who has to wait for space."""

from __future__ import annotations

import numpy as np

from scheduler_proc.batching.prefill_adder import PrefillAdder, StepLimits
from scheduler_proc.cache.kv_cache_manager import KVCacheManager
from scheduler_proc.capacity.max_utilization import MaxUtilization
from scheduler_proc.capacity.slots import SlotPool
from scheduler_proc.core.batch import ScheduleBatch
from scheduler_proc.core.request import Request
from scheduler_proc.features.base import Cost, RequestFeature
from tests.harness.cases import for_each
from tests.harness.scheduler.scheduler_parts import manager, request, seat


def adder_for(
    kv: KVCacheManager,
    budget: int,
    conservativeness: float = 1.0,
    num_slots: int = 0,
    *,
    cuts_prompts: bool = True,
) -> tuple[PrefillAdder, ScheduleBatch]:
    batch = ScheduleBatch(kv.rows)
    capacity = MaxUtilization(kv, conservativeness)
    limits = StepLimits(budget, 99, cuts_prompts)
    return PrefillAdder(batch, kv, capacity, SlotPool(num_slots), limits), batch


def admit(kv: KVCacheManager, adder: PrefillAdder, req: Request) -> bool:
    return adder.try_admit(req, kv.match(req))


@for_each(("budget", "num_new"), [(64, 30), (30, 30), (29, 28), (9, 8), (4, 4), (3, 3)])
def test_a_chunk_ends_with_a_page_unless_it_is_the_last_or_shorter_than_one(
    budget: int, num_new: int
) -> None:
    kv = manager()
    adder, batch = adder_for(kv, budget)
    assert admit(kv, adder, request(kv, 1, list(range(30))))
    scheduled = (batch.single + batch.loose)[0]
    assert scheduled.num_new == num_new
    assert scheduled.samples == (num_new == 30)
    kv.check()


def test_decodes_come_out_of_the_budget_first() -> None:
    kv = manager(num_pages=32)
    running = [request(kv, i, [i] * 6) for i in range(3)]
    for req in running:
        seat(kv, req)
        kv.rows.append(req.row, [1])
        kv.rows.in_flight[req.row] = 0
    adder, batch = adder_for(kv, 8)
    assert adder.try_continue_together(np.array([req.row for req in running]))
    assert admit(kv, adder, request(kv, 9, [50] * 20))
    assert len(batch.decodes) == 3
    assert batch.loose[0].num_new == 4
    assert not adder.try_continue_together(np.array([req.row for req in running])), "the budget is spent"


def test_a_prompt_that_is_not_to_be_cut_waits_for_a_step_with_room_for_all_of_it() -> None:
    kv = manager(num_pages=32)
    adder, batch = adder_for(kv, 30, cuts_prompts=False)
    assert admit(kv, adder, request(kv, 1, list(range(8))))
    newcomer = request(kv, 2, [9] * 25)
    assert not admit(kv, adder, newcomer), "22 are left"
    assert newcomer.row == -1
    assert newcomer.lease is None
    assert admit(kv, adder, request(kv, 3, [3] * 22))
    assert [row.num_new for row in batch.single + batch.loose] == [8, 22]
    kv.check()
    adder, batch = adder_for(kv, 30, cuts_prompts=False)
    assert admit(kv, adder, newcomer)
    assert [row.num_new for row in batch.single + batch.loose] == [25]


def test_what_comes_back_with_its_output_and_fits_no_step_is_computed_in_chunks() -> None:
    kv = manager(num_pages=32)
    adder, batch = adder_for(kv, 8, cuts_prompts=False)
    req = request(kv, 1, list(range(20)))
    assert admit(kv, adder, req)
    assert [row.num_new for row in batch.single + batch.loose] == [8]
    kv.check()


def test_a_newcomer_must_fit_beside_what_running_requests_still_want() -> None:
    kv = manager(num_pages=8)
    seat(kv, request(kv, 1, [1] * 8, max_tokens=16))
    adder, _ = adder_for(kv, 64, conservativeness=10.0)  # it expects all 16 of them: four more pages
    newcomer = request(kv, 2, [2] * 8, max_tokens=4)
    assert not admit(kv, adder, newcomer)
    assert newcomer.row == -1
    assert newcomer.lease is None
    kv.check()
    adder, _ = adder_for(kv, 64, conservativeness=0.01)
    assert admit(kv, adder, newcomer)


def test_two_newcomers_do_not_get_the_same_space() -> None:
    kv = manager(num_pages=8)
    adder, _ = adder_for(kv, 64, conservativeness=10.0)
    assert admit(kv, adder, request(kv, 1, [1] * 8, max_tokens=12))
    assert not admit(kv, adder, request(kv, 2, [2] * 8, max_tokens=8))
    assert admit(kv, adder, request(kv, 3, [3] * 4, max_tokens=4))


def test_a_request_that_is_alone_may_use_everything() -> None:
    kv = manager(num_pages=4, max_len=16)
    adder, _ = adder_for(kv, 64, conservativeness=10.0)
    assert admit(kv, adder, request(kv, 1, [1] * 12, max_tokens=4))
    assert kv.num_available == 1


def test_the_own_prefix_is_no_room_for_a_newcomer() -> None:
    kv = manager(num_pages=6)
    old = request(kv, 1, [1] * 12)
    seat(kv, old)
    kv.release(old)
    seat(kv, request(kv, 2, [2] * 8, max_tokens=1))
    assert kv.num_available == 4, "three of them are its own prefix"
    adder, _ = adder_for(kv, 64, conservativeness=0.01)
    assert not admit(kv, adder, request(kv, 3, [1] * 20))
    kv.check()


class Demanding(RequestFeature):
    def __init__(self, cost: Cost) -> None:
        self._cost = cost

    def cost(self) -> Cost:
        return self._cost


@for_each(
    ("cost", "fits"),
    [
        (Cost(rows=4), True),
        (Cost(rows=5), False),
        (Cost(pages=4), True),
        (Cost(pages=13), False),
        (Cost(slots=("a",)), True),
        (Cost(slots=("b",)), False),
        (Cost(slots=("a", "b")), False),
    ],
)
def test_features_may_ask_for_rows_pages_and_a_slot(cost: Cost, fits: bool) -> None:
    kv = manager(num_pages=16, max_rows=5)
    seat(kv, request(kv, 1, [1] * 8, max_tokens=1))
    batch = ScheduleBatch(kv.rows)
    slots = SlotPool(1)
    assert slots.prepare(("a",), 1)
    slots.take(("a",), 1)
    adder = PrefillAdder(batch, kv, MaxUtilization(kv, 0.01), slots, StepLimits(64, 99))
    req = request(kv, 2, [2] * 4, features=(Demanding(cost),))
    assert admit(kv, adder, req) == fits
    kv.check()
