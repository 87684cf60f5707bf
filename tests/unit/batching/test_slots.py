"""The ledger of the device's slots: what lies in them, who leases it, who waits and who gives way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from runtime.base.errors import InvalidRequest
from runtime.wire.plan import AdapterFailed, AdapterLoaded, AdapterRef
from scheduler_proc.capacity.slots import FAILED_S, SlotPool


class Device:
    """Notes what is to be loaded, and says that it is when a test says so."""

    def __init__(self) -> None:
        self.loads: list[tuple[int, Any]] = []

    def load_adapter(self, slot: int, ref: Any) -> None:
        self.loads.append((slot, ref))

    def drop_adapter(self, slot: int) -> None:
        self.loads.append((slot, None))

    def adapter_answers(self) -> Sequence[AdapterLoaded | AdapterFailed]:
        return []


def loaded(slot: int) -> AdapterLoaded:
    return AdapterLoaded(0, slot, "1", 10, 0.25)


def pool(num_slots: int, max_passed: int = 8, now: list[float] | None = None) -> tuple[SlotPool, Device]:
    device, times = Device(), now or [0.0]
    return SlotPool(num_slots, device, lambda: times[0], max_passed), device


class Sized(NamedTuple):
    """A key with rows, and no name or pin."""

    number: int
    num_rows: int


def sized_pool(num_slots: int, max_pages: int) -> tuple[SlotPool, Device]:
    device = Device()
    return SlotPool(num_slots, device, lambda: 0.0, 8, max_pages=max_pages, page_rows=8), device


def bring(slots: SlotPool, device: Device, key: Sized, seq: int) -> None:
    """Load it, lease it, and give it back."""
    slots.begin_step()
    assert not slots.prepare((key,), seq)
    slots.receive(loaded(device.loads[-1][0]))
    slots.begin_step()
    assert slots.prepare((key,), seq)
    slots.take((key,), seq)
    slots.give_back((key,))
    slots.check()


def test_contents_take_the_pages_of_their_rows_and_go_until_there_are_enough() -> None:
    slots, device = sized_pool(8, max_pages=4)
    small = [Sized(number, 8) for number in range(4)]
    for number, key in enumerate(small):
        bring(slots, device, key, number)
    figures = slots.figures()
    assert (figures["num_device_pages"], figures["max_device_pages"], figures["num_adapters"]) == (4, 4, 4)
    bring(slots, device, Sized(9, 9), 10)  # two pages: the two oldest go, though slots are free
    assert slots.counts.num_evicted == 2
    assert [slots.can_hold((key,)) for key in small] == [False, False, True, True]
    assert slots.figures()["num_device_pages"] == 4
    bring(slots, device, Sized(10, 32), 11)
    assert (slots.num_held, slots.figures()["num_device_pages"]) == (1, 4)
    with pytest.raises(InvalidRequest, match="takes 5 pages of the device; there are 4"):
        slots.prepare((Sized(11, 33),), 12)


def test_pages_that_others_lease_are_waited_for_and_drained() -> None:
    slots, device = sized_pool(8, max_pages=2)
    for number in range(2):
        key = Sized(number, 8)
        bring(slots, device, key, number)
        slots.take((key,), number)
    wide = Sized(5, 16)
    for seq in range(3, 10):  # passed by others, until both are drained
        slots.begin_step()
        assert not slots.prepare((wide,), 2)
        for number in range(2):
            if slots.prepare((Sized(number, 8),), seq):
                slots.take((Sized(number, 8),), seq)
                slots.give_back((Sized(number, 8),))
    slots.begin_step()
    assert not slots.prepare((wide,), 2)
    assert not any(slots.prepare((Sized(number, 8),), 20) for number in range(2))
    for number in range(2):
        slots.give_back((Sized(number, 8),))
    slots.begin_step()
    assert not slots.prepare((wide,), 2)
    assert device.loads[-1][1] == wide
    slots.check()


def lease(slots: SlotPool, key: str, seq: int) -> None:
    assert slots.prepare((key,), seq)
    slots.take((key,), seq)


def test_slots_are_shared_by_equal_keys_and_counted() -> None:
    slots = SlotPool(1)
    lease(slots, "a", 1)
    lease(slots, "a", 2)
    slots.take(())
    assert slots.can_hold(("a",))
    assert slots.can_hold(())
    assert not slots.prepare(("b",), 3)
    slots.give_back(("a",))
    slots.begin_step()
    assert not slots.prepare(("b",), 3)
    slots.give_back(("a",))
    slots.give_back(())
    slots.begin_step()
    assert slots.prepare(("b",), 3)
    assert slots.num_used == 0


def test_a_slot_is_leased_when_the_device_has_said_that_it_is_ready() -> None:
    slots, device = pool(2)
    assert not slots.prepare(("a",), 1)
    assert not slots.prepare(("a",), 2)
    assert device.loads == [(0, "a")]
    assert slots.num_loading == 1
    slots.receive(loaded(0))
    slots.begin_step()
    assert slots.prepare(("a",), 1)
    assert slots.take(("a",), 1) == (0,)
    assert (slots.counts.num_misses, slots.counts.num_hits, slots.counts.load_s) == (1, 0, 0.25)
    assert slots.take(("a",), 2) == (0,)
    assert (slots.counts.num_misses, slots.counts.num_hits) == (1, 1)
    slots.check()


def test_what_nobody_leases_stays_and_the_least_recently_used_goes_first() -> None:
    slots, device = pool(2)
    for slot, key in enumerate("ab"):
        assert not slots.prepare((key,), slot)
        slots.receive(loaded(slot))
        lease(slots, key, slot)
    slots.give_back(("b",))
    slots.give_back(("a",))
    slots.begin_step()
    assert slots.prepare(("b",), 3), "it is still there"
    slots.begin_step()
    assert not slots.prepare(("c",), 4)
    assert device.loads[-1] == (1, "c"), "b was used before a"
    assert slots.counts.num_evicted == 1
    assert not slots.can_hold(("b",))


def test_what_an_older_request_waits_for_is_not_evicted() -> None:
    slots, device = pool(1)
    assert not slots.prepare(("a",), 1)
    slots.receive(loaded(0))
    slots.begin_step()
    assert slots.prepare(("a",), 1)  # and has no pages yet
    assert not slots.prepare(("b",), 2)
    assert device.loads == [(0, "a")]
    slots.begin_step()
    assert not slots.prepare(("b",), 2)  # it has gone elsewhere
    assert device.loads == [(0, "a"), (0, "b")]


def test_what_is_leased_or_loading_is_not_evicted() -> None:
    slots, device = pool(1)
    assert not slots.prepare(("a",), 1)
    slots.begin_step()
    assert not slots.prepare(("b",), 2)
    slots.receive(loaded(0))
    lease(slots, "a", 1)
    slots.begin_step()
    assert not slots.prepare(("b",), 2)
    assert device.loads == [(0, "a")]


def test_what_cannot_be_loaded_is_refused_for_a_while_and_then_tried_again() -> None:
    now = [10.0]
    slots, device = pool(1, now=now)
    assert not slots.prepare(("a",), 1)
    slots.receive(AdapterFailed(0, 0, "1", "q_proj has another shape"))
    for seq in (1, 2):
        slots.begin_step()
        with pytest.raises(InvalidRequest, match="q_proj has another shape"):
            slots.prepare(("a",), seq)
    assert slots.num_held == 0
    assert not slots.prepare(("b",), 3), "its slot is another one's"
    now[0] += FAILED_S
    slots.receive(loaded(0))
    slots.begin_step()
    assert not slots.prepare(("a",), 4)
    assert device.loads == [(0, "a"), (0, "b"), (0, "a")]
    assert slots.counts.num_failed == 1


def test_failures_that_nobody_asks_about_again_are_forgotten() -> None:
    now = [10.0]
    slots, _ = pool(1, now=now)
    for seq in range(20):
        slots.begin_step()
        assert not slots.prepare((f"no such adapter {seq}",), seq)
        slots.receive(AdapterFailed(0, 0, "1", "no such file"))
        now[0] += FAILED_S / 2
    assert len(slots._failures) == 2


def test_a_request_that_is_passed_has_a_slot_drained_and_is_passed_by_so_many_at_most() -> None:
    """`a` is asked for all the time; 100 wants b, and no more than 8 that came later go before it."""
    slots, device = pool(1, max_passed=8)
    assert not slots.prepare(("a",), 1)
    slots.receive(loaded(0))
    lease(slots, "a", 1)
    passed = []
    for seq in range(101, 130):
        slots.begin_step()
        assert not slots.prepare(("b",), 100)
        if slots.prepare(("a",), seq):
            slots.take(("a",), seq)
            passed.append(seq)
    assert passed == [101, 102, 103, 104], "half of them, then the slot is drained"
    slots.begin_step()
    assert slots.prepare(("a",), 99), "who is older goes before it"
    for _ in range(5):
        slots.give_back(("a",))
    slots.begin_step()
    assert not slots.prepare(("b",), 100)
    assert device.loads[-1] == (0, "b")


def test_with_another_slot_younger_requests_go_on_until_so_many_have_passed() -> None:
    slots, _ = pool(2, max_passed=8)
    for slot, key in enumerate("ab"):
        assert not slots.prepare((key,), slot + 1)
        slots.receive(loaded(slot))
        lease(slots, key, slot + 1)
    lease(slots, "b", 3)  # so a is the one that is drained
    passed = []
    for seq in range(101, 130):
        slots.begin_step()
        assert not slots.prepare(("c",), 100)
        key = "ab"[seq % 2]
        if slots.prepare((key,), seq):
            slots.take((key,), seq)
            passed.append(seq)
    assert passed == [101, 102, 103, 104, 105, 107], "a is drained, and b goes on to 108"


def test_both_slots_of_a_request_are_needed() -> None:
    slots, device = pool(2)
    assert not slots.prepare(("a", "t"), 1)
    assert device.loads == [(0, "a"), (1, "t")]
    slots.receive(loaded(1))
    slots.begin_step()
    assert not slots.prepare(("a", "t"), 1)
    slots.receive(loaded(0))
    slots.begin_step()
    assert slots.prepare(("a", "t"), 1)
    assert slots.take(("a", "t"), 1) == (0, 1)
    slots.give_back(("a", "t"))
    assert slots.num_used == 0


def test_requests_are_counted_by_the_name_of_their_adapter() -> None:
    slots = SlotPool(2)
    for seq, (name, version) in enumerate([("x", "1"), ("x", "2"), ("y", "1"), ("x", "1")], 1):
        ref = AdapterRef(name, 1, version, "/there")
        slots.begin_step()
        assert slots.prepare((ref,), seq)
        slots.take((ref,), seq)
        slots.give_back((ref,))
    assert slots.num_requests_of == {"x": 3, "y": 1}


def test_a_retired_adapter_is_dropped_when_nobody_leases_it() -> None:
    slots, device = pool(3)
    refs = [AdapterRef(name, number, "1", "/there") for number, name in enumerate("aab", 1)]
    for slot, ref in enumerate(refs):
        assert not slots.prepare((ref,), slot)
    for slot in (0, 1):
        slots.receive(loaded(slot))
    slots.begin_step()
    assert slots.prepare((refs[0],), 1)
    slots.take((refs[0],), 1)
    del device.loads[:]
    assert slots.retire("a") == 2
    assert device.loads == [(1, None)], "the leased one runs on"
    slots.give_back((refs[0],))
    assert device.loads == [(1, None), (0, None)]
    assert slots.retire("b") == 1
    assert len(device.loads) == 2, "it is loading"
    slots.receive(loaded(2))
    assert device.loads[-1] == (2, None)
    assert (slots.num_held, slots.retire("c")) == (0, 0)
    slots.begin_step()
    assert not slots.prepare((refs[2],), 9)
    assert device.loads[-1][1] == refs[2], "who asks later has it loaded again"
    slots.check()


def test_a_pinned_adapter_gives_way_to_nobody_until_it_is_retired_or_replaced() -> None:
    slots, device = pool(2)
    seqs = iter(range(1, 99))

    def serve(ref: AdapterRef) -> None:
        seq = next(seqs)
        slots.begin_step()
        if not slots.prepare((ref,), seq):
            slots.receive(loaded(device.loads[-1][0]))
            assert slots.prepare((ref,), seq)
        slots.take((ref,), seq)
        slots.give_back((ref,))
        slots.check()

    first, second = (AdapterRef("a", number, "1", "/a", pinned=True) for number in (1, 2))
    others = [AdapterRef(name, number, "1", f"/{name}") for number, name in enumerate("bcd", 11)]
    for ref in (first, *others, first):
        serve(ref)
    assert [slot for slot, _ in device.loads] == [0, 1, 1, 1], "the others take turns in one slot"
    serve(second)
    serve(others[0])
    assert device.loads[-1] == (0, others[0]), "one that was replaced is pinned no more"
    serve(first)
    serve(others[1])
    assert device.loads[-1] == (0, others[1]), "and not when its late requests come"
    assert slots.retire("a") == 1
    for ref in (second, others[2], others[0]):
        serve(ref)
    assert not slots.can_hold((second,))


def test_a_pinned_adapter_is_not_drained() -> None:
    slots, device = pool(2, max_passed=4)
    pinned, leased, waiting = (
        AdapterRef(name, number, "1", "/", pinned=name == "p") for number, name in enumerate("plw", 1)
    )
    for slot, ref in enumerate((pinned, leased)):
        assert not slots.prepare((ref,), slot)
        slots.receive(loaded(slot))
        slots.begin_step()
        assert slots.prepare((ref,), slot)
        slots.take((ref,), slot)
    for seq in range(3, 9):
        slots.begin_step()
        assert not slots.prepare((waiting,), 2)
        assert slots.prepare((pinned,), min(seq, 6))
        if slots.prepare((leased,), min(seq, 6)):
            slots.take((leased,), seq)
            slots.give_back((leased,))
    slots.begin_step()
    assert not slots.prepare((waiting,), 2)
    assert slots.prepare((pinned,), 6)
    assert not slots.prepare((leased,), 6), "it is drained for the one that waits"
    slots.give_back((leased,))
    slots.begin_step()
    assert not slots.prepare((waiting,), 2)
    assert device.loads[-1] == (1, waiting)
