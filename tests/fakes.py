"""Fakes for tests without torch: a model worker whose output shows any wrong page, and an outbox that
records.

FakeExecutor's next token is a hash of every id it reads *through the page table*: a wrong page, a stale
table, a reordered row or a token given to the wrong request changes the output, and the reference needs only
the prompt.
"""

from __future__ import annotations

import queue
import random
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from runtime.errors import ExecutorError
from runtime.messages import BatchPlan, RowSetup, SampleMasks, StepResult, ToDetokenizer
from runtime.wire import Message, pack_ids, unpack_ids

VOCAB_SIZE = 96
NAMESPACE_SHIFT = 32
"""A seed carries the number of its namespace above this bit:
the fake model's adapter, part of every KV entry it writes.
"""
NUM_TOP = 4

IdArray = npt.NDArray[np.int64]


@dataclass(slots=True)
class FakeRow:
    """What the fake device keeps about a row."""

    setup: RowSetup
    history: list[int] = field(default_factory=list)
    """Prompt and output, kept only for rows with a penalty."""

    @property
    def salt(self) -> int:
        return (self.setup.seed >> NAMESPACE_SHIFT) * 1000

    @property
    def is_penalised(self) -> bool:
        return self.setup.presence_penalty != 0.0


def hash_of(context: IdArray, seed: int, history: Sequence[int]) -> int:
    h = zlib.crc32(context.tobytes(), seed & 0xFFFFFFFF)
    return zlib.crc32(np.array(history, np.int64).tobytes(), h) if history else h


def choose(h: int, allowed: Sequence[int] | None, forbidden: frozenset[int]) -> int:
    """The token that hash h stands for, among the allowed ones."""
    if allowed is None and not forbidden:
        return h % VOCAB_SIZE
    ids = [i for i in (range(VOCAB_SIZE) if allowed is None else allowed) if i not in forbidden]
    return ids[h % len(ids)]


def fake_logprobs(h: int, token: int) -> tuple[float, list[int], list[float]]:
    """(chosen, top ids, top logprobs): some numbers that only this token of this sequence has."""
    chosen = -(h % 1000) / 1024
    return (
        chosen,
        [(token + 7 * i) % VOCAB_SIZE for i in range(NUM_TOP)],
        [chosen - i for i in range(NUM_TOP)],
    )


def allowed_ids(mask: bytes) -> list[int]:
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    ids: list[int] = np.flatnonzero(bits).tolist()
    return ids


class FakeHandle:
    """Satisfies StepHandle."""

    def __init__(self) -> None:
        self._finished = threading.Event()
        self._data = b""
        self._error: BaseException | None = None
        self.masks: dict[int, bytes] = {}
        self.masks_ready = threading.Event()

    def finish(self, data: bytes, error: BaseException | None = None) -> None:
        self._data = data
        self._error = error
        self._finished.set()

    def result(self) -> StepResult:
        self._finished.wait()
        if isinstance(self._error, ExecutorError):
            raise self._error
        if self._error is not None:
            raise AssertionError(f"the fake worker found: {self._error}") from self._error
        return msgspec.msgpack.decode(self._data, type=StepResult)

    def done(self) -> bool:
        return self._finished.is_set()


class FakeExecutor:
    """Satisfies Executor. Runs plans in order on a thread, `jitter` seconds late at most."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        max_rows: int,
        max_len: int,
        *,
        max_in_flight: int = 1,
        feeds_back: bool = True,
        jitter: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.max_in_flight = max_in_flight
        self.feeds_back = feeds_back
        self.page_size = page_size
        self.fails_at_step = -1
        self.num_computed = 0
        """New tokens of all plans."""
        self._kv: IdArray = np.full((num_pages + 1) * page_size, -7, np.int64)
        self._table: IdArray = np.zeros((max_rows, max_len // page_size + 2), np.int64)
        self._last_token: IdArray = np.full(max_rows, -9, np.int64)
        self._rows: dict[int, FakeRow] = {}
        self._jitter = jitter
        self._random = random.Random(seed)
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="fake-worker", daemon=True)
        self._thread.start()

    def launch(self, plan: BatchPlan) -> FakeHandle:
        handle = FakeHandle()
        plan = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=BatchPlan)
        self._queue.put(lambda: self._compute(plan, handle))
        return handle

    def sample(self, handle: Any, masks: SampleMasks) -> None:
        masks = msgspec.msgpack.decode(msgspec.msgpack.encode(masks), type=SampleMasks)
        handle.masks = dict(masks.masks)
        handle.masks_ready.set()

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()

    def _compute(self, plan: BatchPlan, handle: FakeHandle) -> None:
        try:
            if self._jitter:
                time.sleep(self._random.random() * self._jitter)
            if plan.step == self.fails_at_step:
                raise ExecutorError("told to fail")
            handle.finish(msgspec.msgpack.encode(self._step(plan, handle)))
        except BaseException as error:
            handle.finish(b"", error)

    def apply_tables(self, plan: BatchPlan) -> None:
        """Setups, copies, table writes: in the order of the plan's fields."""
        for setup in plan.setups:
            self._rows[setup.row] = FakeRow(setup, unpack_ids(setup.penalty_ids).tolist())
        assert len({setup.row for setup in plan.setups}) == len(plan.setups), "two tenants for one row"
        size = self.page_size
        for source, target in plan.page_copies:
            self._kv[target * size : (target + 1) * size] = self._kv[source * size : (source + 1) * size]
        pages, at = unpack_ids(plan.table_pages), 0
        spans = unpack_ids(plan.table_spans).reshape(-1, 3).tolist()
        assert len({row for row, _, _ in spans}) == len(spans), "a row written twice"
        for row, start, n in spans:
            self._table[row, start : start + n] = pages[at : at + n]
            at += n
        assert at == len(pages)

    def _slots(self, row: int, start: int, end: int) -> IdArray:
        at = np.arange(start, end)
        pages = self._table[row, at // self.page_size]
        assert pages.all(), "a token without a page"
        slots: IdArray = pages * self.page_size + at % self.page_size
        return slots

    def _step(self, plan: BatchPlan, handle: FakeHandle) -> StepResult:
        self.apply_tables(plan)
        ones = [1] * plan.num_decodes
        rows, starts = unpack_ids(plan.rows).tolist(), unpack_ids(plan.starts).tolist()
        ids = unpack_ids(plan.input_ids).tolist()
        lens = ones + unpack_ids(plan.lens).tolist()
        samples = ones + unpack_ids(plan.samples).tolist()
        drafts = [0] * plan.num_decodes + unpack_ids(plan.drafts).tolist()
        assert len(set(rows)) == len(rows) == len(starts) == len(lens)
        assert len(ids) == sum(lens)
        self.num_computed += len(ids)
        self._write_kv(rows, starts, lens, ids)
        if plan.defer_sampling:
            assert handle.masks_ready.wait(10), "masks never came"
        return self._sample_all(plan, rows, starts, lens, samples, drafts, handle.masks)

    def _write_kv(self, rows: list[int], starts: list[int], lens: list[int], ids: list[int]) -> None:
        at = 0
        written: set[int] = set()
        for row, start, n in zip(rows, starts, lens, strict=True):
            new = ids[at : at + n]
            at += n
            assert self.feeds_back or min(new) >= 0, "the plan wants a token that is not there yet"
            salt = self._rows[row].salt
            slots = self._slots(row, start, start + n)
            assert written.isdisjoint(slots.tolist()), "two rows write one slot"
            written.update(slots.tolist())
            self._kv[slots] = [(int(self._last_token[row]) if i < 0 else i) + salt for i in new]

    def _sample_all(
        self,
        plan: BatchPlan,
        rows: list[int],
        starts: list[int],
        lens: list[int],
        samples: list[int],
        drafts: list[int],
        masks: dict[int, bytes],
    ) -> StepResult:
        tokens: list[int] = []
        counts: list[int] = []
        chosen: list[float] = []
        top_ids: list[int] = []
        top: list[float] = []
        for row, start, n, sample, num_drafts in zip(rows, starts, lens, samples, drafts, strict=True):
            got = self._sample(row, start + n, num_drafts, masks.get(row)) if sample else []
            counts.append(len(got))
            tokens += [token for token, _ in got]
            if self._rows[row].setup.num_logprobs >= 0:
                for token, h in got:
                    values = fake_logprobs(h, token)
                    chosen.append(values[0])
                    top_ids += values[1]
                    top += values[2]
        return StepResult(
            plan.step,
            pack_ids(tokens),
            pack_ids(counts[plan.num_decodes :]),
            np.array(chosen, np.float32).tobytes(),
            NUM_TOP,
            pack_ids(top_ids),
            np.array(top, np.float32).tobytes(),
        )

    def _sample(self, row: int, end: int, num_drafts: int, mask: bytes | None) -> list[tuple[int, int]]:
        """(token, hash) of each accepted position: with
        drafts, as many as the model agrees with, and one more.
        """
        state = self._rows[row]
        context = self._kv[self._slots(row, 0, end)]
        allowed = None if mask is None else allowed_ids(mask)
        got: list[tuple[int, int]] = []
        for i in range(num_drafts + 1):
            position = end - num_drafts + i
            stops = frozenset(unpack_ids(state.setup.stop_ids).tolist())
            h = hash_of(context[:position], state.setup.seed, state.history if state.is_penalised else ())
            token = choose(h, allowed, stops if position < state.setup.min_len else frozenset())
            got.append((token, h))
            if state.is_penalised:
                state.history.append(token)
            if i < num_drafts and context[position] != token + state.salt:
                break
        self._last_token[row] = got[-1][0]
        return got


class RecordingOutbox:
    """Satisfies Outbox: keeps what was sent, as the other
    end decodes it. `refuses` says when there is no room.
    """

    def __init__(self, refuses: Callable[[], bool] = lambda: False) -> None:
        self.messages: list[Any] = []
        self.refuses = refuses
        self._decode = msgspec.msgpack.Decoder(ToDetokenizer).decode

    def send(self, message: Message) -> bool:
        if self.refuses():
            return False
        self.messages.append(self._decode(msgspec.msgpack.encode(message)))
        return True

    def take(self) -> list[Any]:
        messages, self.messages = self.messages, []
        return messages

    def close(self) -> None:
        self.messages.clear()
