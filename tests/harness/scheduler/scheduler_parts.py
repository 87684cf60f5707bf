"""Parts of the scheduler's unit tests: requests, and a system whose worker is the fake one."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from runtime.ring.suspects.roster import suspect_of
from runtime.wire.format import pack_ids
from runtime.wire.handle import make_handle, sequence_key
from runtime.wire.messages import TokenizedRequest
from runtime.wire.sampling_params import SamplingParams
from scheduler_proc.cache.kv_cache_manager import KVCacheManager
from scheduler_proc.cache.pages.page_allocator import NO_PAGES
from scheduler_proc.cache.radix.radix_cache import RadixCache
from scheduler_proc.core.request import Request, StopIds
from scheduler_proc.core.rows import Rows
from tests.harness.simulation.sim_system import Setting, System
from tests.harness.simulation.sim_traffic import stream_open

SETTING = Setting(
    page_size=4,
    num_pages=64,
    max_rows=4,
    max_len=96,
    depth=1,
    feeds_back=True,
    budget=64,
    policy="fcfs",
    cache="radix",
    conservativeness=1.0,
    num_slots=0,
    refusal=0.0,
    num_requests=0,
    max_output=8,
    turbulence=0.0,
)


def message(number: int, tokens: list[int], max_tokens: int | None = 4, **fields: Any) -> TokenizedRequest:
    """Request `number` of client 1. `fields` beside those of TokenizedRequest: attempt, sampling."""
    handle = make_handle(fields.pop("client", 1), number, 0, fields.pop("attempt", 0))
    sampling = SamplingParams(max_tokens=max_tokens, seed=1, ignore_eos=True, **fields.pop("sampling", {}))
    return TokenizedRequest(handle, pack_ids(tokens), sampling, stream_open(handle, len(tokens)), **fields)


@contextmanager
def running(**changes: Any) -> Iterator[System]:
    """A system with some of SETTING changed; its worker is stopped at the end."""
    import dataclasses

    system = System(dataclasses.replace(SETTING, **changes), random.Random(0))
    try:
        yield system
    finally:
        system.executor.close()


def run_until_idle(system: System, *messages: Any, max_steps: int = 500) -> None:
    for item in messages:
        assert system.inbox.send(item)
    for _ in range(max_steps):
        system.step()
        if system.scheduler.is_idle:
            return
    raise AssertionError("no progress")


def manager(num_pages: int = 16, page_size: int = 4, max_rows: int = 4, max_len: int = 64) -> KVCacheManager:
    return KVCacheManager(
        num_pages, page_size, Rows(max_rows, max_len), RadixCache(page_size, time.monotonic)
    )


def request(
    kv: KVCacheManager, number: int, tokens: list[int], max_tokens: int = 4, **fields: Any
) -> Request:
    return Request(
        make_handle(1, number),
        sequence_key(make_handle(1, number)),
        suspect_of(make_handle(1, number)),
        number,
        kv.rows,
        SamplingParams(max_tokens=max_tokens, seed=1),
        StopIds(frozenset()),
        len(tokens),
        len(tokens) + max_tokens,
        0,
        pack_ids(tokens),
        **fields,
    )


def try_fork(kv: KVCacheManager, source: Request, child: Request) -> bool:
    """Give a waiting child a row that continues `source`, which has no token in flight: full pages are
    shared, the page in progress is copied on the device. Returns False, with nothing changed, if no row or
    page is left. Only beam searches fork in the product, and only rows of their group (cache/group_pages.py).
    """
    assert not source.num_in_flight
    kv.publish(source)
    num_full, tail = divmod(source.kv_len, kv.page_size)
    if not kv.rows.num_free or kv.num_shared_of[source.row] != num_full:
        return False
    copy = kv._try_take_pages(1) if tail else NO_PAGES
    if copy is None:
        return False
    kv.cache.lock(source.lease)
    kv.counts.num_reused += num_full
    kv.rows.acquire(child, source.kv_len)
    child.lease = source.lease
    kv.tables.start(child.row, num_full, np.concatenate([kv.table[source.row, :num_full], copy]))
    kv.guard.is_counted = False
    if tail:
        kv.tables.copies.append((child.row, kv.table.item(source.row, num_full), copy.item(0)))
    return True


def seat(kv: KVCacheManager, req: Request) -> None:
    """Admit req with room for all its tokens, and count them as computed, as a launched plan would."""
    prefix = kv.match(req)
    kv.cache.lock(prefix.node)
    kv.seat(req, prefix, prefix.num_left)
    kv.rows.kv_len[req.row] = req.num_tokens
