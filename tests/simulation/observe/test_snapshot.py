"""A snapshot: what it says is what the scheduler holds, and it says nothing of what requests are about."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import numpy as np
import pytest

from runtime.wire.format import pack_ids
from runtime.wire.messages import ControlRequest
from scheduler_proc.cache.radix.node_sizes import NodeSizes
from scheduler_proc.cache.radix.radix_cache import RadixCache
from scheduler_proc.observe.snapshot import MAX_NODES, MAX_WAITING
from tests.harness.scheduler.scheduler_parts import message, run_until_idle, running
from tests.harness.simulation.sim_system import System


def snapshot(system: System) -> Any:
    system.inbox.send(ControlRequest(7, 1, "snapshot"))
    system.step()
    reply = system.detokenizer.replies[-1]
    assert reply.ok
    return msgspec.msgpack.decode(reply.body)


def rows_by_number(shown: Any) -> dict[int, dict[str, Any]]:
    columns = shown["rows"]
    assert len({len(column) for column in columns.values()}) == 1
    return {
        number: {name: column[at] for name, column in columns.items()}
        for at, number in enumerate(columns["number"])
    }


def test_rows_and_the_line_behind_them_are_those_of_the_scheduler() -> None:
    with running(max_rows=2) as system:
        for number in range(5):
            system.inbox.send(message(number, [number] * 9, max_tokens=12, priority=-number))
        system.step()
        system.step()
        shown = snapshot(system)
        assert (shown["num_running"], shown["num_waiting"], shown["num_accepted"]) == (2, 3, 5)
        assert shown["waiting"]["number"] == [3, 4, 5]
        assert shown["waiting"]["reason"] == ["row"] * 3
        assert shown["waiting"]["num_tokens"] == [9, 9, 9]
        assert shown["waiting"]["priority"] == [-2, -3, -4]
        rows = rows_by_number(shown)
        assert list(rows) == [1, 2]
        for number, row in rows.items():
            req = system.scheduler.rows.holder[row["row"]]
            assert req is not None
            assert req.seq == number
            assert row["num_prompt"] == row["num_given"] == 9
            assert row["max_tokens"] == 21
            assert 10 <= row["num_tokens"] <= req.num_tokens
            assert row["num_pages"] == system.scheduler.kv.num_pages[req.row]


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_pause_is_why_all_wait(mode: Any) -> None:
    with running(max_rows=1) as system:
        for number in range(3):
            system.inbox.send(message(number, [number] * 5))
        system.step()
        system.inbox.send(ControlRequest(7, 2, "pause_generation", mode=mode))
        shown = snapshot(system)
        assert shown["is_paused"]
        assert shown["waiting"]["reason"] == ["paused"] * (2 if mode == "in_place" else 3)
        assert shown["num_retracted"] == (mode == "retract")


def test_why_a_request_waits_beside_free_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(budget=8) as system:
        for number in range(2):
            system.inbox.send(message(number, [5] * 24))
        system.step()
        assert snapshot(system)["waiting"]["reason"] == ["room"]
        monkeypatch.setattr(system.scheduler.kv, "still_awaits", lambda req: req.seq == 2)
        assert snapshot(system)["waiting"]["reason"] == ["prefix"]


def test_pages_and_tree_are_those_of_the_pool() -> None:
    with running() as system:
        run_until_idle(system, *(message(number, [number] * 13) for number in range(6)))
        shown = snapshot(system)
        kv = system.scheduler.kv
        pages, tree = shown["pages"], shown["tree"]
        assert pages["num_free"] + pages["num_cached"] == pages["num_pages"] == kv.pages.num_pages
        assert pages["num_cached"] == pages["num_evictable"] == kv.cache.num_pages
        assert tree["num_nodes"] == len(tree["id"]) == 12
        assert sum(tree["num_tokens"]) == pages["num_cached"] * pages["page_size"]
        assert tree["num_tokens"] == sorted(tree["num_tokens"], reverse=True)
        assert set(tree["lock"]) == {0}


def test_its_size_is_bounded_whatever_waits_or_is_cached() -> None:
    with running(max_rows=1, num_pages=4000, page_size=1) as system:
        pairs = itertools.islice(itertools.product(range(96), repeat=2), 600)
        for number, pair in enumerate(pairs):
            run_until_idle(system, message(number, [*pair, 1], max_tokens=1))
        for number in range(1000, 1000 + 2 * MAX_WAITING):
            system.inbox.send(message(number, [7] * 5, max_tokens=40))
        for _ in range(3):
            system.step()
        shown = snapshot(system)
        assert len(shown["waiting"]["number"]) == MAX_WAITING < shown["num_waiting"]
        assert len(shown["tree"]["id"]) == MAX_NODES < shown["tree"]["num_nodes"]


def test_it_has_no_token_and_no_client() -> None:
    with running() as system:
        client, token = 0x0BAD_CAFE_F00D, 77
        for number in range(6):
            system.inbox.send(message(number, [token] * (9 + number), client=client, max_tokens=8))
        for _ in range(3):
            system.step()
        shown = snapshot(system)
        for name in ("id", "parent"):
            del shown["tree"][name]
        columns = [column for part in ("rows", "waiting", "tree") for column in shown[part].values()]
        values = [value for column in columns if isinstance(column, list) for value in column]
        assert len(values) > 50
        assert not {client, token} & set(values)
        assert {type(value) for value in values} == {int, float, str}


def test_the_largest_nodes_are_the_largest() -> None:
    cache, draw = RadixCache(2, lambda: 0.0), np.random.default_rng(3)
    next_page = 1
    for _ in range(300):
        num_pages = int(draw.integers(1, 9))
        tokens = draw.integers(0, 3, num_pages * 2, dtype=np.int32)
        match = cache.match(pack_ids(tokens), len(tokens), b"")
        cache.lock(match.node)
        found = len(match.pages)
        pages = np.arange(next_page, next_page + num_pages - found, dtype=np.int32)
        next_page += len(pages)
        cache.unlock(cache.insert(match.node, pack_ids(tokens[found * 2 :]), pages).node)
        if draw.random() < 0.2:
            cache.evict(int(draw.integers(1, 12)))
        cache.check()
        sizes = sorted((len(node.pages) for node in cache.nodes()), reverse=True)
        assert cache.num_nodes == len(sizes)
        assert cache.largest_nodes(10).num_pages == sizes[:10]


def test_the_search_for_the_largest_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_proc.cache.radix.node_sizes.MAX_LOOKED_AT", 16)
    cache = RadixCache(1, lambda: 0.0)
    root = cache.match(b"", 0, b"").node
    for number in range(40):
        cache.lock(root)
        cache.insert(root, pack_ids([number]), np.array([number + 1], np.int32))
    assert len(cache.largest_nodes(100).uid) == 16
    assert cache.num_nodes == 40


def test_a_place_is_used_again() -> None:
    cache = RadixCache(1, lambda: 0.0)
    assert isinstance(cache._sizes, NodeSizes)
    for number in range(50):
        root = cache.match(b"", 0, b"").node
        cache.lock(root)
        cache.unlock(cache.insert(root, pack_ids([number]), np.array([number + 1], np.int32)).node)
        assert len(cache.evict(1)) == 1
    assert len(cache._sizes._nodes) == 1
