"""MetricFile: counters and histograms of one HTTP process, in a small file that the others can read.

Each process writes only its own file, so there are no locks. A process that is scraped adds up all files of
the launch. A cell is a float64 that is written in one go. A reader may see a histogram's sum a moment later
than its buckets.
"""

from __future__ import annotations

import mmap
import os
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

CELL_BYTES = 8


def map_file(path: Path, num_bytes: int) -> mmap.mmap:
    """Create or continue a file of `num_bytes` bytes and map it. Raises OSError that names the file."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # Allocate the blocks: on a full disk, the first write to a hole would raise SIGBUS.
        os.posix_fallocate(fd, 0, num_bytes)
        return mmap.mmap(fd, num_bytes)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(fd)


class CounterSpec(NamedTuple):
    name: str
    text: str
    prefix: str = "sglang:"
    labels: tuple[tuple[str, str], ...] = ()
    """Labels of its own, beside the common ones. Counters with the same name follow one another."""


class HistogramSpec(NamedTuple):
    name: str
    text: str
    bounds: tuple[float, ...]
    """Upper bounds of the buckets except the last, which has none."""


class Counter:
    __slots__ = ("_at", "_cells")

    def __init__(self, cells: memoryview[float], at: int) -> None:
        self._cells = cells
        self._at = at

    def inc(self, amount: float = 1.0) -> None:
        self._cells[self._at] += amount


class Histogram:
    __slots__ = ("_at", "_bounds", "_cells", "_sum_at")

    def __init__(self, cells: memoryview[float], at: int, bounds: tuple[float, ...]) -> None:
        self._cells = cells
        self._at = at
        self._bounds = bounds
        self._sum_at = at + len(bounds) + 1

    def observe(self, value: float, times: int = 1) -> None:
        self._cells[self._at + bisect_left(self._bounds, value)] += times
        self._cells[self._sum_at] += value * times


class HistogramTotal(NamedTuple):
    counts: list[float]
    """Counts of each bucket by itself, not cumulative."""
    sum: float


class MetricFile:
    """File of counters and histograms. Its layout: all counters, then the buckets and the sum of each
    histogram.
    """

    def __init__(
        self, folder: Path, index: int, counters: Sequence[CounterSpec], histograms: Sequence[HistogramSpec]
    ) -> None:
        """Create or continue the file of process `index`. Raises OSError."""
        self._folder = folder
        self._num_counters = len(counters)
        self._histograms = histograms
        self._num_cells = len(counters) + sum(len(each.bounds) + 2 for each in histograms)
        self._map = map_file(folder / f"metrics{index}", self._num_cells * CELL_BYTES)
        cells = memoryview(self._map).cast("d")
        self.counters = [Counter(cells, at) for at in range(len(counters))]
        self.histograms: list[Histogram] = []
        at = len(counters)
        for each in histograms:
            self.histograms.append(Histogram(cells, at, each.bounds))
            at += len(each.bounds) + 2

    def totals(self) -> tuple[list[float], list[HistogramTotal]]:
        """Return counters and histograms, added up over all processes of the launch."""
        size = self._num_cells * CELL_BYTES
        files = [path.read_bytes() for path in self._folder.glob("metrics*")]
        # A new file is still empty.
        whole = [np.frombuffer(data, np.float64) for data in files if len(data) == size]
        cells: list[float] = np.sum(whole, axis=0).tolist()
        histograms = []
        at = self._num_counters
        for each in self._histograms:
            end = at + len(each.bounds) + 1
            histograms.append(HistogramTotal(cells[at:end], cells[end]))
            at = end + 1
        return cells[: self._num_counters], histograms
