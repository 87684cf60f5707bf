"""SlotPool: bookkeeping of the device's slots, which hold what several requests may share, such as LoRA
adapters. Knows no request.

    absent ──prepare──► loading ──AdapterLoaded──► ready ◄──give_back── leased
                         └──AdapterFailed──► absent └───────take────────►

A waiting request has its slots prepared, and later requests may pass it until all of them are ready. Contents
are replaced by age: the least recently used that no request leases goes first, unless it is pinned or an
older request waits for it. Where all slots are leased, a request that has been passed often gets a slot
drained: younger requests may no longer lease it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from runtime.base.errors import InvalidRequest
from runtime.wire.plan import AdapterFailed, AdapterLoaded
from scheduler_proc.core.executor import AdapterDevice

NO_PAGES = 0
"""Page count of contents without a size, or of a device whose pages are not counted."""

SlotKey: TypeAlias = Any
"""Hashable description of a slot's contents, such as an AdapterRef. Requests with equal keys share the slot.
"""
MAX_PASSED = 128
"""Maximum number of requests that may get their slots before an older one that waits for its own. After half
of them a slot is drained, which interrupts the adapter in it.
"""
FAILED_S = 5.0
"""Seconds for which requests are refused for contents that could not be loaded, before loading is tried
again.
"""
MAX_NAMES = 1024
"""Maximum number of adapters for which requests are counted by name."""


@dataclass(slots=True, eq=False)
class Slot:
    """One slot of the device. It is empty if `key` is None."""

    number: int
    key: SlotKey = None
    is_ready: bool = False
    num_leases: int = 0
    used_at: int = 0
    """Number of the last event that leased it or gave it back, in the order of these events."""
    was_leased: bool = False
    """True if it was leased since its contents were loaded."""
    num_bytes: int = 0
    is_retired: bool = False
    """True if it is to be emptied when its last lease ends."""
    num_pages: int = NO_PAGES


@dataclass(slots=True)
class SlotCounts:
    """Totals of the slots since the start."""

    num_hits: int = 0
    """Number of leases of contents that were loaded already."""
    num_misses: int = 0
    """Number of first leases of contents that had to be loaded."""
    num_loads: int = 0
    num_failed: int = 0
    num_evicted: int = 0
    load_s: float = 0.0
    """Total seconds of all loads, each measured on its slowest rank."""


class SlotPool:
    """Pool of slots. device: loads contents; None: contents are there at once. max_pages: most pages of all
    contents together, where contents take as many pages of `page_rows` rows as they need; 0: pages are not
    counted.
    """

    def __init__(
        self,
        num_slots: int,
        device: AdapterDevice | None = None,
        clock: Callable[[], float] = lambda: 0.0,
        max_passed: int = MAX_PASSED,
        *,
        max_pages: int = NO_PAGES,
        page_rows: int = 1,
    ) -> None:
        self.max_pages = max_pages
        self._page_rows = page_rows
        self.num_slots = num_slots
        self.counts = SlotCounts()
        self.num_requests_of: Counter[str] = Counter()
        """Number of leases by adapter name."""
        self.device = device
        self.on_failed: Callable[[SlotKey, str], str] = lambda _, message: message
        """Called with contents that could not be loaded and the reason; returns the message for the requests.
        """
        self._clock = clock
        self._max_passed = max_passed
        self._slots = [Slot(number) for number in range(num_slots)]
        self._slot_of: dict[SlotKey, Slot] = {}
        self._failures: dict[SlotKey, tuple[str, float]] = {}
        """Reason why contents could not be loaded, and the time until which loading is not tried again."""
        self.num_loading = 0
        self._num_events = 0
        self._newest = 0
        """Number of the youngest request that has got slots."""
        self._wanted: set[SlotKey] = set()
        self._draining: dict[SlotKey, int] = {}
        """Keys of slots that are drained in this step, with the number of the request that each is for."""
        self._drained_for: set[SlotKey] = set()
        self._oldest_waiting: int | None = None
        self._pinned_from: dict[str, int] = {}
        """Lowest adapter id that is still pinned, by the name of an adapter that is or was pinned."""

    # -- waiting requests -----------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Forget the waiting requests of the last step. Each that still waits prepares its slots again."""
        if self._wanted:
            self._wanted.clear()
            self._draining.clear()
            self._drained_for.clear()
            self._oldest_waiting = None

    def prepare(self, keys: tuple[SlotKey, ...], seq: int) -> bool:
        """Return True if the waiting request number `seq` may take all these contents now; start to load
        those that are missing. Call it for waiting requests in the order in which they are considered. Raises
        InvalidRequest when one cannot be loaded.
        """
        oldest = self._oldest_waiting
        is_ready = oldest is None or seq <= oldest + self._max_passed
        for key in keys:
            self._check_failed(key)
            self._wanted.add(key)
            slot = self._slot_of.get(key)
            if slot is None:
                is_ready = self._try_load(key, seq) and is_ready
            elif not slot.is_ready or self._draining.get(key, seq) < seq:
                is_ready = False
        if not is_ready and (oldest is None or seq < oldest):
            self._oldest_waiting = seq
        return is_ready

    def _check_failed(self, key: SlotKey) -> None:
        if key not in self._failures:
            return
        message, until = self._failures[key]
        if self._clock() < until:
            raise InvalidRequest(message, param="lora_request", code="invalid_adapter")
        del self._failures[key]

    def _try_load(self, key: SlotKey, seq: int) -> bool:
        """Start to load contents into a slot if there is room. Returns True if they are ready by now."""
        num_pages = self._pages_of(key)
        slot = self._room(num_pages)
        if slot is None:
            if self._newest - seq >= self._max_passed // 2 and key not in self._drained_for:
                self._drained_for.add(key)
                self._drain(seq, num_pages)
            return False
        slot.key, slot.was_leased, slot.num_bytes, slot.num_pages = key, False, 0, num_pages
        slot.is_ready = self.device is None
        if getattr(key, "pinned", False) or getattr(key, "name", None) in self._pinned_from:
            self._note_pin(key, key.id)
        self._slot_of[key] = slot
        self._touch(slot)
        self.counts.num_loads += 1
        if self.device is not None:
            self.num_loading += 1
            self.device.load_adapter(slot.number, key)
        return slot.is_ready

    def _pages_of(self, key: SlotKey) -> int:
        """Return the number of pages of these contents. Raises InvalidRequest if they need more than pinned
        contents can ever leave free.
        """
        if not self.max_pages:
            return NO_PAGES
        needed = max(1, -(-getattr(key, "num_rows", 0) // self._page_rows))
        pinned = sum(
            slot.num_pages for slot in self._slots if slot.key is not None and self._is_pinned(slot.key)
        )
        if needed > self.max_pages - pinned:
            raise InvalidRequest(
                f"lora_request: the adapter takes {needed} pages of the device; there are {self.max_pages}, "
                f"and {pinned} are pinned (--lora-device-rows, --lora-device-percent)",
                param="lora_request",
                code="no_room_for_adapter",
            )
        return needed

    def _room(self, num_pages: int) -> Slot | None:
        """Return an empty slot with num_pages free pages, or None. To make room it empties the least recently
        used slots that are not leased and that no older request waits for.
        """
        free = [slot for slot in self._slots if slot.key is None]
        num_free = self.max_pages - sum(slot.num_pages for slot in self._slots)
        idle = [
            slot
            for slot in self._slots
            if slot.is_ready
            and not slot.num_leases
            and slot.key not in self._wanted
            and not self._is_pinned(slot.key)
        ]
        going: list[Slot] = []
        for slot in sorted(idle, key=lambda slot: slot.used_at):
            if (free or going) and num_free >= num_pages:
                break
            going.append(slot)
            num_free += slot.num_pages
        if num_free < num_pages or not (free or going):
            return None
        self.counts.num_evicted += len(going)
        for slot in going:
            # Loading an adapter empties its slot, too, so only slots without a load have to be dropped.
            if free or slot is not going[-1]:
                self._drop(slot)
            else:
                self._forget(slot)
        return free[0] if free else going[-1]

    def _drain(self, seq: int, num_pages: int) -> None:
        """Drain the slots that will be free soonest, as many as are needed, so that no younger request leases
        them.
        """
        others = [slot for slot in self._slots if slot.key is not None and not self._is_pinned(slot.key)]
        leased = [slot for slot in others if slot.num_leases and slot.key not in self._draining]
        num_free = self.max_pages - sum(slot.num_pages for slot in self._slots)
        num_free += sum(
            slot.num_pages for slot in others if not slot.num_leases and slot.key not in self._wanted
        )
        for slot in sorted(leased, key=lambda slot: (slot.num_leases, slot.used_at)):
            self._draining[slot.key] = seq
            num_free += slot.num_pages
            if num_free >= num_pages:
                break

    def _is_pinned(self, key: SlotKey) -> bool:
        return getattr(key, "pinned", False) and key.id >= self._pinned_from[key.name]

    def _note_pin(self, key: SlotKey, first_id: int) -> None:
        """Unpin earlier adapters of the key's name, whose requests may still come."""
        self._pinned_from[key.name] = max(first_id, self._pinned_from.get(key.name, 0))

    # -- leases ---------------------------------------------------------------------------------------------

    def can_hold(self, keys: Iterable[SlotKey]) -> bool:
        """Return True if all of these contents are ready in slots."""
        return all((slot := self._slot_of.get(key)) is not None and slot.is_ready for key in keys)

    def take(self, keys: tuple[SlotKey, ...], seq: int = 0) -> tuple[int, ...]:
        """Lease the slots of these contents, which are ready, for a request. Returns the slot numbers."""
        assert self.can_hold(keys)
        self._newest = max(self._newest, seq)
        slots = [self._slot_of[key] for key in keys]
        for slot in slots:
            slot.num_leases += 1
            slot.is_retired = False
            if slot.was_leased:
                self.counts.num_hits += 1
            else:
                self.counts.num_misses += 1
            slot.was_leased = True
            self._count_name(slot.key)
            self._touch(slot)
        return tuple(slot.number for slot in slots)

    def give_back(self, keys: tuple[SlotKey, ...]) -> None:
        """End the leases of a request. Contents without a lease stay until their slot is needed."""
        for key in keys:
            slot = self._slot_of[key]
            assert slot.num_leases > 0
            slot.num_leases -= 1
            self._touch(slot)
            if slot.is_retired and not slot.num_leases:
                self._drop(slot)

    def _touch(self, slot: Slot) -> None:
        self._num_events += 1
        slot.used_at = self._num_events

    def _count_name(self, key: SlotKey) -> None:
        name = getattr(key, "name", "")
        if name and (name in self.num_requests_of or len(self.num_requests_of) < MAX_NAMES):
            self.num_requests_of[name] += 1

    # -- answers of the device ------------------------------------------------------------------------------

    def receive(self, answer: AdapterLoaded | AdapterFailed) -> None:
        """Apply the device's answer about its last load into a slot."""
        slot = self._slots[answer.slot]
        assert slot.key is not None
        assert not slot.is_ready
        self.num_loading -= 1
        if isinstance(answer, AdapterLoaded):
            slot.is_ready = True
            slot.num_bytes = answer.num_bytes
            self.counts.load_s += answer.load_s
            if slot.is_retired:
                self._drop(slot)
            return
        self.counts.num_failed += 1
        now = self._clock()
        self._failures = {key: failure for key, failure in self._failures.items() if now < failure[1]}
        self._failures[slot.key] = (self.on_failed(slot.key, answer.message), now + FAILED_S)
        self._forget(slot)

    def _forget(self, slot: Slot) -> None:
        del self._slot_of[slot.key]
        slot.key, slot.is_ready, slot.is_retired, slot.num_bytes = None, False, False, 0
        slot.num_pages = NO_PAGES

    # -- unloading ------------------------------------------------------------------------------------------

    def retire(self, name: str) -> int:
        """Empty the slots of adapters with this name, each when its last lease ends. Returns how many. A
        later request for the same adapter loads it again, without a pin.
        """
        slots = [slot for slot in self._slots if getattr(slot.key, "name", None) == name]
        for slot in slots:
            slot.is_retired = True
            if self._is_pinned(slot.key):
                self._note_pin(slot.key, slot.key.id + 1)
            if slot.is_ready and not slot.num_leases:
                self._drop(slot)
        return len(slots)

    def _drop(self, slot: Slot) -> None:
        if self.device is not None:
            self.device.drop_adapter(slot.number)
        self._forget(slot)

    # -- figures --------------------------------------------------------------------------------------------

    def figures(self) -> dict[str, object]:
        """Return the figures on adapters for /server_info; empty if there are no slots."""
        if not self.num_slots:
            return {}
        counts = self.counts
        return {
            "max_loras": self.num_slots,
            "num_adapters": len(self._slot_of),
            "num_adapters_in_use": self.num_used,
            "adapter_bytes": sum(slot.num_bytes for slot in self._slots),
            "adapter_page_rows": self._page_rows,
            "num_device_pages": sum(slot.num_pages for slot in self._slots),
            "max_device_pages": self.max_pages,
            "num_adapter_hits": counts.num_hits,
            "num_adapter_misses": counts.num_misses,
            "num_adapter_loads": counts.num_loads,
            "num_adapter_failures": counts.num_failed,
            "num_adapter_evictions": counts.num_evicted,
            "adapter_load_s": counts.load_s,
            "adapter_requests": dict(self.num_requests_of),
        }

    @property
    def num_used(self) -> int:
        """Number of leased slots."""
        return sum(slot.num_leases > 0 for slot in self._slots)

    @property
    def num_held(self) -> int:
        """Number of slots that are not empty."""
        return len(self._slot_of)

    def check(self) -> None:
        """Assert that each slot's contents are in no other slot, and that no loading slot is leased."""
        held = {slot.key: slot for slot in self._slots if slot.key is not None}
        assert held == self._slot_of
        assert all(slot.is_ready for slot in self._slots if slot.num_leases)
        assert not any(slot.num_leases or slot.num_pages for slot in self._slots if slot.key is None)
        assert not self.max_pages or sum(slot.num_pages for slot in self._slots) <= self.max_pages
