"""KVCacheManager: who owns a page, and what the device is told of it."""

from __future__ import annotations

import numpy as np

from runtime.wire.format import unpack_ids
from scheduler_proc.cache.kv_cache_manager import KVCacheManager
from tests.harness.scheduler.scheduler_parts import manager, request, seat, try_fork

PROMPT = list(range(10))


def device_writes(kv: KVCacheManager) -> dict[int, tuple[int, list[int]]]:
    """row -> (start, pages) of the next plan."""
    writes = kv.tables.take_table_writes()
    pages = unpack_ids(writes.pages).tolist()
    out = {}
    for row, start, n in unpack_ids(writes.spans).reshape(-1, 3).tolist():
        out[row] = (start, pages[:n])
        pages = pages[n:]
    assert not pages
    return out


def test_a_request_reuses_what_another_published_but_computes_its_last_token() -> None:
    kv = manager()
    first, second = request(kv, 1, PROMPT[:8]), request(kv, 2, PROMPT[:8])
    seat(kv, first)
    kv.publish_prefill(first)
    prefix = kv.match(second)
    assert prefix.pages.tolist() == kv.table[first.row, :1].tolist(), "one token is left to compute"
    kv.check()


def test_duplicate_pages_are_freed_and_the_row_reads_the_shared_ones() -> None:
    kv = manager()
    first, second = request(kv, 1, PROMPT), request(kv, 2, PROMPT)
    seat(kv, first)
    seat(kv, second)
    device_writes(kv)
    num_free = kv.pages.num_free
    kv.publish_prefill(first)
    kv.publish_prefill(second)
    assert kv.pages.num_free == num_free + 2
    assert kv.table[second.row, :2].tolist() == kv.table[first.row, :2].tolist()
    assert kv.table[second.row, 2] != kv.table[first.row, 2], "the page in progress stays private"
    assert device_writes(kv)[second.row] == (0, kv.table[second.row, :3].tolist())
    kv.check()


def test_duplicates_go_out_again_at_the_earliest_with_the_plan_that_repoints() -> None:
    kv = manager(num_pages=6)
    first, second, third = (request(kv, i, tokens) for i, tokens in enumerate((PROMPT, PROMPT, [50] * 8)))
    seat(kv, first)
    seat(kv, second)
    device_writes(kv)
    old = set(kv.table[second.row, :2].tolist())
    kv.publish_prefill(first)
    kv.publish_prefill(second)
    seat(kv, third)
    writes = device_writes(kv)
    assert set(writes[third.row][1]) == old, "its former pages have a new owner"
    assert old.isdisjoint(writes[second.row][1]), "and the same plan tells the row of its new ones"


def test_an_entry_that_changed_twice_is_told_once_and_a_lost_row_not_at_all() -> None:
    kv = manager()
    first, second = request(kv, 1, PROMPT), request(kv, 2, [9] * 6)
    seat(kv, first)
    seat(kv, second)
    kv.release(second)
    assert kv.try_reserve(first, 16)
    assert device_writes(kv) == {first.row: (0, kv.table[first.row, :4].tolist())}
    assert device_writes(kv) == {}
    kv.check()


def test_reserve_takes_all_pages_or_none() -> None:
    kv = manager(num_pages=4)
    req = request(kv, 1, PROMPT)
    seat(kv, req)
    assert not kv.try_reserve(req, 17)
    assert kv.num_pages[req.row] == 3
    assert kv.try_reserve(req, 16)
    assert kv.num_pages[req.row] == 4
    kv.check()


def test_the_decode_lane_reserves_for_all_rows_or_none() -> None:
    kv = manager(num_pages=5)
    first, second = request(kv, 1, PROMPT[:8]), request(kv, 2, [30] * 8)
    seat(kv, first)
    seat(kv, second)
    rows = np.array([first.row, second.row])
    assert not kv.try_reserve_next(rows), "two pages are needed, one is left"
    assert kv.pages.num_free == 1
    assert kv.try_reserve_next(rows[:1])
    assert kv.try_reserve_next(rows[:1]), "its page has room"
    kv.check()


def test_a_reservation_evicts_what_nobody_uses() -> None:
    kv = manager(num_pages=4)
    first = request(kv, 1, PROMPT)
    seat(kv, first)
    kv.release(first)
    assert kv.cache.num_pages == 2
    assert kv.num_available == 4
    second = request(kv, 2, [40] * 15)
    seat(kv, second)
    assert kv.counts.num_evicted == 2
    kv.check()


def test_releasing_keeps_full_pages_of_known_tokens_only() -> None:
    kv = manager()
    req = request(kv, 1, PROMPT[:8])
    seat(kv, req)
    assert kv.try_reserve(req, 12)
    kv.rows.kv_len[req.row] = 12  # four tokens were sampled and fed back, the host knows none of them
    kv.rows.in_flight[req.row] = 4
    kv.release(req)
    assert kv.cache.num_pages == 2
    kv.check()


def test_a_waiting_request_awaits_the_page_that_a_running_one_computes() -> None:
    kv = manager()
    first, second, other = request(kv, 1, PROMPT), request(kv, 2, PROMPT), request(kv, 3, [9] * 10)
    seat(kv, first)
    assert kv.must_await(second, kv.match(second))
    assert not kv.must_await(other, kv.match(other))
    assert kv.still_awaits(second)
    kv.publish_prefill(first)
    assert not kv.still_awaits(second)
    assert not kv.must_await(second, kv.match(second))
    assert kv.match(second).num_pages == 2
    kv.check()


def test_nobody_awaits_a_row_that_is_gone() -> None:
    kv = manager()
    first, second = request(kv, 1, PROMPT), request(kv, 2, PROMPT)
    seat(kv, first)
    kv.rows.kv_len[first.row] = 0  # its plan was never launched
    assert kv.must_await(second, kv.match(second))
    kv.release(first)
    assert not kv.still_awaits(second)
    kv.check()


def test_a_fork_shares_full_pages_and_copies_the_page_in_progress() -> None:
    kv = manager()
    source, child = request(kv, 1, PROMPT), request(kv, 2, PROMPT)
    seat(kv, source)
    assert try_fork(kv, source, child)
    assert kv.table[child.row, :2].tolist() == kv.table[source.row, :2].tolist()
    assert kv.tables.take_page_copies() == ((kv.table[source.row, 2], kv.table[child.row, 2]),)
    kv.check()
    kv.release(source)
    kv.release(child)
    kv.check()
    assert kv.num_available == kv.pages.num_pages


def test_the_copy_for_a_child_that_is_gone_is_not_made() -> None:
    kv = manager()
    source, child = request(kv, 1, PROMPT), request(kv, 2, PROMPT)
    seat(kv, source)
    assert try_fork(kv, source, child)
    kv.release(child)
    assert kv.tables.take_page_copies() == ()
    assert [setup.row for setup in kv.rows.take_setups()] == [source.row]


def test_cached_tokens_are_counted_at_the_first_admission_only() -> None:
    kv = manager()
    req = request(kv, 1, PROMPT, num_retractions=0)
    seat(kv, req)
    assert req.cached_tokens == 0
    kv.release(req)
    seat(kv, req)
    assert kv.num_shared[req.row] == 2
    assert req.cached_tokens == 0


def test_flush_frees_what_no_row_uses() -> None:
    kv = manager()
    first, second = request(kv, 1, PROMPT), request(kv, 2, [9] * 9)
    seat(kv, first)
    seat(kv, second)
    kv.release(first)
    assert kv.flush() == 2
    assert kv.cache.num_pages == 0
    kv.check()


def test_pages_taken_found_missed_and_evicted_are_counted_exactly() -> None:
    kv = manager(num_pages=6)
    first, again, other = request(kv, 1, PROMPT), request(kv, 2, PROMPT), request(kv, 3, [40] * 19)
    seat(kv, first)
    assert (kv.counts.num_new, kv.counts.num_reused, kv.counts.num_missed) == (3, 0, 3)
    kv.publish_prefill(first)
    seat(kv, again)
    assert (kv.counts.num_new, kv.counts.num_reused, kv.counts.num_missed) == (4, 2, 4)
    assert kv.counts.hit_rate == 2 / 6
    kv.release(first)
    kv.release(again)
    seat(kv, other)
    assert (kv.counts.num_new, kv.counts.num_missed, kv.counts.num_evicted) == (9, 9, 1)
    assert not kv.try_reserve(other, 40)
    assert kv.counts.num_new == 9, "nothing was taken"
    kv.release(other)
    assert kv.flush() == kv.counts.num_flushed == 5
    assert kv.counts.num_evicted == 1
    kv.check()
