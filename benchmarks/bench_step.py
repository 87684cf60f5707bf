"""Host time of one scheduler step, with a worker that costs nothing.

    python -m benchmarks.bench_step [--repeats 5] [--depth 2] [--cases rows,churn]

steady  every row decodes one token in every step; nobody comes or goes
churn   a tenth of the rows finish in every step and are replaced in it, each by a prompt that nobody had
        before
quarter as steady, but a quarter of the rows has stop strings and wants the logprobs of its tokens, with the
        five most likely ones
beams   as steady, but every four rows are a beam search, of whose hypotheses three fork in every step
ruled beams  as beams, with a repetition penalty and n-grams, on rows of logits of 151,936 ids
all rules    as ruled beams, with a bias, presence and frequency penalties, bad words and min tokens, too
allowed ids  as ruled beams, and nothing but 100 ids may come
guesses as steady, but every row makes three guesses in every step from its own output, all right
sampled as steady and as churn, but every request is sampled for a trace
waiting as steady, with 5,000 requests waiting for a row, and with as many waiting for pages beside free rows

A step is timed as the process runs it: decoding the inbox, building and encoding the plan, decoding the
StepResult, commit, encoding the TokenBatch; with feedback, and overlap depth 2 unless --depth says another.
Each case runs several times, because the machine may be busy with something else: p50 and p99 are the best
run's. `worst` is the run with the highest p50. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from runtime.sampling.features import LOGPROBS
from runtime.wire.format import Message, pack_ids, unpack_ids
from runtime.wire.handle import make_handle
from runtime.wire.messages import StreamOpen, TokenizedRequest, ToScheduler
from runtime.wire.perf_metrics import TRACE_CONTEXT_BYTES, TraceStamps
from runtime.wire.plan import BatchPlan, SampleMasks, StepResult, StepTensor
from runtime.wire.sampling_params import SamplingParams
from runtime.wire.transport import Frame, MemoryChannel, MessageCodec
from scheduler_proc.batching.composition import BatchingSettings, make_batch_builder, make_schedule_policy
from scheduler_proc.batching.prefill_adder import StepLimits
from scheduler_proc.cache.kv_cache_manager import KVCacheManager
from scheduler_proc.cache.radix.radix_cache import RadixCache
from scheduler_proc.capacity.slots import SlotPool
from scheduler_proc.core.executor import AnyExecutor
from scheduler_proc.core.lifecycle import Lifecycle
from scheduler_proc.core.output import make_output
from scheduler_proc.core.rows import Rows
from scheduler_proc.feature_factories import feature_factories
from scheduler_proc.features.beam_search.attaching import BeamSettings
from scheduler_proc.features.beam_search.score_rules import SLACK
from scheduler_proc.features.feature_gate import may_by_what_it_brings
from scheduler_proc.features.speculation.speculation import SpeculationSettings
from scheduler_proc.features.speculation.step_cost import StepCost
from scheduler_proc.intake.controls import Controls
from scheduler_proc.intake.intake import Intake
from scheduler_proc.intake.limits import Limits
from scheduler_proc.intake.worker_calls import WorkerCalls
from scheduler_proc.observe.snapshot import SnapshotMaker
from scheduler_proc.observe.stats_questions import StatsQuestions
from scheduler_proc.observe.step_log import StepLog
from scheduler_proc.observe.step_profile import StepProfile
from scheduler_proc.observe.step_stats import StatsSettings, StepStats
from scheduler_proc.policy.base import sort_key_of
from scheduler_proc.port import Port
from scheduler_proc.scheduler import Scheduler
from scheduler_proc.waiting.waiting_room import Patience

NUM_PROMPT = 1024
NUM_OUTPUT = 256
VOCAB_SIZE = 32_000
LARGE_VOCAB = 151_936
EOS_ID = 2
TOKEN = 17
WARMUP_STEPS = 30
STEPS = 200
NUM_TOP = 5
NUM_WAITING = 5000
SOME_RULES: dict[str, object] = {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3}
RULES: dict[str, dict[str, object]] = {
    "some": SOME_RULES,
    "all": {
        **SOME_RULES,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
        "logit_bias": tuple((TOKEN + at, 0.5 - at / 10) for at in range(10)),
        "bad_words_ids": tuple((100 + at,) for at in range(5)) + tuple((200 + at, 100) for at in range(5)),
        "min_tokens": 250,
    },
    "allowed": {**SOME_RULES, "allowed_token_ids": tuple(range(TOKEN, TOKEN + 100))},
}
SHORT_OF_PAGES = 120 * 82
"""Number of pages that leaves rows free while pages are short: in every step a request is considered that
does not fit.
"""
CHURN_OUTPUT = 9
"""Output length of a request in the churn case. With the lag of depth 2 its stay is ten steps."""


class NullHandle:
    """A step that was finished at once. Its result is bytes, as from a socket."""

    def __init__(self, data: bytes, codec: MessageCodec, frames: tuple[Frame, ...] = ()) -> None:
        self._data = data
        self._codec = codec
        self.frames = frames

    def result(self) -> StepResult:
        result = self._codec.decode(self._data)
        assert isinstance(result, StepResult)
        return result

    def done(self) -> bool:
        return True


class NullExecutor:
    """Encodes plans and answers each with as many tokens as it samples, and with logprobs of rows that asked.
    The time for the answer is not counted as the step's.
    """

    max_in_flight = 2
    feeds_back = True

    def __init__(self, max_rows: int, num_top: int = NUM_TOP, num_logits: int = 0) -> None:
        """num_logits: vocabulary size of the rows of logits that come with all rows; 0: none."""
        self._plans = MessageCodec(BatchPlan, 0)
        self._results = MessageCodec(StepResult, 0)
        self._has_logprobs = np.zeros(max_rows, np.bool_)
        self._num_top = num_top
        self._top_ids = np.full((max_rows, num_top), TOKEN, np.int32) + np.arange(num_top, dtype=np.int32)
        lowest = -8.0 if num_logits else -1.1  # rules need lower logprobs than a choice without them
        self._logprobs = np.tile(np.linspace(-1.0, lowest, num_top, dtype=np.float32), (max_rows, 1))
        # In a group one row is the best by far, and all beams that go on come from it.
        self._logprobs[1:] -= 10.0 * (np.arange(1, max_rows, dtype=np.float32)[:, None] % 4 > 0)
        self._logits: list[bytes] = []
        if num_logits:
            rest = np.random.default_rng(1).normal(-20.0, 1.0, num_logits).astype(np.float32)
            for logprobs in self._logprobs:
                rest[TOKEN : TOKEN + num_top] = logprobs
                self._logits.append(rest.tobytes())
        self._num_logits = num_logits
        self.seconds = 0.0

    def launch(self, plan: BatchPlan) -> NullHandle:
        self._plans.encode(plan)
        started = time.perf_counter()
        for setup in plan.setups:
            self._has_logprobs[setup.row] = bool(setup.features & LOGPROBS)
        counts = unpack_ids(plan.samples) + unpack_ids(plan.drafts)
        tokens = np.full(plan.num_decodes + int(counts.sum()), TOKEN, np.int32)
        m = np.count_nonzero(self._has_logprobs[unpack_ids(plan.rows)])
        logprobs = (
            self._logprobs[:m, 0].tobytes(),
            self._num_top,
            self._top_ids[:m].tobytes(),
            self._logprobs[:m].tobytes(),
        )
        frames = tuple(self._logits[:m])
        tensors = tuple(
            StepTensor(place, "generation_logits", 0, (1, self._num_logits)) for place in range(len(frames))
        )
        result = StepResult(plan.step, tokens.tobytes(), counts.tobytes(), *logprobs, tensors=tensors)
        data = self._results.encode(result)
        self.seconds += time.perf_counter() - started
        return NullHandle(data, self._results, frames)

    def sample(self, handle: object, masks: SampleMasks) -> None:
        raise AssertionError("no row has a mask")

    def close(self) -> None:
        """Do nothing: the executor has nothing to stop."""


class EncodingOutbox:
    """The encoding half of a socket."""

    def __init__(self) -> None:
        self._codec = MessageCodec(None, 0)
        self.num_bytes = 0

    def send(self, message: Message, frames: Sequence[Frame] = ()) -> bool:
        self.num_bytes += len(self._codec.encode(message))
        return True

    def close(self) -> None:
        """Do nothing: the outbox holds no resources."""


ROOMY = 24
"""Factor on the pages that the rows need: as many as all the prompts of a churn run."""


class Figures(NamedTuple):
    p50_us: float
    p99_us: float
    ended_per_step: float


class Case(NamedTuple):
    num_rows: int
    page_size: int
    churn: bool
    num_prompt: int = NUM_PROMPT
    num_output: int = NUM_OUTPUT
    num_idle_rows: int = 0
    pool_scale: int = 1
    logprobs_share: float = 0.0
    """Share of the rows that have stop strings and want logprobs."""
    policy: str = "fcfs"
    num_waiting: int = 0
    """Number of waiting requests."""
    num_pages: int = 0
    """Number of pages of the pool; 0: pool_scale times what the rows need."""
    num_guesses: int = 0
    """Number of guesses of each row in each step."""
    num_beams: int = 1
    """Number of rows of each request, which is a beam search if there are several."""
    rules: str = ""
    """Name of an entry of RULES that beam searches have. With any they read the logits of their rows."""
    is_sampled: bool = False
    """True if requests record stamps for traces."""


class Bench:
    """A scheduler with full rows, ready to be stepped."""

    def __init__(self, case: Case, executor: AnyExecutor | None = None) -> None:
        self.case = case
        max_len = case.num_prompt + case.num_output
        num_pages = case.num_pages or (
            (case.num_rows + 64) * (max_len // case.page_size + 2) * case.pool_scale
        )
        self.rows = Rows(case.num_rows + case.num_idle_rows, max_len)
        port = Port(MemoryChannel("scheduler_in"), [EncodingOutbox()])
        kv = KVCacheManager(num_pages, case.page_size, self.rows, RadixCache(case.page_size, port.now_s))
        num_top = NUM_TOP if case.num_beams == 1 else 2 * case.num_beams + SLACK * bool(case.rules)
        num_logits = LARGE_VOCAB if case.rules else 0
        self._null = NullExecutor(case.num_rows + case.num_idle_rows, num_top, num_logits)
        output = make_output(port.outboxes, port.epoch)
        policy = make_schedule_policy(case.policy, port)
        self.lifecycle = Lifecycle(
            kv,
            SlotPool(0),
            output,
            port.now_s,
            sort_key=sort_key_of(policy, kv),
            patience=Patience(30.0, 600.0),
        )
        max_live = self.rows.max_rows + case.num_waiting
        limits = Limits(VOCAB_SIZE, max_len, frozenset({EOS_ID}), max_live)
        step_limits = StepLimits(1 << 20, self.rows.max_rows)
        stats = StepStats(self.lifecycle, StatsSettings(step_limits), port.now_s, port.wall_s)
        controls = Controls(
            self.lifecycle,
            StatsQuestions(stats, output),
            max_len,
            profile=StepProfile(None, port),
            snapshots=SnapshotMaker(self.lifecycle, port.now_s, port.wall_s),
            calls=WorkerCalls(None, output, port),
        )
        speculation, step_cost = SpeculationSettings(case.num_guesses > 0, case.num_guesses), StepCost()
        step_cost.most = case.num_guesses
        intake = Intake(
            self.lifecycle,
            limits,
            feature_factories(
                output,
                kv,
                port.now_s,
                speculation,
                step_cost,
                beams=BeamSettings(case.num_beams, VOCAB_SIZE),
            ),
            controls=controls,
            clock=port.now_s,
            may_ask=None if speculation.has_ngram else may_by_what_it_brings,
        )
        batching = BatchingSettings(step_limits, conservativeness=0.01)
        builder = make_batch_builder(batching, self.lifecycle, policy, port)
        step_log = StepLog(kv, self.lifecycle.room, 40, port.now_s)
        self.scheduler = Scheduler(
            port, self.lifecycle, intake, builder, executor or self._null, step_log, controls
        )
        self._codec = MessageCodec(ToScheduler, 0)
        self._random = np.random.default_rng(0)
        self._numbers = itertools.count()

    def frame(self, max_tokens: int) -> bytes:
        """Return a request in its form on the socket. Its prompt shares nothing with any other."""
        ids = self._random.integers(8, VOCAB_SIZE, self.case.num_prompt, dtype=np.int32)
        number, share = next(self._numbers), self.case.logprobs_share
        handle = make_handle(1, number)
        asks = int((number + 1) * share) > int(number * share)
        stop = ("\n\n", "</s>") if asks else ()
        opening = StreamOpen(handle, self.case.num_prompt, stop=stop)
        stream_open = msgspec.Raw(msgspec.msgpack.encode(opening))
        sampling = SamplingParams(
            max_tokens=max_tokens, seed=1, stop=stop, logprobs=NUM_TOP if asks else None
        )
        if self.case.num_beams > 1:
            sampling = msgspec.structs.replace(
                sampling, use_beam_search=True, beam_width=self.case.num_beams, temperature=0.0
            )
        if self.case.rules:
            sampling = msgspec.structs.replace(sampling, **RULES[self.case.rules])
        trace = TraceStamps(bytes(TRACE_CONTEXT_BYTES)) if self.case.is_sampled else None
        request = TokenizedRequest(handle, pack_ids(ids), sampling, stream_open, trace=trace)
        return self._codec.encode(request)

    def step(self, frames: list[bytes]) -> float:
        """Return the seconds of one step."""
        self._null.seconds = 0.0
        started = time.perf_counter()
        self.scheduler.step([self._codec.decode(frame) for frame in frames])
        return time.perf_counter() - started - self._null.seconds

    def first_frames(self) -> list[bytes]:
        """Return a request for every row but the idle ones; with churn, a tenth of them ends in each step."""
        return [
            self.frame(1 + i % CHURN_OUTPUT if self.case.churn else self.case.num_output)
            for i in range(self.case.num_rows // self.case.num_beams + self.case.num_waiting)
        ]

    def next_frames(self) -> list[bytes]:
        num_free = self.rows.num_free - self.case.num_idle_rows
        return [self.frame(CHURN_OUTPUT) for _ in range(num_free)] if self.case.churn else []


def run(case: Case) -> Figures:
    gc.collect()
    bench = Bench(case)
    bench.step(bench.first_frames())
    for _ in range(WARMUP_STEPS):
        bench.step(bench.next_frames())
    num_ended = bench.lifecycle.num_terminated
    times = sorted(bench.step(bench.next_frames()) * 1e6 for _ in range(STEPS))
    num_ended = bench.lifecycle.num_terminated - num_ended
    return Figures(times[STEPS // 2], times[STEPS * 99 // 100], num_ended / STEPS)


CASES = {
    "rows": [Case(rows, 16, False) for rows in (1, 64, 256)],
    "churn": [Case(rows, 16, True, pool_scale=ROOMY) for rows in (1, 64, 256)],
    "churn_full_pool": [Case(rows, 16, True) for rows in (1, 64, 256)],
    "rows_page_1": [Case(rows, 1, False) for rows in (1, 64, 256)],
    "churn_page_1": [Case(rows, 1, True, pool_scale=ROOMY) for rows in (1, 64, 256)],
    "long_prompts": [Case(256, 16, False, num_prompt=8192)],
    "idle_rows": [Case(256, 16, False, num_idle_rows=3840)],
    "guesses": [
        Case(rows, 16, False, num_output=4 * (WARMUP_STEPS + STEPS) + 100, num_guesses=3)
        for rows in (1, 64, 256)
    ],
    "beams": [Case(rows, 16, False, num_beams=4) for rows in (4, 32, 256)],
    "ruled beams": [Case(rows, 16, False, num_beams=4, rules="some") for rows in (4, 32)],
    "all rules": [Case(rows, 16, False, num_beams=4, rules="all") for rows in (4, 32)],
    "allowed ids": [Case(rows, 16, False, num_beams=4, rules="allowed") for rows in (4, 32)],
    "sampled": [Case(64, 16, False, is_sampled=True), Case(256, 16, False, is_sampled=True)],
    "sampled churn": [Case(64, 16, True, pool_scale=ROOMY, is_sampled=True)],
    "quarter": [Case(256, 16, False, logprobs_share=0.25)],
    **{
        f"waiting {policy}": [
            Case(256, 16, False, policy=policy, num_waiting=NUM_WAITING),
            Case(256, 16, False, policy=policy, num_waiting=NUM_WAITING, num_pages=SHORT_OF_PAGES),
        ]
        for policy in ("fcfs", "priority", "lpm", "dfs-weight", "shortest-first", "lof")
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--depth", type=int, default=2, help="steps in flight")
    parser.add_argument("--cases", default=",".join(CASES), help="of those that the report names")
    args = parser.parse_args()
    NullExecutor.max_in_flight = args.depth
    gc.disable()  # as in the scheduler process: tests/cpu/scheduler/test_no_cycles.py
    runs: dict[tuple[str, Case], list[Figures]] = {}
    for _ in range(args.repeats):
        for name in args.cases.split(","):
            for case in CASES[name]:
                runs.setdefault((name, case), []).append(run(case))
    report: dict[str, dict[str, dict[str, float]]] = {}
    print(f"{'case':14s} {'rows':>5s} {'p50 us':>8s} {'p99 us':>8s} {'worst p50':>10s} {'ended/step':>11s}")
    for (name, case), figures in runs.items():
        best = min(figures)
        worst = max(figures)
        print(
            f"{name:14s} {case.num_rows:5d} {best.p50_us:8.1f} {best.p99_us:8.1f} {worst.p50_us:10.1f}"
            f" {best.ended_per_step:11.1f}"
        )
        report.setdefault(name, {})[str(case.num_rows)] = {
            "p50_us": round(best.p50_us, 1),
            "p99_us": round(best.p99_us, 1),
            "worst_p50_us": round(worst.p50_us, 1),
            "ended_per_step": round(best.ended_per_step, 1),
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
