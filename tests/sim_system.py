"""The system under test: a real scheduler with a fake worker in front and a fake detokenizer behind."""

from __future__ import annotations

import random
from dataclasses import dataclass

import msgspec

from runtime.messages import Closed, ControlReply, StreamOpen, TokenBatch
from runtime.registry import resolve
from runtime.transport import MemoryChannel
from runtime.wire import unpack_floats, unpack_ids
from scheduler_proc.cache import CACHES
from scheduler_proc.cache.kv_cache_manager import KVCacheManager
from scheduler_proc.capacity import MaxUtilization, SlotPool
from scheduler_proc.features.logprobs import attach_logprobs
from scheduler_proc.intake import FeatureFactory, Intake, ModelLimits
from scheduler_proc.lifecycle import Lifecycle
from scheduler_proc.output import Output
from scheduler_proc.policy import POLICIES
from scheduler_proc.request import Status
from scheduler_proc.rows import Rows
from scheduler_proc.scheduler import Scheduler
from scheduler_proc.step_log import StepLog
from tests.fakes import VOCAB_SIZE, FakeExecutor, RecordingOutbox
from tests.sim_reference import EOS_IDS


class FakeDetokenizer:
    """Takes TokenBatches apart and holds them to invariant 1: one opening, one terminal, nothing after it."""

    def __init__(self) -> None:
        self.opened: set[bytes] = set()
        self.tokens: dict[bytes, list[int]] = {}
        self.logprobs: dict[bytes, list[tuple[float, list[int], list[float]]]] = {}
        self.closed: dict[bytes, Closed] = {}
        self.replies: list[ControlReply] = []

    def receive(self, message: TokenBatch | ControlReply) -> None:
        if isinstance(message, ControlReply):
            self.replies.append(message)
            return
        for raw in message.opened:
            handle = msgspec.msgpack.decode(raw, type=StreamOpen).handle
            assert handle not in self.opened, "opened twice"
            self.opened.add(handle)
            self.tokens[handle] = []
            self.logprobs[handle] = []
        handles = [message.handles[i : i + 16] for i in range(0, len(message.handles), 16)]
        for handle, token in zip(handles, unpack_ids(message.tokens).tolist(), strict=True):
            assert handle in self.opened, "a token before its opening"
            assert handle not in self.closed, "a token after the terminal"
            self.tokens[handle].append(token)
        self._receive_logprobs(message)
        for closed in message.closed:
            assert closed.handle in self.opened, "closed before its opening"
            assert closed.handle not in self.closed, "a second terminal"
            self.closed[closed.handle] = closed

    def _receive_logprobs(self, message: TokenBatch) -> None:
        for entry in message.logprobs:
            assert entry.handle in self.opened
            assert entry.handle not in self.closed
            chosen = unpack_floats(entry.logprobs).tolist()
            top_ids = unpack_ids(entry.top_ids).reshape(len(chosen), -1).tolist()
            top = unpack_floats(entry.top_logprobs).reshape(len(chosen), -1).tolist()
            self.logprobs[entry.handle] += list(zip(chosen, top_ids, top, strict=True))


@dataclass(slots=True, frozen=True)
class Setting:
    """What one run is made of, besides its requests."""

    page_size: int
    num_pages: int
    max_rows: int
    max_len: int
    depth: int
    feeds_back: bool
    budget: int
    policy: str
    cache: str
    conservativeness: float
    num_slots: int
    refusal: float
    """Probability that the detokenizer has no room."""
    jitter: float
    """Seconds a step of the worker takes at most."""
    num_requests: int
    max_output: int
    turbulence: float
    """Probability that something comes from outside in a step."""

    @staticmethod
    def draw(rng: random.Random) -> Setting:
        page_size, num_pages = rng.choice(
            [(1, 70), (1, 200), (4, 22), (4, 60), (8, 14), (8, 40), (16, 8), (16, 30)]
        )
        return Setting(
            page_size=page_size,
            num_pages=num_pages,
            max_rows=rng.choice([2, 6, 8]),
            max_len=min(120, page_size * num_pages),
            depth=rng.choice([1, 2, 2, 2, 3, 4]),
            feeds_back=rng.random() < 0.7,
            budget=rng.choice([4, 8, 24, 64]),
            policy=rng.choice(["fcfs", "longest_prefix", "tests.stand_ins:RandomPolicy"]),
            cache="none" if rng.random() < 0.15 else "radix",
            conservativeness=rng.choice([0.05, 0.3, 1.0]),
            num_slots=rng.choice([1, 2]),
            refusal=rng.choice([0.0, 0.0, 0.2, 0.6]),
            jitter=0.0005 if rng.random() < 0.05 else 0.0,
            num_requests=25,
            max_output=rng.choice([12, 24, 60]),
            turbulence=rng.choice([0.0, 0.3, 1.0]),
        )


class System:
    """A scheduler with a fake worker in front and a fake detokenizer behind."""

    def __init__(
        self, setting: Setting, rng: random.Random, factories: tuple[FeatureFactory, ...] = ()
    ) -> None:
        self.rows = Rows(setting.max_rows, setting.max_len)
        cache = resolve("prefix cache", setting.cache, CACHES)(setting.page_size)
        self.kv = KVCacheManager(setting.num_pages, setting.page_size, self.rows, cache)
        self.outbox = RecordingOutbox(lambda: rng.random() < setting.refusal)
        self.output = Output(self.outbox)
        self.slots = SlotPool(setting.num_slots)
        self.lifecycle = Lifecycle(self.kv, self.slots, self.output)
        self.executor = FakeExecutor(
            setting.num_pages,
            setting.page_size,
            setting.max_rows,
            setting.max_len,
            max_in_flight=setting.depth,
            feeds_back=setting.feeds_back,
            jitter=setting.jitter,
        )
        intake = Intake(
            self.lifecycle,
            ModelLimits(VOCAB_SIZE, setting.max_len, EOS_IDS),
            (*factories, attach_logprobs(self.output.add_logprobs)),
        )
        self.scheduler = Scheduler(
            self.lifecycle,
            intake,
            resolve("schedule policy", setting.policy, POLICIES)(),
            MaxUtilization(self.rows, self.kv, setting.conservativeness),
            self.executor,
            setting.budget,
            StepLog(self.kv, self.lifecycle.waiting, 40),
        )
        self.detokenizer = FakeDetokenizer()
        self.inbox = MemoryChannel("scheduler_in")

    def step(self) -> None:
        """One turn of the loop, with every check that no output would show."""
        self.scheduler.step(self.inbox.drain())
        for message in self.outbox.take():
            self.detokenizer.receive(message)
        self.kv.check()
        self.lifecycle.check()
        check_rows(self.kv)

    def check_empty(self) -> None:
        assert self.scheduler.is_idle
        assert self.rows.num_free == self.rows.max_rows
        assert self.kv.num_available == self.kv.pages.num_pages
        assert not self.slots.num_used
        assert not len(self.lifecycle.waiting)
        assert self.lifecycle.num_accepted == len(self.detokenizer.opened)
        assert self.lifecycle.num_terminated == len(self.detokenizer.closed)


def check_rows(kv: KVCacheManager) -> None:
    """Nothing is computed past a request's end, and prompts are shared before they decode."""
    for req in kv.rows.running_requests():
        assert req.status is Status.RUNNING
        assert req.parked == b""
        assert req.predicted_len <= req.max_len, "overrun past the length limit"
        if kv.cache.shares and req.kv_len >= req.num_given:
            num_full = req.num_given // kv.page_size
            assert req.num_shared >= num_full, "prompt not published"
