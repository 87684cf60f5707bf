"""Fakes for tests without torch: a model worker whose output shows any wrong page, and an outbox that
records.

FakeExecutor's next token is a hash of every id that it reads *through the page table*. So a wrong page, a
stale table, a reordered row or a token given to the wrong request changes the output, and the reference needs
only the prompt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from model_worker.sampling.step_masks import MaskMap, MaskReader
from runtime.base.errors import ExecutorError
from runtime.sampling.features import LOGITS, LOGPROBS
from runtime.wire.format import FloatArray, MaskBits, Message, RowMasks, pack_ids, unpack_ids
from runtime.wire.messages import ToDetokenizer
from runtime.wire.plan import (
    PROCESSED_SCORES,
    AdapterFailed,
    AdapterLoaded,
    BatchPlan,
    ChunkLogprobs,
    ProcessedRow,
    RowSetup,
    SampleMasks,
    StepResult,
    StepTensor,
)
from runtime.wire.transport import Frame, with_frames
from tests.harness.row_setups import numbers_of
from tests.harness.simulation.fake_sampling import (
    NAMESPACE_SHIFT,
    NUM_TOP,
    RAISES,
    RAISES_AT,
    TAP,
    VOCAB_SIZE,
    IdArray,
    adapter_salt,
    allowed_ids,
    banned_ids,
    choose,
    fake_logits,
    fake_logprobs,
    fake_rank,
    forbidden_ids,
    hash_of,
    next_top_p_age,
    prompt_hash,
    seen,
)


@dataclass(slots=True)
class FakeRow:
    """State that the fake device keeps of a row."""

    setup: RowSetup
    numbers: SimpleNamespace
    """Its columns."""
    history: list[int]
    """Prompt and output, kept only for rows where something looks back at them."""
    top_p_age: int
    stop_ids: frozenset[int]
    allowed: list[int] | None
    bad_words: list[list[int]]
    reset_ids: frozenset[int]
    told: list[int] | None = None
    """Tokens that its logits processors have been told of; None without processors."""
    is_told: bool = False
    """Its processors are called in the step that is computed: not for one who no longer wants a token."""
    adapter_salt: int = 0
    """Salt of what its slot holds in the step that is computed."""

    @staticmethod
    def of(setup: RowSetup) -> FakeRow:
        numbers = numbers_of(setup)
        return FakeRow(
            setup,
            numbers,
            unpack_ids(setup.history_ids).tolist(),
            numbers.top_p_age,
            frozenset(unpack_ids(setup.stop_ids).tolist()),
            unpack_ids(setup.allowed_ids).tolist() or None,
            [unpack_ids(word).tolist() for word in setup.bad_words],
            frozenset(unpack_ids(setup.top_p_reset_ids).tolist()),
            None if setup.processing is None else unpack_ids(setup.history_ids).tolist(),
        )

    @property
    def salt(self) -> int:
        seed: int = self.numbers.seed
        return (seed >> NAMESPACE_SHIFT) * 1000 + self.adapter_salt

    @property
    def searches(self) -> bool:
        """Its logits processors leave scores to a beam search; nothing is drawn with them."""
        return self.setup.processing is not None and self.setup.processing.searches

    def scores(self, h: int) -> FloatArray:
        """[VOCAB_SIZE] float32: what processors leave of the logprobs that a hash stands for."""
        assert self.told is not None
        _, ids, values = fake_logprobs(h, choose(h, None, ()), VOCAB_SIZE)
        scores = np.empty(VOCAB_SIZE, np.float32)
        scores[ids] = values
        scores[sorted(banned_ids(self.told))] = -np.inf
        return scores

    @property
    def raises(self) -> bool:
        """A logits processor raises for its next token."""
        processing = self.setup.processing
        if processing is None or self.told is None or not self.is_told:
            return False
        has_it = any(call.name == RAISES for call in processing.calls)
        return has_it and len(self.told) - self.setup.num_prompt >= RAISES_AT

    @property
    def looks_back(self) -> bool:
        has_phrases = any(len(word) > 1 for word in self.bad_words)
        return bool(self.numbers.presence or self.numbers.ngram or has_phrases)

    def sample(self, context: IdArray, mask: MaskBits | None, window: int) -> tuple[int, int]:
        """(token, hash) of what follows the context, of whose KV the window is read; remembers it."""
        numbers = self.numbers
        assert not self.looks_back or len(self.history) == len(context), "a history of another length"
        forbidden = forbidden_ids(self.history, self.bad_words, numbers.ngram)
        if self.is_told and self.told is not None:
            assert len(self.told) == len(context), "processors see other tokens than there are"
            forbidden |= set() if self.searches else banned_ids(self.told)
        if len(context) < numbers.min_len:
            forbidden |= self.stop_ids
        decays = numbers.top_p_decay != 1.0
        penalised = self.history if numbers.presence else ()
        h = hash_of(seen(context, window), numbers.seed, penalised, self.top_p_age if decays else 0)
        token = choose(h, self.allowed if mask is None else allowed_ids(mask), forbidden)
        if self.looks_back:
            self.history.append(token)
        self.top_p_age = next_top_p_age(self.top_p_age, token, self.reset_ids)
        return token, h


class FakeHandle:
    """Satisfies StepHandle."""

    def __init__(self, compute_up_to: Callable[[FakeHandle], None]) -> None:
        self._compute_up_to = compute_up_to
        self.is_finished = False
        self.frames: tuple[Frame, ...] = ()
        self._data = b""
        self._error: BaseException | None = None
        self.masks: RowMasks | None = None
        """None: they have not come."""
        self.told: dict[int, list[bytes]] = {}
        """Those masks when the worker was told of them. It reads them later."""
        self.processed: dict[int, ProcessedRow] = {}
        self.adapters: dict[int, Any] = {}
        """Return what the slots held when the step was launched, by row."""

    def finish(self, data: bytes, frames: Sequence[Frame] = (), error: BaseException | None = None) -> None:
        self.is_finished = True
        self._data = data
        self.frames = tuple(frames)
        self._error = error

    def result(self) -> StepResult:
        self._compute_up_to(self)
        if isinstance(self._error, ExecutorError):
            raise self._error
        if self._error is not None:
            raise AssertionError(f"the fake worker found: {self._error}") from self._error
        return msgspec.msgpack.decode(self._data, type=StepResult)

    def done(self) -> bool:
        return True

    def waits_for_masks(self) -> bool:
        return True


@dataclass(slots=True)
class FakeLoad:
    """An adapter on its way into a slot."""

    slot: int
    ref: Any
    num_turns: int
    comes_after: FakeHandle | None


UNGUIDED = 0
"""Id that no guide allows."""
BAD_ADAPTER = "bad"
"""Name of what cannot be loaded."""


class FakeExecutor:
    """Satisfies Executor and AdapterDevice. Runs plans in order, each when its result is asked for: as late
    as a worker can be, so what a plan takes for done at its launch is found.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        max_rows: int,
        max_len: int,
        *,
        max_in_flight: int = 1,
        feeds_back: bool = True,
        window: int = 0,
    ) -> None:
        """window: tokens that a token sees, itself included; 0: all."""
        self.max_in_flight = max_in_flight
        self.feeds_back = feeds_back
        self.page_size = page_size
        self.window = window
        self.fails_at_step = -1
        self.num_computed = 0
        """New tokens of all plans."""
        self.num_top = NUM_TOP
        """Most likely ids that are reported with each token."""
        self.logits_of: Callable[[int], FloatArray] = fake_logits
        """Logits that a hash stands for."""
        self._kv: IdArray = np.full((num_pages + 1, page_size), -7, np.int64)
        self._table: IdArray = np.zeros((max_rows, max_len // page_size + 2), np.int64)
        self._last_token: IdArray = np.full(max_rows, -9, np.int64)
        self._rows: dict[int, FakeRow] = {}
        self._launched: deque[tuple[BatchPlan, FakeHandle]] = deque()
        self.slots: dict[int, Any] = {}
        """Return what is ready in each slot for plans that are launched now."""
        self.slot_of_row: dict[int, int] = {}
        self._loads: list[FakeLoad] = []

    # -- adapters -------------------------------------------------------------------------------------------

    def load_adapter(self, slot: int, ref: Any) -> None:
        self.slots.pop(slot, None)
        assert all(load.slot != slot for load in self._loads), "two loads into one slot"
        last = self._launched[-1][1] if self._launched else None
        self._loads.append(FakeLoad(slot, ref, 1 + len(self._loads) + slot, last))

    def drop_adapter(self, slot: int) -> None:
        assert all(load.slot != slot for load in self._loads), "a slot is dropped that is loading"
        del self.slots[slot]

    def adapter_answers(self) -> list[AdapterLoaded | AdapterFailed]:
        """Reading takes some turns, and what was launched before comes before."""
        answers: list[AdapterLoaded | AdapterFailed] = []
        for load in list(self._loads):
            load.num_turns -= 1
            if load.num_turns > 0 or not (load.comes_after is None or load.comes_after.is_finished):
                continue
            version = getattr(load.ref, "version", "")
            if getattr(load.ref, "name", "") == BAD_ADAPTER:
                answers.append(AdapterFailed(0, load.slot, version, "the fake worker does not like it"))
            else:
                answers.append(AdapterLoaded(0, load.slot, version, 100, 0.5))
            self.settle(answers[-1])
        return answers

    def settle(self, answer: AdapterLoaded | AdapterFailed) -> None:
        """Have a load end as this answer says."""
        (load,) = [each for each in self._loads if each.slot == answer.slot]
        self._loads.remove(load)
        if isinstance(answer, AdapterLoaded):
            self.slots[load.slot] = load.ref

    # -- steps ----------------------------------------------------------------------------------------------

    def launch(self, plan: BatchPlan) -> FakeHandle:
        handle = FakeHandle(self._compute_up_to)
        plan = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=BatchPlan)
        self.slot_of_row |= {setup.row: setup.adapter_slot for setup in plan.setups}
        handle.adapters = {row: self.slots.get(slot) for row, slot in self.slot_of_row.items()}
        self._launched.append((plan, handle))
        return handle

    def sample(self, handle: Any, masks: SampleMasks) -> None:
        assert handle.masks is None, "masks came twice"
        masks = msgspec.msgpack.decode(msgspec.msgpack.encode(masks), type=SampleMasks)
        handle.masks = MaskMap(masks, MaskReader())
        handle.told = {row: list(map(bytes, masks)) for row, masks in handle.masks.items()}
        handle.processed = {each.row: each for each in masks.processed}
        assert len(handle.processed) == len(masks.processed), "a row whose processors are called twice"

    def close(self) -> None:
        self._launched.clear()

    def _compute_up_to(self, handle: FakeHandle) -> None:
        while not handle.is_finished:
            self._compute(*self._launched.popleft())

    def _compute(self, plan: BatchPlan, handle: FakeHandle) -> None:
        try:
            if plan.step == self.fails_at_step:
                raise ExecutorError("told to fail")
            result, frames = self._step(plan, handle)
            handle.finish(msgspec.msgpack.encode(result), frames)
        except Exception as error:
            handle.finish(b"", error=error)

    def apply_tables(self, plan: BatchPlan) -> None:
        """Setups, copies, table writes: in the order of the plan's fields."""
        for setup in plan.setups:
            self._rows[setup.row] = FakeRow.of(setup)
        assert len({setup.row for setup in plan.setups}) == len(plan.setups), "two tenants for one row"
        for source, target in plan.page_copies:
            self._kv[target] = self._kv[source]
        pages, at = unpack_ids(plan.table_pages), 0
        spans = unpack_ids(plan.table_spans).reshape(-1, 3).tolist()
        assert len({row for row, _, _ in spans}) == len(spans), "a row written twice"
        for row, start, n in spans:
            self._table[row, start : start + n] = pages[at : at + n]
            at += n
        assert at == len(pages)

    def _slot(self, row: int, position: int) -> tuple[int, int]:
        """(page, place in it) of a token."""
        at, place = divmod(position, self.page_size)
        page = self._table.item(row, at)
        assert page, "a token without a page"
        return page, place

    def _context(self, row: int, end: int) -> IdArray:
        """[end]: what the row's KV holds of its first tokens."""
        pages = self._table[row, : -(-end // self.page_size)]
        assert pages.all(), "a token without a page"
        return self._kv[pages].reshape(-1)[:end]

    def _step(self, plan: BatchPlan, handle: FakeHandle) -> tuple[StepResult, list[Frame]]:
        self.apply_tables(plan)
        ones = [1] * plan.num_decodes
        rows, starts = unpack_ids(plan.rows).tolist(), unpack_ids(plan.starts).tolist()
        for row in rows:
            self._rows[row].adapter_salt = adapter_salt(handle.adapters.get(row))
        ids = unpack_ids(plan.input_ids).tolist()
        lens = ones + unpack_ids(plan.lens).tolist()
        samples = ones + unpack_ids(plan.samples).tolist()
        drafts = [0] * plan.num_decodes + unpack_ids(plan.drafts).tolist()
        assert len(set(rows)) == len(rows) == len(starts) == len(lens)
        assert len(ids) == sum(lens)
        self.num_computed += len(ids)
        self._write_kv(rows, starts, lens, ids)
        logits = FakeLogits(self.logits_of)
        prompts = self._look_at_prompts(plan, rows, starts, lens, logits)
        if plan.defer_sampling:
            assert handle.masks is not None, "masks never came"
        masks = self._read_masks(handle)
        for row in rows:
            self._rows[row].is_told = row in handle.processed
        for each in handle.processed.values():
            self._tell(each)
        result = self._sample_all(plan, rows, starts, lens, samples, drafts, masks, logits)
        return msgspec.structs.replace(result, prompts=prompts, tensors=tuple(logits.tensors)), logits.frames

    def _tell(self, news: ProcessedRow) -> None:
        """Tell the processors of a row of the tokens that they have not seen."""
        state, source = self._rows[news.row], self._rows[news.source]
        assert state.told is not None, "tokens for processors that the row has not"
        assert source.told is not None
        if news.source != news.row:
            assert source.setup.processing == state.setup.processing, "tokens of another request"
            state.told = source.told[: news.start]
        assert len(state.told) == news.start, "tokens that processors see are missing, or come twice"
        state.told += unpack_ids(news.ids).tolist()

    def _read_masks(self, handle: FakeHandle) -> dict[int, list[bytes]]:
        """Read them as late as a worker may. A row whose masks were written over meanwhile may draw one id
        that no guide allows: nobody may want its token any more.
        """
        now = {row: list(map(bytes, masks)) for row, masks in (handle.masks or {}).items()}
        return {
            row: masks if masks == handle.told[row] else [bytes([1 << UNGUIDED])]
            for row, masks in now.items()
        }

    def _write_kv(self, rows: list[int], starts: list[int], lens: list[int], ids: list[int]) -> None:
        at = 0
        written: set[tuple[int, int]] = set()
        for row, start, n in zip(rows, starts, lens, strict=True):
            new = ids[at : at + n]
            at += n
            assert self.feeds_back or min(new) >= 0, "the plan wants a token that is not there yet"
            salt = self._rows[row].salt
            slots = [self._slot(row, position) for position in range(start, start + n)]
            assert written.isdisjoint(slots), "two rows write one slot"
            written.update(slots)
            for slot, i in zip(slots, new, strict=True):
                self._kv[slot] = (self._last_token.item(row) if i < 0 else i) + salt
        self._check_reads(rows, starts, written)

    def _check_reads(self, rows: list[int], starts: list[int], written: set[tuple[int, int]]) -> None:
        """A kernel may store a row's new token while others attend: nobody else reads it in that step."""
        pages_written = {page for page, _ in written}
        for row, start in zip(rows, starts, strict=True):
            first = max(0, start + 1 - self.window) if self.window else 0
            first_page = first // self.page_size
            pages = self._table[row, first_page : -(-start // self.page_size)].tolist()
            for at in [at for at, page in enumerate(pages, first_page) if page in pages_written]:
                begin, end = at * self.page_size, (at + 1) * self.page_size
                read = {self._slot(row, position) for position in range(max(first, begin), min(start, end))}
                assert written.isdisjoint(read), "a row reads what another one writes in the same step"

    def _sample_all(
        self,
        plan: BatchPlan,
        rows: list[int],
        starts: list[int],
        lens: list[int],
        samples: list[int],
        drafts: list[int],
        masks: Mapping[int, list[bytes]],
        logits: FakeLogits,
    ) -> StepResult:
        tokens: list[int] = []
        counts: list[int] = []
        chosen: list[float] = []
        top_ids: list[int] = []
        top: list[float] = []
        errors: list[tuple[int, str]] = []
        of_rows = zip(rows, starts, lens, samples, drafts, strict=True)
        for index, (row, start, n, sample, num_drafts) in enumerate(of_rows):
            if sample and self._rows[row].raises:
                errors.append((index, "told to raise"))
            got = self._sample(row, start + n, num_drafts, masks.get(row, ())) if sample else []
            counts.append(len(got))
            tokens += [token for token, _ in got]
            if got and self._rows[row].setup.features & LOGITS:
                position = start + n - num_drafts
                logits.add(index, "generation_logits", position, [h for _, h in got])
            if got and self._rows[row].searches and self._rows[row].is_told:
                logits.put(index, PROCESSED_SCORES, start + n, self._rows[row].scores(got[0][1])[None])
            if got and self._rows[row].setup.outputs:
                self._tap(index, row, start + n - num_drafts, len(got), logits)
            if self._rows[row].setup.features & LOGPROBS:
                for token, h in got:
                    values = fake_logprobs(h, token, self.num_top)
                    chosen.append(values[0])
                    top_ids += values[1]
                    top += values[2]
        return StepResult(
            plan.step,
            pack_ids(tokens),
            pack_ids(counts[plan.num_decodes :]),
            np.array(chosen, np.float32).tobytes(),
            self.num_top,
            pack_ids(top_ids),
            np.array(top, np.float32).tobytes(),
            errors=tuple(errors),
        )

    def _tap(self, index: int, row: int, end: int, count: int, logits: FakeLogits) -> None:
        """Give the rows of the tokens before those that were sampled, but for the prompt's last one."""
        for position in range(end - 1, end - 1 + count):
            if position >= self._rows[row].setup.num_prompt:
                h = prompt_hash(seen(self._context(row, position + 1), self.window))
                logits.add(index, f"generation_{TAP}", position, [h])

    def _sample(self, row: int, end: int, num_drafts: int, masks: Sequence[bytes]) -> list[tuple[int, int]]:
        """(token, hash) of each accepted position: with
        drafts, as many as the model agrees with, and one more. Behind the last mask, where there are
        any, comes an id that no guide allows: nobody may want it.
        """
        state = self._rows[row]
        context = self._context(row, end)
        got: list[tuple[int, int]] = []
        assert len(masks) <= num_drafts + 1, "masks for places that there are not"
        for position, mask in zip_longest(range(end - num_drafts, end + 1), masks):
            if masks and mask is None:
                got.append((UNGUIDED, 0))
                break
            got.append(state.sample(context[:position], mask, self.window))
            if position < end and context[position] != got[-1][0] + state.salt:
                break
        self._last_token[row] = got[-1][0]
        return got

    def _look_at_prompts(
        self, plan: BatchPlan, rows: list[int], starts: list[int], lens: list[int], logits: FakeLogits
    ) -> tuple[ChunkLogprobs, ...]:
        prompts: list[ChunkLogprobs] = []
        for entry in plan.prompt_positions:
            row, first = rows[entry.index], starts[entry.index] + entry.first
            targets, k = unpack_ids(entry.targets).tolist(), entry.num_logprobs
            end = first + len(targets)
            assert end <= starts[entry.index] + lens[entry.index], "positions beyond the chunk"
            context = self._context(row, end)
            hashes = [
                prompt_hash(seen(context[: position + 1], self.window)) for position in range(first, end)
            ]
            if entry.returns_logits:
                for i in range(0, len(hashes), 2):  # as large frames are split
                    logits.add(entry.index, "context_logits", first + i, hashes[i : i + 2])
            if entry.returns_outputs:
                logits.add(entry.index, f"context_{TAP}", first, hashes)
            if k >= 0:
                got = [fake_logprobs(h, target) for h, target in zip(hashes, targets, strict=True)]
                prompts.append(
                    ChunkLogprobs(
                        entry.index,
                        np.array([chosen for chosen, _, _ in got], np.float32).tobytes(),
                        pack_ids([fake_rank(chosen) for chosen, _, _ in got]),
                        pack_ids([i for _, top_ids, _ in got for i in top_ids[:k]]),
                        np.array([x for _, _, top in got for x in top[:k]], np.float32).tobytes(),
                    )
                )
        return tuple(prompts)


class FakeLogits:
    """Raw logits of a step, each tensor with its frame."""

    def __init__(self, logits_of: Callable[[int], FloatArray]) -> None:
        self._logits_of = logits_of
        self.tensors: list[StepTensor] = []
        self.frames: list[Frame] = []

    def add(self, index: int, name: str, start: int, hashes: list[int]) -> None:
        self.put(index, name, start, np.stack([self._logits_of(h) for h in hashes]))

    def put(self, index: int, name: str, start: int, values: FloatArray) -> None:
        """values: rows of consecutive positions."""
        self.tensors.append(StepTensor(index, name, start, (len(values), VOCAB_SIZE)))
        self.frames.append(values.data if len(self.frames) % 2 else values.tobytes())


class RecordingOutbox:
    """Satisfies Outbox: keeps what was sent, as the other
    end decodes it. `refuses` says when there is no room.
    """

    def __init__(self, refuses: Callable[[], bool] = lambda: False) -> None:
        self.messages: list[Any] = []
        self.refuses = refuses
        self._decode = msgspec.msgpack.Decoder(ToDetokenizer).decode

    def send(self, message: Message, frames: Sequence[Frame] = ()) -> bool:
        if self.refuses():
            return False
        self.messages.append(with_frames(self._decode(msgspec.msgpack.encode(message)), frames))
        return True

    def take(self) -> list[Any]:
        messages, self.messages = self.messages, []
        return messages

    def close(self) -> None:
        self.messages.clear()
