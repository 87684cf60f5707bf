"""Batch: one run over an input file, which writes a line of output for each line when its answer comes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

from carousel.batch.id_set import IdSet
from carousel.batch.lines import (
    BatchRequest,
    OutputLine,
    RefusedLine,
    WrittenLine,
    duplicate,
    read_lines,
    refused,
)
from carousel.batch.output_file import OutputFile
from carousel.batch.sender import LineSender
from runtime.base.progress import Progress

MAX_BYTES_IN_FLIGHT = 256 << 20
"""Bytes of requests in flight from which on no further line is read."""


class DoneLines:
    """Lines of the input that an earlier run has written."""

    def __init__(self, written: Iterable[WrittenLine]) -> None:
        self.ids = IdSet()
        """The custom_ids of lines that were the first to have them."""
        self.numbers = IdSet()
        """The numbers of lines that were not sent."""
        self.num_failed = 0
        for line in written:
            if line.custom_id is not None:
                self.ids.add(line.custom_id)
            if line.number is not None:
                self.numbers.add(line.number)
            self.num_failed += not line.is_good


@dataclass(slots=True)
class BatchCounts:
    num_lines: int = 0
    """Number of lines that have a line in the output."""
    num_failed: int = 0
    num_skipped: int = 0
    """Number of these lines that an earlier run has written."""


class Batch:
    """One run over an input file. `counts` are up to date at any time."""

    def __init__(
        self, output: OutputFile, done: DoneLines, sender: LineSender, progress: Progress, num_lines: int
    ) -> None:
        """num_lines: lines of the input, for the progress."""
        self.counts = BatchCounts(num_failed=done.num_failed)
        self._done = done
        self._output = output
        self._sender = sender
        self._progress = progress
        self._num_lines = num_lines
        self._bytes_in_flight = 0
        self._has_room = asyncio.Condition()

    async def run(self, file: BinaryIO, concurrency: int) -> None:
        """Send all lines of a file, so many at a time, and write their answers.

        Raises: OSError if the output cannot be written, StartError if the server is gone.
        """
        lines = self._lines(file)
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(self._work(lines))

    def _lines(self, file: BinaryIO) -> Iterator[BatchRequest | RefusedLine]:
        """Yield the lines without those that the output has already, duplicates as refused."""
        seen = IdSet()
        for line in read_lines(file):
            if line.custom_id is not None and not seen.add(line.custom_id):
                line = duplicate(line)
            elif line.custom_id is not None and line.custom_id in self._done.ids:
                self._skip()
                continue
            if isinstance(line, RefusedLine) and line.number in self._done.numbers:
                self._skip()
                continue
            yield line

    def _skip(self) -> None:
        self.counts.num_skipped += 1
        self.counts.num_lines += 1

    async def _work(self, lines: Iterator[BatchRequest | RefusedLine]) -> None:
        """Send one line after another. All tasks of a run take their lines from the same iterator."""
        while True:
            if self._bytes_in_flight > MAX_BYTES_IN_FLIGHT:
                async with self._has_room:
                    await self._has_room.wait_for(lambda: self._bytes_in_flight <= MAX_BYTES_IN_FLIGHT)
            line = next(lines, None)
            if line is None:
                return
            if isinstance(line, RefusedLine):
                self._write(refused(line))
                await asyncio.sleep(0)  # answers come in meanwhile
                continue
            self._bytes_in_flight += line.num_bytes
            self._write(await self._sender.send(line))
            self._bytes_in_flight -= line.num_bytes
            async with self._has_room:
                self._has_room.notify_all()  # each looks for itself; at the end of the file all have to leave

    def _write(self, line: OutputLine) -> None:
        self._output.write(line.data)
        self.counts.num_lines += 1
        self.counts.num_failed += not line.is_good
        more = f", {self.counts.num_failed} failed" if self.counts.num_failed else ""
        self._progress.note(self.counts.num_lines, self._num_lines, more)


def count_lines(file: BinaryIO) -> int:
    """Return the number of lines of a file, and go back to its beginning."""
    num_lines, last = 0, b"\n"
    while block := file.read(1 << 20):
        num_lines += block.count(b"\n")
        last = block[-1:]
    file.seek(0)
    return num_lines + (last != b"\n")
