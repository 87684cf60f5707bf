"""AttentionWindow: how many pages a request needs where every layer has a window. Arithmetic only.

pages   | seen no more |      seen by the next token      |
        0          num_unseen                     kv_len, the next token's place
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from runtime.wire.format import IntArray

Num = TypeVar("Num", int, IntArray)


class AttentionWindow:
    """Window of the last num_tokens tokens, the newest one included."""

    def __init__(self, num_tokens: int, page_size: int) -> None:
        self._num_tokens = num_tokens
        self._page_size = page_size
        self.num_pages = 1 - (1 - num_tokens) // page_size
        """That a row in its decode holds at most, once it has given back what is seen no more: a page in
        progress and those that hold the num_tokens - 1 tokens before it, wherever these begin.
        """

    def num_unseen(self, kv_len: Num) -> Num:
        """Return the number of full pages, from the first on, that neither the token at position kv_len nor a
        later one sees. Negative while all are seen.
        """
        return (kv_len - self._num_tokens + 1) // self._page_size

    def most_pages(self, num_given: Num, num_tokens: Num) -> Num:
        """Return how many pages a row holds at most until it has num_tokens, of which it came with num_given.
        What it came with it holds whole, since it is shared, until the window has left all of it.
        """
        size = self._page_size
        most: Num = np.minimum(-(-num_tokens // size), -(-num_given // size) + self.num_pages)
        return most
