"""Page-by-page model of the radix tree: cached pages, their tenants, and the next one to evict.

It has no runs, no heap and no accounts. Every page is an entry of a dictionary, keyed by namespace and all
tokens up to its end. Each eviction computes anew the tenant that loses a page, and then the minimum over all
of its evictable pages.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import TypeAlias

from runtime.wire.retention import DEFAULT_PRIORITY
from scheduler_proc.cache.pages.retained_pages import RetainedPages
from scheduler_proc.cache.radix.fair_eviction import PAGES_IN_A_ROW
from scheduler_proc.cache.tenants import CacheShares, tenant_of
from tests.harness.simulation.sim_shares import entitled

NUM_PAGES = 60
PathKey: TypeAlias = tuple[bytes, tuple[int, ...]]


@dataclass(slots=True)
class Page:
    number: int
    created: int
    last_used: int
    request_priority: int
    num_hits: int = 0
    locks: int = 0
    retention: int = DEFAULT_PRIORITY
    duration_s: float = 0.0
    expires_at: float = 0.0


RANKS: dict[str, Callable[[Page], int]] = {
    "lru": lambda page: 0,
    "mru": lambda page: -page.last_used,
    "lfu": lambda page: page.num_hits,
    "fifo": lambda page: page.created,
    "filo": lambda page: -page.created,
    "priority": lambda page: page.request_priority,
    "slru": lambda page: 1 if page.num_hits else 0,
}


class Model:
    def __init__(self, page_size: int, policy: str, idle_s: float) -> None:
        self.page_size = page_size
        self.rank = RANKS[policy]
        self.idle_s = idle_s
        self.pages: dict[PathKey, Page] = {}
        self.clock = 0
        self.shares = CacheShares()
        self.num_leases: Counter[bytes] = Counter()
        self.private: Counter[bytes] = Counter()
        self.left_at: dict[bytes, float] = {}

    def path(self, namespace: bytes, tokens: list[int]) -> list[PathKey]:
        size = self.page_size
        return [(namespace, tuple(tokens[: end * size])) for end in range(1, len(tokens) // size + 1)]

    def match(self, namespace: bytes, tokens: list[int]) -> list[int]:
        self.clock += 1
        found = []
        for key in self.path(namespace, tokens):
            if key not in self.pages:
                break
            self.pages[key].last_used = self.clock
            found.append(self.pages[key].number)
        return found

    def insert(
        self, namespace: bytes, tokens: list[int], first: int, numbers: list[int], priority: int
    ) -> list[int]:
        """Pages of what follows the first pages of tokens. Returns the numbers that were there already."""
        self.clock += 1
        found = []
        for key, number in zip(self.path(namespace, tokens)[first:], numbers, strict=True):
            page = self.pages.get(key)
            if page is None:
                self.pages[key] = Page(number, self.clock, self.clock, priority)
            else:
                page.last_used = self.clock
                page.num_hits += 1
                page.request_priority = max(page.request_priority, priority)
                found.append(page.number)
        return found

    def lock(self, keys: list[PathKey], by: int, now: float) -> None:
        for key in keys:
            page = self.pages[key]
            page.locks += by
            if not page.locks and page.duration_s:
                page.expires_at = now + page.duration_s

    def retain(self, keys: list[PathKey], spans: list[RetainedPages], first: int) -> None:
        for number, key in enumerate(keys):
            for span in spans:
                if number >= first and span.start <= number < span.end:
                    self.pages[key].retention = span.priority
                    self.pages[key].duration_s = span.duration_s

    @property
    def num_evictable(self) -> int:
        return sum(not page.locks for page in self.pages.values())

    # -- tenants --------------------------------------------------------------------------------------------

    def begin(self, namespace: bytes) -> None:
        self.num_leases[tenant_of(namespace)] += 1

    def end(self, namespace: bytes, now: float) -> None:
        tenant = tenant_of(namespace)
        self.num_leases[tenant] -= 1
        self.left_at[tenant] = now

    def tenants(self) -> set[bytes]:
        return {tenant_of(space) for space, _ in self.pages} | set(+self.num_leases)

    def idle(self, now: float) -> set[bytes]:
        return {
            tenant
            for tenant in self.tenants()
            if not self.num_leases[tenant] and self.left_at[tenant] + self.idle_s <= now
        }

    def held(self) -> Counter[bytes]:
        return Counter(tenant_of(space) for space, _ in self.pages) + self.private

    def due(self, now: float) -> dict[bytes, int]:
        """Pages that each is entitled to; who is idle is not in it."""
        return entitled(NUM_PAGES, self.tenants() - self.idle(now), self.shares)

    def is_beyond_with(self, tenant: bytes, num_new: int, now: float) -> bool:
        return self.num_leases[tenant] > 1 and self.held()[tenant] + num_new > self.due(now)[tenant]

    def withheld(self, tenant: bytes, now: float) -> int:
        due, held = self.due(now), self.held()
        evictable = Counter(tenant_of(space) for (space, _), page in self.pages.items() if not page.locks)
        return sum(max(0, evictable[each] - max(0, held[each] - due[each])) for each in due if each != tenant)

    # -- eviction -------------------------------------------------------------------------------------------

    def evict(self, num_pages: int, upto: int, taker: bytes | None, now: float) -> set[int]:
        for page in self.pages.values():
            if not page.locks and page.duration_s and page.expires_at <= now:
                page.retention, page.duration_s = DEFAULT_PRIORITY, 0.0
        tenants, due, idle = self.tenants(), self.due(now), self.idle(now)
        num_evictable, turn = self.num_evictable, Turn()
        gives_its_own = taker in due and self.held()[taker] > due[taker]
        upto = min(max(num_pages, upto), num_evictable)
        taken: set[int] = set()
        while len(taken) < upto:
            leaves = candidates = self._leaves()
            if len(tenants) > 1 and len(due) != 1 and num_pages < num_evictable:
                turn.find(self._ratios(leaves, due), partial(self._first_age, leaves))
                if turn.giver is None and len(taken) >= num_pages:
                    break
                giver = turn.giver or (taker if gives_its_own else None)
                givers = idle | {giver} if giver else set()
                candidates = [key for key in leaves if tenant_of(key[0]) in givers]
            victim = self._first_of(candidates or leaves)
            taken.add(self.pages.pop(victim).number)
            turn.num_given += tenant_of(victim[0]) == turn.giver
        return taken

    def _leaves(self) -> list[PathKey]:
        inner = {(space, path[: -self.page_size]) for space, path in self.pages}
        return [key for key, page in self.pages.items() if not page.locks and key not in inner]

    def _ratios(self, leaves: list[PathKey], due: dict[bytes, int]) -> dict[bytes, Fraction | float]:
        """Return who is over and has a leaf, with how many times its share it has."""
        held, with_leaves = self.held(), {tenant_of(space) for space, _ in leaves}
        return {
            tenant: Fraction(held[tenant], due[tenant]) if due[tenant] else math.inf
            for tenant in with_leaves & set(due)
            if held[tenant] > due[tenant]
        }

    def _first_age(self, leaves: list[PathKey], tenant: bytes) -> tuple[int, int]:
        return min(self._place(key) for key in leaves if tenant_of(key[0]) == tenant)[1:]

    def _first_of(self, leaves: list[PathKey]) -> PathKey:
        """Return the oldest of the leaves that each tenant gives first. Retention counts within a tenant."""
        first_of: dict[bytes, PathKey] = {}
        for key in sorted(leaves, key=self._place):
            first_of.setdefault(tenant_of(key[0]), key)
        return min(first_of.values(), key=lambda key: self._place(key)[1:])

    def _place(self, key: PathKey) -> tuple[int, int, int]:
        page = self.pages[key]
        return page.retention, self.rank(page), page.last_used


class Turn:
    """Which of those that are over gives the next page, if there is one."""

    def __init__(self) -> None:
        self.giver: bytes | None = None
        self.num_given = 0

    def find(
        self,
        ratios: dict[bytes, Fraction | float],
        first_age: Callable[[bytes], tuple[int, int]],
    ) -> None:
        if self.giver in ratios:
            others = [ratio for tenant, ratio in ratios.items() if tenant != self.giver]
            if self.num_given < PAGES_IN_A_ROW or not others or ratios[self.giver] > max(others):
                return
        most = max(ratios.values(), default=None)
        equals = [tenant for tenant, ratio in ratios.items() if ratio == most]
        self.giver = min(equals, key=first_age, default=None)
        self.num_given = 0
