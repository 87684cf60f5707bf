"""PageTables: the pages that each row reads, in the order of its tokens, and the changes that the device has
not been told yet. Only KVCacheManager writes it.
"""

from __future__ import annotations

from array import array

import msgspec
import numpy as np

from runtime.wire.format import IntArray
from scheduler_proc.core.row_columns import RowArray, int_column

CLEAN = (1 << 31) - 1
PAGE_BYTES = 4
"""Size of a page number in the table."""
MAX_ONE_BY_ONE = 8
"""Number of rows whose changes are read one by one. From about ten on arrays are faster."""


class TableWrites(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Changes of page tables, as packed int32: spans [num_spans, 3] of (row, start, n), and the page numbers
    of all spans in order.
    """

    spans: bytes
    pages: bytes


class PageTables:
    """Page tables of all rows: row r has its page numbers in `pages[r, :num_pages[r]]`."""

    def __init__(self, max_rows: int, max_pages: int) -> None:
        self.pages: IntArray = np.zeros((max_rows, max_pages), np.int32)
        # The same memory with all rows one after the other: pages are copied in and out as bytes, for which
        # NumPy takes several times as long.
        self._bytes = memoryview(self.pages.data).cast("B")
        self._row_bytes = max_pages * PAGE_BYTES
        self.num_pages, self.num_pages_of = int_column(max_rows)
        # Number of leading pages that the cache owns.
        self.num_shared, self.num_shared_of = int_column(max_rows)
        # Number of leading pages that were given back because no later token sees them; none is shared then.
        self.num_gone, self.num_gone_of = int_column(max_rows)
        self.copies: list[tuple[int, int, int]] = []  # row, source page, target page
        # First entry of each row that the device does not have yet.
        self._dirty_from, self._dirty_from_of = int_column(max_rows, CLEAN)

    def start(self, row: int, num_shared: int, pages: IntArray) -> None:
        """Begin a new table in the row, with these pages, of which the first num_shared are shared with the
        cache.
        """
        num_pages, at = len(pages), row * self._row_bytes
        self._bytes[at : at + num_pages * PAGE_BYTES] = pages.tobytes()
        self.num_shared_of[row] = num_shared
        self.num_gone_of[row] = 0
        self.num_pages_of[row] = num_pages
        self._dirty_from_of[row] = 0

    def end(self, row: int) -> IntArray:
        """End the table of a released row. Changes that the device was not told are dropped. Returns its
        private pages.
        """
        first = self.num_shared_of[row] or self.num_gone_of[row]
        private = self.pages[row, first : self.num_pages_of[row]]
        self.num_pages_of[row] = 0
        self.num_gone_of[row] = 0
        self._dirty_from_of[row] = CLEAN
        if self.copies:
            self.copies = [copy for copy in self.copies if copy[0] != row]
        return private

    def append_one(self, rows: RowArray, have: IntArray, pages: IntArray) -> None:
        """Append one page to the table of each row; `have` [n] is the current number of pages of each."""
        self.pages[rows, have] = pages
        self.num_pages[rows] = have + 1
        self._dirty_from[rows] = np.minimum(self._dirty_from[rows], have)

    def extend(self, row: int, pages: IntArray) -> None:
        at = self.num_pages_of[row]
        self.pages[row, at : at + len(pages)] = pages
        self.num_pages_of[row] = at + len(pages)
        self.changed(row, at)

    def cut(self, row: int, num_pages: int) -> IntArray:
        """Keep the first num_pages pages of the row, and return the others."""
        rest = self.pages[row, num_pages : self.num_pages_of[row]].copy()
        self.num_pages_of[row] = num_pages
        return rest

    def changed(self, row: int, at: int) -> None:
        if at < self._dirty_from_of[row]:
            self._dirty_from_of[row] = at

    def private(self, row: int) -> IntArray:
        first = self.num_shared_of[row] or self.num_gone_of[row]
        return self.pages[row, first : self.num_pages_of[row]]

    # -- what the device must be told, once per plan --------------------------------------------------------

    def take_page_copies(self) -> tuple[tuple[int, int], ...]:
        """Return and clear the (source, target) page copies, in the order in which the device must do them
        before its tables change.
        """
        if not self.copies:  # nearly always
            return ()
        copies = tuple((source, target) for _, source, target in self.copies)
        self.copies.clear()
        return copies

    def take_table_writes(self) -> TableWrites:
        """Return and clear the changes: every changed row from its first changed entry on. Entries are read
        from the table now, so the device sees the latest value once, however often it changed since the last
        plan, and never the changes of an earlier holder of the row.
        """
        rows = (self._dirty_from < self.num_pages).nonzero()[0]
        if len(rows) <= MAX_ONE_BY_ONE:
            return self._take_one_by_one(rows.tolist())
        spans = np.empty((len(rows), 3), np.int32)
        starts = self._dirty_from[rows]
        lens = self.num_pages[rows] - starts
        self._dirty_from[rows] = CLEAN
        one = lens == 1  # nearly all: decodes that crossed into a new page
        num_ones = np.count_nonzero(one)
        if num_ones < len(rows):
            order = (~one).argsort(kind="stable")
            rows = rows[order]
            starts = starts[order]
            lens = lens[order]
        spans[:, 0] = rows
        spans[:, 1] = starts
        spans[:, 2] = lens
        pages: list[bytes | memoryview] = [self.pages[rows[:num_ones], starts[:num_ones]].tobytes()]
        pages += [self._packed(row, start, start + n) for row, start, n in spans[num_ones:].tolist()]
        return TableWrites(spans.tobytes(), b"".join(pages))

    def _take_one_by_one(self, rows: list[int]) -> TableWrites:
        spans = array("i")
        pages: list[memoryview] = []
        for row in rows:
            start, end = self._dirty_from_of[row], self.num_pages_of[row]
            self._dirty_from_of[row] = CLEAN
            spans.extend((row, start, end - start))
            pages.append(self._packed(row, start, end))
        return TableWrites(spans.tobytes(), b"".join(pages))

    def _packed(self, row: int, start: int, end: int) -> memoryview:
        at = row * self._row_bytes
        return self._bytes[at + start * PAGE_BYTES : at + end * PAGE_BYTES]
