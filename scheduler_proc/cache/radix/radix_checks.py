"""Assertions that eviction queues and tenants' accounts agree with the nodes of a radix tree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scheduler_proc.cache.ledger import Ledger
from scheduler_proc.cache.radix.lazy_heap import LazyHeap
from scheduler_proc.cache.radix.radix_node import Node
from scheduler_proc.cache.tenants import tenant_of


def check_lines(nodes: Sequence[Node], ledger: Ledger, expiring: LazyHeap[tuple[float], Node]) -> None:
    """Assert that exactly the nodes that may be evicted, and those whose retention expires, are in their
    queues, at the right place.
    """
    leaves = [node for node in nodes if not node.lock and not node.children]
    assert all(node in node.account.leaves for node in leaves), "never to be evicted"
    num_in_line = sum(len(account.leaves) for account in ledger)
    assert num_in_line == len(leaves), "what is used, or gone, is up for eviction"
    for node in leaves:
        retention, _, last_used = node.account.leaves.key_of(node)
        assert (retention, last_used) == (node.retention, node.last_used), "its place in line is old"
    retained = [node for node in nodes if node.duration_s and not node.lock]
    assert all(node in expiring for node in retained), "retained for ever"
    assert len(expiring) == len(retained), "what is used, or gone, expires"


def check_accounts(nodes: Sequence[Node], roots: Iterable[Node], ledger: Ledger) -> None:
    """Assert that every node is counted in the account of its namespace's tenant."""
    counts: dict[bytes, list[int]] = {}
    for root in roots:
        count = counts.setdefault(tenant_of(root.namespace), [0, 0, 0, 0])
        count[0] += 1
        count[1] += root.lock > 0
    for node in nodes:
        assert node.parent is not None
        assert node.account is node.parent.account, "another tenant's"
        count = counts[node.account.tenant]
        count[2] += len(node.pages)
        count[3] += len(node.pages) if node.lock else 0
    ledger.check(counts)
