"""NodeSizes: how many pages each node of the tree has, side by side, so that the largest are found without a
walk.
"""

from __future__ import annotations

from array import array

import numpy as np

from scheduler_proc.cache.radix.radix_node import Node

MAX_LOOKED_AT = 1 << 15
"""Number of nodes among which the largest are looked for: 0.2 ms. Of a larger tree those that have been there
longest, or have taken the place of such a one.
"""
MAX_SIZE = 1 << 12
"""Number of pages from which on sizes are not counted apart."""
_NO_SIZES = np.zeros(0, np.intc)


class NodeSizes:
    """Sizes of the nodes of a radix tree, told by RadixCache of every node that has come, gone, or has
    another size.
    """

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
        """Return so many nodes with the most pages, the largest first; all where there are fewer."""
        sizes = np.frombuffer(self._sizes, np.intc)[:MAX_LOOKED_AT] if self._sizes else _NO_SIZES
        # Few sizes differ, so that counting them is faster than sorting all.
        num_with = np.bincount(np.minimum(sizes, MAX_SIZE))
        num_from = num_with[::-1].cumsum()  # nodes of at least a size, from the largest size down
        least = max(1, len(num_with) - 1 - int(num_from.searchsorted(num_nodes)))
        places = (sizes >= least).nonzero()[0]
        places = places[(-sizes[places]).argsort(kind="stable")][:num_nodes]
        return [node for place in places.tolist() if (node := self._nodes[place]) is not None]

    def check(self, nodes: list[Node]) -> None:
        """Assert that these are the nodes that it knows, and their sizes."""
        assert len(self) == len(nodes)
        assert all(self._nodes[node.place] is node for node in nodes)
        assert all(self._sizes[node.place] == len(node.pages) for node in nodes)
