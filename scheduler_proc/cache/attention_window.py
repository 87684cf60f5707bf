"""AttentionWindow: number of pages that a request needs where every layer has a sliding window. Arithmetic
only.

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
        """Maximum number of pages that a decoding row holds once it has given back unseen ones: the page in
        progress, and those with the num_tokens - 1 tokens before it, wherever these begin.
        """

    def num_unseen(self, kv_len: Num) -> Num:
        """Return how many full pages at the start neither the token at position kv_len nor a later one sees.
        Negative if all pages are still seen.
        """
        return (kv_len - self._num_tokens + 1) // self._page_size

    def most_pages(self, num_given: Num, num_tokens: Num) -> Num:
        """Return the most pages that a row ever holds until it has num_tokens, if it started with num_given.
        It holds the pages that it started with whole, since they are shared, until the window has left all of
        them.
        """
        size = self._page_size
        most: Num = np.minimum(-(-num_tokens // size), -(-num_given // size) + self.num_pages)
        return most
