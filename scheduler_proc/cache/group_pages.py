"""Pages of the rows of a beam search (a row group), which share what they have in common by counting owners,
also outside the prefix cache.

When a row forks, it shares its full pages with the other row, and its page in progress is copied on the
device into the other row's own page in progress. So a fork takes no page; each further row gets that page
when it is seated. Pages of a beam that nobody continues are free at once and never cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from runtime.wire.format import IntArray
from scheduler_proc.cache.kv_cache_manager import KVCacheManager
from scheduler_proc.cache.pages.page_allocator import NO_PAGES
from scheduler_proc.core.request import FINISHED, Request, RowGroup


def num_shared_pages(kv: KVCacheManager, num_prompt: int) -> int:
    """Return how many pages of a prompt the rows of a group share during their whole life."""
    return num_prompt // kv.page_size if kv.cache.shares and kv.window is None else 0


def most_further_pages(kv: KVCacheManager, num_prompt: int, max_len: int, width: int) -> int:
    """Return the most pages that the further rows of a group can ever hold."""
    return (width - 1) * (kv.num_pages_for(max_len) - num_shared_pages(kv, num_prompt))


def seat_others(kv: KVCacheManager, group: RowGroup) -> int:
    """Give rows to the other members of a group; its first member has one already. Returns the number of
    pages taken.
    """
    head = group.head
    others = [
        replace(head, features=(), row=-1, lease=None, parked=head.tokens.tobytes(), computes=None)
        for _ in range(group.width - 1)
    ]
    group.start(others)
    rows, root = kv.rows, kv.cache.match(b"", 0, head.namespace).node
    shared_len = num_shared_pages(kv, head.num_prompt) * kv.page_size
    for other in others:
        rows.acquire(other, 0)
        row = other.row
        rows.num_tokens_of[row] = 0  # it is not ready until a hypothesis is forked to it
        rows.max_len_of[row] -= shared_len
        kv.cache.lock(root)
        other.lease = root
        kv.tables.start(row, 0, NO_PAGES)
        has_page = kv.try_reserve(other, 1)
        assert has_page, "its pages were promised"
    return len(others)


def advance_group(kv: KVCacheManager, group: RowGroup, beams: Sequence[tuple[int, int]]) -> None:
    """Continue a group with its next beams, each given as (index of the beam that it continues, token). The
    first beam that continues a row keeps that row; each further one takes over a row that no beam continues.
    """
    assert len(beams) <= group.width
    before = group.beams
    kept = {before[parent].row for parent, _ in beams}
    free = [member for member in group.members if member.row not in kept]
    after: list[Request] = []
    for parent, _ in beams:
        source = before[parent]
        if source.row in kept:
            kept.remove(source.row)
            after.append(source)
        else:
            other = free.pop()
            if not _fork_in_place(kv, source, other):
                _fork(kv, source, other)
            after.append(other)
    if after:
        tokens, num_tokens = kv.rows.tokens, kv.rows.num_tokens_of
        at = num_tokens[after[0].row]  # the same for all of them
        for beam, (_, token) in zip(after, beams, strict=True):
            row = beam.row
            tokens[row, at] = token
            num_tokens[row] = at + 1
    group.beams = after


def _fork_in_place(kv: KVCacheManager, source: Request, other: Request) -> bool:
    """Make `other` a second continuation of `source` if the two differ in the page in progress only, which is
    nearly always so. Its page table then stays as it is and the device needs no update. Returns False, with
    nothing changed, if they differ elsewhere.
    """
    rows, table = kv.rows, kv.table
    src, row = source.row, other.row
    kv_len = rows.kv_len_of[src]
    num_full, tail = divmod(kv_len, kv.page_size)
    if not tail or rows.kv_len_of[row] != kv_len or other.lease is not source.lease:
        return False
    shared, first = kv.num_shared_of[row], _first_private(kv, row)
    if shared != kv.num_shared_of[src] or first != _first_private(kv, src):
        return False
    if table[row, first:num_full].tobytes() != table[src, first:num_full].tobytes():
        return False
    spare = table.item(row, num_full)
    assert not kv.pages.num_more_owners.item(spare), "a page in progress is shared"
    kv.tables.copies.append((row, table.item(src, num_full), spare))
    rows.tokens[row, source.num_prompt : kv_len] = rows.tokens[src, source.num_prompt : kv_len]
    return True


def _fork(kv: KVCacheManager, source: Request, other: Request) -> None:
    """Make `other` a second continuation of `source`. No token of `source` may be in flight."""
    rows, tables, table = kv.rows, kv.tables, kv.table
    src, row, kv_len = source.row, other.row, source.kv_len
    num_full, tail = divmod(kv_len, kv.page_size)
    own, first, spare = tables.private(row), _first_private(kv, row), 0
    if tail:
        own, spare = own[:-1], own.item(-1)
        assert not kv.pages.num_more_owners.item(spare), "a page in progress is shared"
        tables.copies.append((row, table.item(src, num_full), spare))
    first_of_source = _first_private(kv, src)
    wanted = table[src, first_of_source:num_full]
    num_same = _num_same(own, wanted) if first == first_of_source else 0
    if num_same < len(wanted):
        kv.pages.share(wanted[num_same:])
    if num_same < len(own):
        kv.pages.free(own[num_same:].copy())
    changed_from = first + num_same if first == first_of_source else 0
    table[row, changed_from:num_full] = table[src, changed_from:num_full]
    if tail:
        table[row, num_full] = spare
    tables.num_pages_of[row] = num_full + (tail > 0)
    tables.num_shared_of[row], tables.num_gone_of[row] = tables.num_shared_of[src], tables.num_gone_of[src]
    tables.changed(row, min(changed_from, num_full))
    kv.guard.is_counted = False
    if other.lease is not source.lease:
        kv.cache.lock(source.lease)
        kv.cache.unlock(other.lease)
        other.lease = source.lease
    rows.tokens[row, source.num_prompt : kv_len] = rows.tokens[src, source.num_prompt : kv_len]
    rows.num_tokens_of[row] = rows.kv_len_of[row] = kv_len
    rows.max_len_of[row] = source.max_len


def keep_best(kv: KVCacheManager, group: RowGroup, tokens: IntArray) -> None:
    """Give the request the row of the beam that has most of the winning output in common, so that the cache
    gets the pages of that output when the row is released.
    """
    rows, head = kv.rows, group.head
    beam, num_same = max(((beam, _num_same(_output(kv, beam), tokens)) for beam in group.beams), key=_second)
    if beam is not head:
        beam.row, head.row = head.row, beam.row
        beam.lease, head.lease = head.lease, beam.lease
        rows.holder[beam.row], rows.holder[head.row] = beam, head
    rows.num_given_of[head.row] = head.num_prompt + num_same


def release_others(kv: KVCacheManager, group: RowGroup) -> None:
    """Release the rows and pages of all members except the request itself, whose row is released next."""
    for other in group.end():
        other.status = FINISHED  # its tokens are not kept
        kv.release(other)


def _output(kv: KVCacheManager, member: Request) -> IntArray:
    return kv.rows.tokens[member.row, member.num_prompt : member.num_tokens]


def _second(pair: tuple[Request, int]) -> int:
    return pair[1]


def _first_private(kv: KVCacheManager, row: int) -> int:
    return kv.num_shared_of[row] or kv.num_gone_of[row]


def _num_same(one: IntArray, other: IntArray) -> int:
    """Return the length of the common beginning of both."""
    n = min(len(one), len(other))
    differ = (one[:n] != other[:n]).nonzero()[0]
    return differ.item(0) if len(differ) else n
