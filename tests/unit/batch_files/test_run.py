"""Batch: the tasks of a run share its lines and the memory for them, and all end with the file."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any, cast

import pytest

from carousel.batch import run as batch_run
from carousel.batch.lines import BatchRequest, OutputLine, answered
from carousel.batch.output_file import OutputFile
from carousel.batch.run import Batch, DoneLines
from carousel.batch.sender import LineSender
from carousel.http_client import HttpAnswer
from runtime.base.progress import Progress

NUM_LINES, NUM_TASKS, MAX_BYTES = 6, 16, 1000


class Sender:
    """A sender that notes how many bytes of requests are in flight."""

    def __init__(self) -> None:
        self.most = self._now = 0

    async def send(self, request: BatchRequest) -> OutputLine:
        self._now += request.num_bytes
        self.most = max(self.most, self._now)
        await asyncio.sleep(0.001)
        self._now -= request.num_bytes
        return answered(request, HttpAnswer(200, {}, b"{}"))


def test_tasks_that_wait_for_memory_end_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer answers came than tasks waited: those that no answer had woken waited for ever."""
    monkeypatch.setattr(batch_run, "MAX_BYTES_IN_FLIGHT", MAX_BYTES)
    lines = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": "x" * (MAX_BYTES // 2)},
        }
        for number in range(NUM_LINES)
    ]
    file = io.BytesIO("".join(json.dumps(line) + "\n" for line in lines).encode())
    output = OutputFile(tmp_path / "out", resume=False)
    sender: Any = Sender()

    async def run() -> None:
        batch = Batch(output, DoneLines(()), cast(LineSender, sender), Progress("batch", "lines"), NUM_LINES)
        async with asyncio.timeout(10.0):
            await batch.run(file, NUM_TASKS)

    asyncio.run(run())
    output.close()
    written = (tmp_path / "out").read_text().splitlines()
    assert sorted(json.loads(line)["custom_id"] for line in written) == [str(n) for n in range(NUM_LINES)]
    assert MAX_BYTES < sender.most < 2 * MAX_BYTES
