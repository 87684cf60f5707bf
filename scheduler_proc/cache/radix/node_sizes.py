"""NodeSizes: page counts of all nodes of the tree in one array, so that the largest nodes are found without a
walk.
"""

from __future__ import annotations

from array import array

import numpy as np

from scheduler_proc.cache.radix.radix_node import Node

MAX_LOOKED_AT = 1 << 15
"""Number of nodes among which the largest are looked for, which takes 0.2 ms. In a larger tree these are the
nodes that have been there longest, or have taken the place of such a node.
"""
MAX_SIZE = 1 << 12
"""Sizes from this number of pages on are not distinguished."""
_NO_SIZES = np.zeros(0, np.intc)


class NodeSizes:
    """Sizes of the nodes of a radix tree. RadixCache reports every node that is added, removed or resized."""

    def __init__(self) -> None:
        self._sizes = array("i")
        self._nodes: list[Node | None] = []
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._nodes) - len(self._free)

    def add(self, node: Node) -> None:
        if self._free:
            node.place = place = self._free.pop()
            self._nodes[place] = node
            self._sizes[place] = len(node.pages)
        else:
            node.place = len(self._nodes)
            self._nodes.append(node)
            self._sizes.append(len(node.pages))

    def note_size(self, node: Node) -> None:
        self._sizes[node.place] = len(node.pages)

    def discard(self, node: Node) -> None:
        self._nodes[node.place] = None
        self._sizes[node.place] = 0
        self._free.append(node.place)

    def largest(self, num_nodes: int) -> list[Node]:
        """Return the num_nodes nodes with the most pages, the largest first; all nodes if there are fewer."""
        sizes = np.frombuffer(self._sizes, np.intc)[:MAX_LOOKED_AT] if self._sizes else _NO_SIZES
        # Few sizes differ, so that counting them is faster than sorting all.
        num_with = np.bincount(np.minimum(sizes, MAX_SIZE))
        num_from = num_with[::-1].cumsum()  # nodes of at least a size, from the largest size down
        least = max(1, len(num_with) - 1 - int(num_from.searchsorted(num_nodes)))
        places = (sizes >= least).nonzero()[0]
        places = places[(-sizes[places]).argsort(kind="stable")][:num_nodes]
        return [node for place in places.tolist() if (node := self._nodes[place]) is not None]

    def check(self, nodes: list[Node]) -> None:
        """Assert that exactly these nodes are known, with their sizes."""
        assert len(self) == len(nodes)
        assert all(self._nodes[node.place] is node for node in nodes)
        assert all(self._sizes[node.place] == len(node.pages) for node in nodes)
