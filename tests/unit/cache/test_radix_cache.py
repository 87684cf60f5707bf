"""RadixCache: what is found, what is kept, what is given back."""

from __future__ import annotations

import time

import numpy as np
import pytest

from runtime.wire.format import IntArray, pack_ids
from scheduler_proc.cache.no_cache import NoCache
from scheduler_proc.cache.radix.radix_cache import RadixCache


def pages(*numbers: int) -> IntArray:
    return np.array(numbers, np.int32)


def ids(*tokens: int) -> bytes:
    return pack_ids(tokens)


def put(cache: RadixCache, tokens: bytes, new_pages: IntArray, namespace: bytes = b"") -> None:
    """Insert from the root and leave unlocked."""
    node = cache.match(b"", 0, namespace).node
    cache.lock(node)
    done = cache.insert(node, tokens, new_pages)
    cache.unlock(done.node)
    cache.check()


def found(cache: RadixCache, tokens: bytes, namespace: bytes = b"") -> list[int]:
    got: list[int] = cache.match(tokens, len(tokens) // 4, namespace).pages.tolist()
    return got


@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_only_full_pages_are_found(page_size: int) -> None:
    cache = RadixCache(page_size, time.monotonic)
    tokens = list(range(4 * page_size))
    put(cache, ids(*tokens), pages(1, 2, 3, 4))
    for n in range(len(tokens) + 1):
        assert found(cache, ids(*tokens[:n])) == list(range(1, n // page_size + 1))
    cache.check()


def test_a_run_is_split_where_prompts_part() -> None:
    cache = RadixCache(2, time.monotonic)
    put(cache, ids(1, 2, 3, 4, 5, 6), pages(1, 2, 3))
    assert found(cache, ids(1, 2, 3, 4, 9, 9)) == [1, 2]
    put(cache, ids(1, 2, 3, 4, 9, 9), pages(7, 8, 4))
    assert found(cache, ids(1, 2, 3, 4, 9, 9)) == [1, 2, 4]
    assert found(cache, ids(1, 2, 3, 4, 5, 6)) == [1, 2, 3]
    assert cache.num_pages == 4


def test_insert_names_the_pages_that_were_there_first() -> None:
    cache = RadixCache(1, time.monotonic)
    put(cache, ids(1, 2, 3), pages(1, 2, 3))
    root = cache.match(b"", 0, b"").node
    cache.lock(root)
    done = cache.insert(root, ids(1, 2, 9), pages(7, 8, 9))
    assert done.found.tolist() == [1, 2]
    assert done.num_owned == 3
    cache.unlock(done.node)
    cache.check()


def test_namespaces_share_nothing_and_empty_ones_are_dropped() -> None:
    cache = RadixCache(1, time.monotonic)
    put(cache, ids(1, 2), pages(1, 2), b"a")
    assert found(cache, ids(1, 2), b"b") == []
    assert found(cache, ids(1, 2), b"a") == [1, 2]
    assert cache.num_namespaces == 1
    cache.evict(2)
    assert cache.num_namespaces == 0
    cache.check()


def test_a_leased_namespace_outlives_its_pages() -> None:
    cache = RadixCache(1, time.monotonic)
    node = cache.match(ids(1), 1, b"a").node
    cache.lock(node)
    put(cache, ids(1), pages(1), b"a")
    assert cache.evict(1).tolist() == [1]
    put(cache, ids(2), pages(2), b"a")
    assert found(cache, ids(2), b"a") == [2]
    cache.unlock(node)
    cache.check()


def test_locked_pages_are_not_evicted() -> None:
    cache = RadixCache(1, time.monotonic)
    put(cache, ids(1, 2, 3), pages(1, 2, 3))
    node = cache.match(ids(1, 2), 2, b"").node
    cache.lock(node)
    assert cache.num_evictable == 1
    assert cache.evict(3).tolist() == [3]
    cache.unlock(node)
    assert cache.num_evictable == 2
    cache.check()


def test_a_split_under_a_lease_keeps_the_lease_whole() -> None:
    cache = RadixCache(1, time.monotonic)
    put(cache, ids(1, 2, 3), pages(1, 2, 3))
    node = cache.match(ids(1, 2, 3), 3, b"").node
    cache.lock(node)
    assert found(cache, ids(1, 9)) == [1]
    cache.check()
    assert cache.num_evictable == 0
    cache.unlock(node)
    assert cache.num_evictable == 3
    cache.check()


def test_eviction_takes_the_shortfall_from_the_least_recently_used_leaf() -> None:
    cache = RadixCache(1, time.monotonic)
    put(cache, ids(1, 2, 3), pages(1, 2, 3))
    put(cache, ids(5, 6, 7), pages(5, 6, 7))
    found(cache, ids(1, 2, 3))
    assert cache.evict(2).tolist() == [6, 7]
    assert found(cache, ids(5, 6, 7)) == [5]
    found(cache, ids(1, 2, 3))
    assert cache.evict(2).tolist() == [5, 3]
    cache.check()
    assert cache.evict(9).tolist() == [1, 2]
    assert cache.evict(1).tolist() == []
    assert cache.num_pages == cache.num_evictable == 0


def test_match_len_agrees_with_match_and_changes_nothing() -> None:
    cache = RadixCache(2, time.monotonic)
    put(cache, ids(1, 2, 3, 4, 5, 6), pages(1, 2, 3))
    put(cache, ids(1, 2, 9, 9), pages(1, 4))
    version, nodes = cache.version, len(list(cache.nodes()))
    for tokens in (ids(1, 2, 3, 4, 7, 7), ids(1, 2, 9, 9, 1), ids(4), ids(1, 2)):
        assert cache.match_len(tokens, len(tokens) // 4, b"") == 2 * len(found(cache, tokens))
    assert cache.match_len(ids(1, 2), 2, b"nowhere") == 0
    assert (cache.version, cache.num_namespaces) == (version, 1)
    assert len(list(cache.nodes())) <= nodes + 1


def test_version_changes_when_a_match_could() -> None:
    cache = RadixCache(1, time.monotonic)
    versions = [cache.version]
    put(cache, ids(1, 2), pages(1, 2))
    versions.append(cache.version)
    found(cache, ids(1, 2))
    assert cache.version == versions[-1]
    cache.evict(1)
    versions.append(cache.version)
    assert len(set(versions)) == 3


def test_no_cache_never_finds_and_never_keeps() -> None:
    cache = NoCache(4, time.monotonic)
    match = cache.match(ids(1, 2, 3, 4), 4, b"")
    cache.lock(match.node)
    done = cache.insert(match.node, ids(1, 2, 3, 4), pages(1))
    cache.unlock(done.node)
    assert done.num_owned == len(done.found) == len(match.pages) == cache.match_len(ids(1), 1, b"") == 0
    assert list(cache.owned_pages()) == []
    assert len(cache.evict(4)) == 0
