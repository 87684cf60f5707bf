"""Handover: what has come for a client whose event loop is busy is bounded, and all of it arrives."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from carousel.client.async_ import AsyncClient
from carousel.client.connection.handover import MAX_BYTES, NOTED_BYTES, Handover
from carousel.client.connection.lane import DRAIN_BYTES, MAX_UNREAD
from carousel.client.core.mailbox import CHARS_PER_WAKE, WAKES_PER_TURN, Mailboxes, call_in_loop
from runtime.wire.messages import GenerateRequest, OutputBatch, SequenceOutput
from tests.harness.ring.fake_ring import WAIT_S, fake_ring, finish, output

NUM_REQUESTS, CHARS = 300, 140_000


def test_bytes_are_noted_many_at_a_time_and_reading_goes_on_once_they_are_passed_on() -> None:
    woken: list[bool] = []
    handover = Handover(lambda: woken.append(handover.is_full))
    assert handover.add(NOTED_BYTES - 1) is None
    notes = [handover.add(1)]
    while not handover.is_full:
        notes.append(handover.add(NOTED_BYTES))
    assert sum(note.num_bytes for note in notes if note) == MAX_BYTES
    for note in notes:
        assert note is not None
        note.give_back(note.num_bytes)
    assert woken == [False], "once, and then there is room"


def test_reading_goes_on_if_the_handover_becomes_full_while_bytes_are_given_back() -> None:
    """The I/O thread then waited for the next tick, 0.1 s, because nobody woke it."""
    woken: list[bool] = []
    handover = Handover(lambda: woken.append(handover.is_full))
    while not handover.is_full:
        last = handover.add(NOTED_BYTES)
    assert last is not None
    last.give_back(NOTED_BYTES)
    assert woken == [False]

    is_filled: list[bool] = []

    class FilledMeanwhile(int):
        """Number of bytes that are given back. While it is added the I/O thread finds the handover full."""

        def __radd__(self, other: int) -> int:
            if not is_filled:
                is_filled.append(True)
                handover.add(NOTED_BYTES)
                assert handover.is_full
            return other + int(self)

    last.give_back(FilledMeanwhile(NOTED_BYTES))
    assert not handover.is_full
    assert woken == [False, False]


def test_a_client_whose_loop_is_busy_reads_a_few_megabytes_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All answers were read and decoded while nothing was passed on."""
    handed, lock = [0], threading.Lock()

    def counted(loop: Any, function: Any, message: Any) -> None:
        if isinstance(message, OutputBatch):
            with lock:
                handed[0] += sum(len(each.text) for each in message.outputs)
        call_in_loop(loop, function, message)

    monkeypatch.setattr("carousel.client.async_.call_in_loop", counted)
    asked: list[GenerateRequest] = []

    def keep(request: GenerateRequest) -> list[SequenceOutput]:
        asked.append(request)
        return []

    async def run() -> tuple[int, int]:
        async with AsyncClient(tmp_path) as client, asyncio.TaskGroup() as group:
            calls = [group.create_task(client.generate("x")) for _ in range(NUM_REQUESTS)]
            async with asyncio.timeout(WAIT_S):
                while len(asked) < NUM_REQUESTS:
                    await asyncio.sleep(0.01)
            for each in asked:
                ring.send(output(each, "x" * CHARS, token_ids=b"", finish=finish()))
            deadline_s, before = time.monotonic() + WAIT_S, -1
            while handed[0] != before or not before:  # the loop is busy, until nothing more comes
                assert time.monotonic() < deadline_s
                before = handed[0]
                time.sleep(0.2)
        return before, sum(len(call.result().outputs[0].text) for call in calls)

    with fake_ring(tmp_path, keep) as ring:
        most, total = asyncio.run(run())
    assert most <= MAX_BYTES + DRAIN_BYTES + 2 * CHARS
    assert total == NUM_REQUESTS * CHARS > 8 * most, "and all of it comes"
    assert total > MAX_UNREAD * CHARS, "the rest waits at the other end"


def test_long_outputs_are_passed_on_a_few_in_a_turn() -> None:
    """64 answers of 140 KB in one turn were all formatted in the next, and kept."""

    async def run() -> tuple[int, list[int]]:
        make, num_woken, after = Mailboxes(), 0, list[int]()

        async def take(mailbox: Any) -> None:
            nonlocal num_woken
            await mailbox.take_async()
            num_woken += 1

        mailboxes = [make() for _ in range(WAKES_PER_TURN)]
        tasks = [asyncio.create_task(take(each)) for each in mailboxes]
        await asyncio.sleep(0)
        make.after_wakes(lambda: after.append(num_woken))
        for each in mailboxes:
            each.put(SequenceOutput(b"", "x" * (8 * CHARS_PER_WAKE)))
        make.after_wakes(lambda: after.append(num_woken))
        await asyncio.sleep(0)
        in_a_turn = num_woken
        await asyncio.gather(*tasks)
        await asyncio.sleep(0)
        return in_a_turn, after

    in_a_turn, after = asyncio.run(run())
    assert in_a_turn <= WAKES_PER_TURN // 8
    assert after == [0, WAKES_PER_TURN], "at once where nobody waits, and else after the last"
