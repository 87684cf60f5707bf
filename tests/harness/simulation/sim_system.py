"""System under test: a real scheduler between a fake worker and fake detokenizers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from runtime.ring.process import FIRST_EPOCH
from runtime.ring.suspects.roster import NO_SUSPECTS, Roster, Suspects, size_of
from runtime.ring.tenants import Tenant
from runtime.sampling.table import MAX_DRAFT_TOKENS
from runtime.wire.format import TOKEN_BYTES, unpack_ids
from runtime.wire.plan import BatchPlan
from runtime.wire.transport import HIGH_WATER_MARK, Inbox, MemoryChannel
from scheduler_proc.batching.chunk_costs import ChunkCosts
from scheduler_proc.batching.composition import (
    BatchingSettings,
    make_batch_builder,
    make_prefix_cache,
    make_schedule_policy,
)
from scheduler_proc.batching.prefill_adder import PrefillTotals, StepLimits
from scheduler_proc.cache.kv_cache_manager import KVCacheManager
from scheduler_proc.cache.radix.eviction import EVICTION_POLICIES
from scheduler_proc.cache.tenants import OWNER
from scheduler_proc.capacity.slots import SlotPool
from scheduler_proc.core.batch import ScheduleBatch
from scheduler_proc.core.lifecycle import Lifecycle
from scheduler_proc.core.output import make_output
from scheduler_proc.core.request import FeatureFactory, Status
from scheduler_proc.core.rows import Rows
from scheduler_proc.feature_factories import feature_factories
from scheduler_proc.features.beam_search.attaching import BeamSettings
from scheduler_proc.features.feature_gate import may_by_what_it_brings
from scheduler_proc.features.grammar_client import GrammarClient
from scheduler_proc.features.logits_processors import attach_logits_processors
from scheduler_proc.features.speculation.guessing_rows import MIN_TOGETHER
from scheduler_proc.features.speculation.speculation import SpeculationSettings
from scheduler_proc.features.speculation.step_cost import StepCost
from scheduler_proc.intake.controls import Controls
from scheduler_proc.intake.intake import Intake
from scheduler_proc.intake.limits import Limits, QueueShare
from scheduler_proc.intake.worker_calls import WorkerCalls
from scheduler_proc.observe.snapshot import SnapshotMaker
from scheduler_proc.observe.stats_questions import StatsQuestions
from scheduler_proc.observe.step_log import StepLog
from scheduler_proc.observe.step_profile import StepProfile
from scheduler_proc.observe.step_stats import StatsSettings, StepStats
from scheduler_proc.policy.base import sort_key_of
from scheduler_proc.port import Port
from scheduler_proc.scheduler import Scheduler
from scheduler_proc.waiting.waiting_room import FOR_EVER, Patience
from tests.harness.simulation.fake_sampling import BANS, RAISES, TAP, VOCAB_SIZE
from tests.harness.simulation.fakes import FakeExecutor, FakeHandle, RecordingOutbox
from tests.harness.simulation.sim_detokenizer import FakeDetokenizer
from tests.harness.simulation.sim_pipe import PipeWatch
from tests.harness.simulation.sim_reference import EOS_IDS
from tests.harness.simulation.sim_shares import SharesWatch
from tests.harness.simulation.sim_stats import StatsWatch
from tests.harness.simulation.sim_tenants import TenantWatch, draw_tenants
from tests.harness.simulation.sim_waiting import WaitingWatch

STEP_S = 0.01
NO_SPECULATION = SpeculationSettings()
TENANTS = (OWNER, b"tenant-A", b"tenant-B")
SHARES = [(), ((TENANTS[1], 0.5),), ((OWNER, 0.25), (TENANTS[1], 0.0), (TENANTS[2], 1.0))]
EVICTION_NAMES = [*EVICTION_POLICIES, "tests.harness.models.stand_ins:RandomEviction"]
SEED = 7
WALL_S = 1_700_000_000.0
"""Seconds since 1970, at any time."""
MAX_LOGITS_BYTES = 1 << 20
MAX_GUESSES = 4
"""Guesses of a row in a step, but for drafts that come with a request."""
BATCHING_NAMES = ["inflight_fused", "inflight_fused", "inflight", "static"]
POLICY_NAMES = [
    "fcfs",
    "lpm",
    "dfs-weight",
    "shortest-first",
    "lof",
    "tests.harness.models.stand_ins:RandomPolicy",
]


@dataclass(slots=True, frozen=True)
class Setting:
    """Settings of one run, besides its requests."""

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
    num_requests: int
    max_output: int
    turbulence: float
    """Probability that something comes from outside in a step."""
    num_detokenizers: int = 1
    max_live: int = 1000
    expiring: float = 0.0
    """Share of the requests that have a deadline."""
    capacity: str = "max_utilization"
    batching: str = "inflight_fused"
    max_requests: int = 0
    """Requests of one step; 0: all that run."""
    micro_batch_scheduler: str = ""
    request_scheduler: str = ""
    eviction: str = "lru"
    window: int = 0
    """Tokens that the model sees; 0: all."""
    max_iterations: int = 1000
    max_request_iterations: int = 0
    """Iterations whose statistics by request are kept."""
    num_tenants: int = 1
    shares: tuple[tuple[bytes, float], ...] = ()
    """Shares of the cache that tenants have of their own."""
    patience: Patience = FOR_EVER
    tenants: tuple[Tenant, ...] = ()
    """Besides the owner."""
    cuts_prompts: bool = True
    speculation: SpeculationSettings = NO_SPECULATION
    has_adapters: bool = False
    """Requests ask for adapters, which the worker loads."""
    max_passed: int = 6
    """Requests that may go before one that came earlier and waits for its adapter."""
    guided: float = 0.0
    """Share of the requests that have a guide."""
    late: float = 0.0
    """Share of the masks that come late."""
    processed: float = 0.0
    """Share of the requests that have logits processors. Not drawn: a test asks for them."""
    tapped: float = 0.0
    """Share of the requests that want additional outputs. Not drawn, either."""
    num_stages: int = 1
    """Stages of the pipeline; more than one: `depth` is by them."""
    drains_widths: bool = False
    attention_span: int = 0
    """Tokens before a token of a prompt at which it counts for two; 0: each counts for one."""

    @property
    def most_in_flight(self) -> int:
        """Steps launched before one must be committed."""
        return self.depth if self.num_stages == 1 else self.num_stages + self.feeds_back

    @property
    def tenant_share(self) -> QueueShare | None:
        """Three quarters of the places."""
        return QueueShare(-(-3 * self.max_live // 4), self.max_live, self.max_live) if self.tenants else None

    def step_limits(self) -> StepLimits:
        span = self.attention_span if self.cuts_prompts else 0
        return StepLimits(
            self.budget,
            self.max_requests or self.max_rows,
            self.cuts_prompts,
            ChunkCosts(self.budget, span) if span else None,
        )

    def limits(self) -> Limits:
        return Limits(
            VOCAB_SIZE,
            self.max_len,
            EOS_IDS,
            self.max_live,
            True,
            True,
            MAX_LOGITS_BYTES,
            tenant_share=self.tenant_share,
            additional_outputs=(TAP,) if self.tapped else (),
            output_width=VOCAB_SIZE,
        )

    def stats(self, limits: StepLimits) -> StatsSettings:
        return StatsSettings(
            limits,
            self.batching == "static",
            self.max_iterations,
            self.max_request_iterations,
            num_stages=self.num_stages,
        )

    def who_is_in_a_step(self, limits: StepLimits) -> BatchingSettings:
        return BatchingSettings(
            limits,
            self.batching,
            self.capacity,
            self.conservativeness,
            self.micro_batch_scheduler,
            self.request_scheduler,
            self.num_stages,
            self.drains_widths,
        )

    @staticmethod
    def draw(rng: random.Random) -> Setting:
        capacity = rng.choice(["max_utilization"] * 6 + ["guaranteed_no_evict"] * 2 + ["static_batch"])
        has_own_scheduler = capacity == "max_utilization" and rng.random() < 0.1
        is_preemptible = capacity == "max_utilization" and not has_own_scheduler
        policies = [*POLICY_NAMES, "priority", "priority"] if is_preemptible else POLICY_NAMES
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
            policy=rng.choice(policies),
            cache="none" if rng.random() < 0.15 else "radix",
            conservativeness=rng.choice([0.05, 0.3, 1.0]),
            num_slots=rng.choice([1, 2]),
            refusal=rng.choice([0.0, 0.0, 0.2, 0.6]),
            num_requests=20,
            max_output=rng.choice([12, 24, 60]),
            turbulence=rng.choice([0.0, 0.3, 1.0]),
            num_detokenizers=rng.choice([1, 1, 2, 3]),
            max_live=rng.choice([1000, 1000, 1000, 9]),
            expiring=rng.choice([0.0, 0.3]),
            capacity=capacity,
            batching="inflight_fused" if has_own_scheduler else rng.choice(BATCHING_NAMES),
            max_requests=rng.choice([0, 0, 0, 1, 3]),
            request_scheduler="tests.harness.models.stand_ins:RandomScheduler" if has_own_scheduler else "",
            eviction=aside(rng).choice(EVICTION_NAMES),
            window=aside(rng).choices([0, 1, 7, 20, 45], [12, 1, 1, 1, 1])[0],
            patience=draw_patience(random.Random(aside(rng).getrandbits(64))),
            tenants=draw_tenants(random.Random(aside(rng).getrandbits(32))),
            num_tenants=aside(rng).choice([1, 3, 3]),
            shares=aside(rng).choice(SHARES),
            cuts_prompts=random.Random(aside(rng).getrandbits(48)).random() < 0.8,
            speculation=draw_speculation(random.Random(aside(rng).getrandbits(40))),
            has_adapters=random.Random(aside(rng).getrandbits(36)).random() < 0.3,
            num_stages=random.Random(aside(rng).getrandbits(24)).choice([1, 1, 1, 2, 3, 4]),
            attention_span=random.Random(aside(rng).getrandbits(20)).choice([0] * 8 + [9, 50]),
        ).with_guides(random.Random(aside(rng).getrandbits(28)))

    def with_guides(self, rng: random.Random) -> Setting:
        """In a third of the runs, but where it is watched who waits how long: nothing tells the watch that
        somebody waits for a mask.
        """
        if rng.random() < 0.66 or self.tenants or self.patience != FOR_EVER:
            return self
        # Rows end or are taken back, and time passes, after the commit of a turn: its record is not of its
        # end.
        return replace(
            self, guided=rng.choice([0.3, 0.8]), late=rng.choice([0.0, 0.1, 0.5]), max_iterations=1
        )


def aside(rng: random.Random) -> random.Random:
    """The same randomness, from which may be drawn without changing what a seed draws otherwise."""
    return random.Random(hash(rng.getstate()[1]))


def draw_speculation(rng: random.Random) -> SpeculationSettings:
    """In half of the runs rows guess; in half of these all rows at once, however few they are."""
    return SpeculationSettings(rng.random() < 0.5, 4, rng.choice([1, MIN_TOGETHER]))


def draw_patience(rng: random.Random) -> Patience:
    """In half of the runs nobody is in a hurry. None of it is a whole number of steps."""
    if rng.random() < 0.5:
        return FOR_EVER
    return Patience(rng.choice([0.0, 0.055, 0.155, 0.555]), rng.choice([0.0, 0.0, 0.255, 0.755]))


ROSTER_PLACES = 2000


def empty_roster(max_rows: int) -> Roster:
    return Roster(bytearray(size_of(ROSTER_PLACES, max_rows)), ROSTER_PLACES, max_rows)


class WatchedExecutor(FakeExecutor):
    """Shows every plan to `watch` before it runs."""

    watch: Callable[[BatchPlan], None]

    @staticmethod
    def of(setting: Setting, watch: Callable[[BatchPlan], None]) -> WatchedExecutor:
        executor = WatchedExecutor(
            setting.num_pages,
            setting.page_size,
            setting.max_rows,
            setting.max_len,
            max_in_flight=setting.most_in_flight,
            feeds_back=setting.feeds_back,
            window=setting.window,
        )
        executor.watch = watch
        return executor

    def launch(self, plan: BatchPlan) -> FakeHandle:
        self.watch(plan)
        return super().launch(plan)


def slots_of(setting: Setting, executor: FakeExecutor, port: Port) -> SlotPool:
    """Device slots; with adapters one more, as a request may want two of them."""
    if not setting.has_adapters:
        return SlotPool(setting.num_slots)
    return SlotPool(setting.num_slots + 1, executor, port.now_s, setting.max_passed)


class System:
    """Its time passes by STEP_S with each step, unless it is given a clock."""

    def __init__(
        self,
        setting: Setting,
        rng: random.Random,
        factories: tuple[FeatureFactory, ...] = (),
        clock: Callable[[], float] | None = None,
        epoch: int = FIRST_EPOCH,
        suspects: Suspects = NO_SUSPECTS,
        interrupted: Iterable[bytes] = (),
        inbox: Inbox | None = None,
        grammar: GrammarClient | None = None,
    ) -> None:
        self.now = self._stepped_at = 1.0
        clock = clock or (lambda: self.now)
        self.rows = Rows(setting.max_rows, setting.max_len)
        self.inbox = MemoryChannel("scheduler_in")
        self.outboxes = [
            RecordingOutbox(lambda: rng.random() < setting.refusal) for _ in range(setting.num_detokenizers)
        ]
        self.outbox, step_cost = self.outboxes[0], StepCost()
        self.setting, self.detokenizer = setting, FakeDetokenizer()
        self.port = port = self.make_port(inbox or self.inbox, epoch, clock)
        cache = make_prefix_cache(
            setting.page_size, port, setting.eviction, is_disabled=setting.cache == "none"
        )
        self.kv = KVCacheManager(setting.num_pages, setting.page_size, self.rows, cache, setting.window)
        for tenant, share in setting.shares:
            self.kv.guard.shares.set(tenant, share)
        self.gave_back: set[int] = set()
        """Stays that gave back pages before their end."""
        self.output = make_output(port.outboxes, port.epoch)
        self.executor = WatchedExecutor.of(setting, self._check_plan)
        self.slots = slots_of(setting, self.executor, port)
        policy = make_schedule_policy(setting.policy, port)
        self.lifecycle = Lifecycle(
            self.kv,
            self.slots,
            self.output,
            port.now_s,
            sort_key=sort_key_of(policy, self.kv),
            roster=empty_roster(setting.max_rows),
            patience=setting.patience,
        )
        limits = setting.step_limits()
        self.stats = StepStats(self.lifecycle, setting.stats(limits), port.now_s, port.wall_s)
        controls = Controls(
            self.lifecycle,
            StatsQuestions(self.stats, self.output),
            setting.max_len,
            profile=StepProfile(None, port),
            snapshots=SnapshotMaker(self.lifecycle, port.now_s, port.wall_s),
            calls=WorkerCalls(None, self.output, port),
        )
        intake = Intake(
            self.lifecycle,
            setting.limits(),
            (
                *factories,
                attach_logits_processors(
                    {BANS, RAISES},
                    speculates=setting.speculation.has_ngram,
                    is_static=setting.batching == "static",
                ),
                *feature_factories(
                    self.output,
                    self.kv,
                    port.now_s,
                    setting.speculation,
                    step_cost,
                    grammar,
                    BeamSettings(setting.max_rows, VOCAB_SIZE, grammar=grammar),
                ),
            ),
            controls=controls,
            clock=port.now_s,
            suspects=suspects,
            interrupted=interrupted,
            may_ask=None if factories or setting.speculation.has_ngram else may_by_what_it_brings,
        )
        builder = make_batch_builder(setting.who_is_in_a_step(limits), self.lifecycle, policy, port)
        step_log = StepLog(self.kv, self.lifecycle.room, 40, port.now_s)
        self.scheduler = Scheduler(
            port, self.lifecycle, intake, builder, self.executor, step_log, controls, step_cost
        )
        self.scheduler.masks.source = grammar
        self.begin(clock)

    def begin(self, clock: Callable[[], float]) -> None:
        """Have it watched, before its first turn."""
        setting = self.setting
        self.shares_watch = SharesWatch(self.kv, retracts=setting.capacity == "max_utilization")
        self.watch = StatsWatch(self.stats, self.lifecycle, clock)
        self.waiting_watch = WaitingWatch(self.scheduler, setting.patience)
        self.tenant_watch = TenantWatch(self.scheduler, setting.tenant_share)
        self.pipe_watch = PipeWatch(self.scheduler, setting.num_stages, setting.feeds_back)
        self.change_tenants(setting.tenants)
        build = self.scheduler.builder.build

        def watched_build(feeds_back: bool) -> tuple[ScheduleBatch, PrefillTotals]:
            self.watch.note_build()
            self.pipe_watch.note_build()
            return build(feeds_back)

        self.scheduler.builder.build = watched_build  # type: ignore[method-assign]

    def change_tenants(self, tenants: tuple[Tenant, ...]) -> None:
        self.tenant_watch.change(tenants)

    def make_port(self, inbox: Inbox, epoch: int, clock: Callable[[], float]) -> Port:
        return Port(inbox, self.outboxes, epoch, clock=clock, wall_clock=lambda: WALL_S, seed=SEED)

    def pass_time(self, seconds: float) -> None:
        """Between two turns, and let the scheduler know."""
        self.now += seconds
        self.port.read_time()

    def step(self) -> None:
        """One turn of the loop, with every check that no output would show."""
        self.now += STEP_S
        began = self.now
        elapsed_s, self._stepped_at = began - self._stepped_at, began
        self.waiting_watch.time_passes(elapsed_s)
        self.tenant_watch.begin(elapsed_s)
        running = set(self.rows.stay[self.rows.running].tolist())
        self.pipe_watch.begin()
        self.scheduler.step(self.port.drain(HIGH_WATER_MARK))
        if self.setting.num_stages > 1:
            self.pipe_watch.check()
        self.deliver()
        self.kv.check()
        self.lifecycle.check()
        check_rows(self.kv)
        self.waiting_watch.check()
        self.tenant_watch.check()
        if self.setting.max_iterations >= 100:
            self.watch.check()
        self._check_batching(running)
        self._check_window()
        live = self.lifecycle.requests.values()
        assert len(live) <= self.setting.max_live, "more sequences live than may"
        assert not any(0.0 < req.deadline_s <= began for req in live), "alive after its deadline"

    def _check_batching(self, earlier: set[int]) -> None:
        """Check what the capacity policy promises. earlier: the stays before this step."""
        if self.setting.guided or self.scheduler.intake.suspects.alone:
            return  # a late mask takes its row back; so does one who has run alone for long enough
        if self.setting.capacity in ("guaranteed_no_evict", "static_batch"):
            assert not self.lifecycle.num_retracted, "took a row back"
        if self.setting.capacity == "static_batch" and earlier:
            now = set(self.rows.stay[self.rows.running].tolist())
            assert not now & earlier or now <= earlier, "joined a closed batch"

    def _check_window(self) -> None:
        """Check that who has begun to give back what no later token sees holds as many pages as its window
        needs.
        """
        window, size = self.setting.window, self.setting.page_size
        if not window:
            return
        for req in self.rows.running_requests():
            if self.kv.num_gone.item(req.row):
                held = self.kv.num_held(np.array([req.row])).item()
                self.gave_back.add(self.rows.stay.item(req.row))
                num_guessed = MAX_GUESSES if req.features else 0
                if req.draft_ids:
                    num_guessed = MAX_DRAFT_TOKENS
                most = 1 - (1 - window) // size - (-num_guessed // size)
                assert held <= most, "more pages than a window"

    def _check_plan(self, plan: BatchPlan) -> None:
        """Check how much a step holds, and that it holds prompts and decodes together only where it may."""
        self.watch.note_launch(plan)
        self._check_adapters(plan)
        if self.setting.num_stages > 1:
            self.pipe_watch.note_launch(plan)
        setting, rows = self.setting, unpack_ids(plan.rows)
        assert len(rows) <= (setting.max_requests or setting.max_rows), "too many requests in a step"
        assert len(plan.input_ids) <= setting.budget * TOKEN_BYTES, "too many tokens in a step"
        guessing = np.flatnonzero(unpack_ids(plan.drafts)) + plan.num_decodes
        ends = unpack_ids(plan.starts)[guessing] + unpack_ids(plan.lens)[guessing - plan.num_decodes]
        assert (ends < self.rows.max_len[rows[guessing]]).all(), "guesses beyond the end"
        if setting.batching != "inflight_fused":
            are_prompts = unpack_ids(plan.starts) < self.rows.num_given[rows]
            assert are_prompts.all() or not are_prompts.any(), "prompts and decodes in one step"

    def _check_adapters(self, plan: BatchPlan) -> None:
        """Each row of a step has its own adapter in its slot when the step is launched."""
        slot_of_row = self.executor.slot_of_row | {setup.row: setup.adapter_slot for setup in plan.setups}
        for row in unpack_ids(plan.rows).tolist():
            req, slot = self.rows.holder[row], slot_of_row[row]
            assert req is not None
            ready = self.executor.slots.get(slot)
            assert (slot < 0) == (req.adapter is None), "a row with the slot of another one"
            assert slot < 0 or ready == req.adapter, "a row is planned whose adapter is not there"

    def deliver(self) -> None:
        for number, outbox in enumerate(self.outboxes):
            for message in outbox.take():
                self.detokenizer.receive(message, self.now, number, len(self.outboxes))

    def check_empty(self) -> None:
        assert self.scheduler.is_idle
        assert self.rows.num_free == self.rows.max_rows
        assert self.kv.num_available == self.kv.pages.num_pages
        assert not self.slots.num_used
        assert not len(self.lifecycle.room)
        assert self.lifecycle.num_accepted == len(self.detokenizer.opened)
        assert self.lifecycle.num_terminated == len(self.detokenizer.closed)


def check_rows(kv: KVCacheManager) -> None:
    """Nothing is computed past a request's end, and prompts are shared before they decode."""
    for req in kv.rows.running_requests():
        assert req.status is Status.RUNNING
        assert req.parked == b""
        assert req.predicted_len <= req.max_len, "overrun past the length limit"
        if not req.num_in_flight:
            assert kv.num_pages[req.row] <= kv.num_pages_for(req.num_tokens), "pages of rejected guesses kept"
        if kv.cache.shares and req.kv_len >= req.num_given:
            num_full = req.num_given // kv.page_size
            assert kv.num_gone[req.row] or kv.num_shared[req.row] >= num_full, "prompt not published"
