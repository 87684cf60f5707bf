"""Request: the scheduler's only record of a sequence.

It has its limits, its stop ids, and its tokens (in the columns of its row, or `parked`). It knows no pages
and no loop.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol, TypeAlias

import msgspec
import numpy as np

from runtime.ring.suspects.roster import content_in
from runtime.wire.format import TOKEN_BYTES, IntArray, unpack_ids
from runtime.wire.guide import Guide
from runtime.wire.perf_metrics import TraceStamps
from runtime.wire.plan import NO_ADAPTER, AdapterRef, RowProcessing, RowSetup
from runtime.wire.sampling_params import SamplingParams
from scheduler_proc.core.row_columns import MAX_STOP_IDS, RowColumns
from scheduler_proc.waiting.sorted_requests import Place

if TYPE_CHECKING:
    from scheduler_proc.cache.base import CacheNode
    from scheduler_proc.cache.pages.retained_pages import RetainedPages
    from scheduler_proc.core.samples import Sampled
    from scheduler_proc.core.scheduled_row import ScheduledRow
    from scheduler_proc.features.base import RequestFeature
    from scheduler_proc.waiting.account import Account


Choose: TypeAlias = "Callable[[list[Sampled]], Sequence[tuple[int, int]] | None]"
"""Function that returns (index of a beam, token) for each beam of the next step, an empty sequence when the
search has ended, or None when that is not known yet.
"""
NOTHING_WANTED = 1 << 31
"""Position beyond every prompt: no logits or logprobs of the prompt are wanted."""
STARVED = 1 << 20
"""Urgency of a starving request, above all priorities."""


class Status(IntEnum):
    """State of a sequence. Everything from FINISHED on is over."""

    WAITING = 1
    RUNNING = 2
    FINISHED = 3


WAITING, RUNNING, FINISHED = Status


class StopIds:
    """Ids that end a sequence: as a set for single tokens, and as a column for many rows at once."""

    __slots__ = ("column", "fit_the_column", "ids", "num_columns")

    def __init__(self, ids: frozenset[int]) -> None:
        self.ids = ids
        self.fit_the_column = len(ids) <= MAX_STOP_IDS
        self.column: IntArray = np.full(MAX_STOP_IDS, -1, np.int32)
        self.num_columns = len(ids) if self.fit_the_column else 0
        self.column[: self.num_columns] = sorted(ids)[: self.num_columns]


class GroupMasks(Protocol):
    """Masks of a group's beams; see SearchGuide."""

    @property
    def is_awaited(self) -> bool: ...

    def is_known(self) -> bool: ...

    def wait(self) -> bool: ...


class RowGroup:
    """Rows of one beam search, which get pages, are seated, retracted and ended together. Each row is held by
    a member. The first member is the request itself; the others are made for one stay.
    """

    def __init__(
        self, head: Request, width: int, choose: Choose, foresee: Callable[[list[Sampled]], None]
    ) -> None:
        """choose: asked for the next beams when the results of all running rows are there, in the order of
        the beams, and again while it does not know. foresee: called with these results before the first group
        of the step is asked, so that shared work can be done for all groups at once.
        """
        self.head = head
        self.width = width
        self.choose = choose
        self.foresee = foresee
        self.plan_row: Callable[[ScheduledRow[Request]], None] | None = None
        """Called for each row that is about to sample, or None."""
        self.masked_by: GroupMasks | None = None
        """Masks without which its next beams are not known; None: it needs none."""
        self.members = [head]
        self.beams: list[Request] = []
        """Members whose rows run, the best first."""
        self.has_ended = False
        """True once the search has chosen its last tokens, which are in none of its rows."""
        self._results: dict[int, Sampled] = {}

    def start(self, members: list[Request]) -> None:
        """Begin a stay: the request's own row runs; the other rows wait until a beam forks to them."""
        self.members = [self.head, *members]
        self.beams = [self.head]

    def end(self) -> list[Request]:
        """End a stay. Returns the other members, which are discarded."""
        others = self.members[1:]
        self.members, self.beams = [self.head], []
        self._results.clear()
        return others

    def take(self, member: Request, sampled: Sampled) -> None:
        """Keep a row's result until all rows have theirs."""
        self._results[member.row] = sampled

    def has_all(self) -> bool:
        """Return True if the results of all running rows are there."""
        return bool(self.beams) and len(self._results) == len(self.beams)

    def announce(self) -> None:
        """Announce the results to `foresee`, before `next_beams` is called."""
        self.foresee(self._of_beams())

    def next_beams(self) -> Sequence[tuple[int, int]] | None:
        """Return the next beams, as `choose` does. The results are kept while it answers None."""
        beams = self.choose(self._of_beams())
        if beams is not None:
            self._results.clear()
            self.has_ended = not beams
        return beams

    def _of_beams(self) -> list[Sampled]:
        return [self._results[beam.row] for beam in self.beams]


@dataclass(eq=False, slots=True)
class Request:
    """Record of one sequence. While it holds a row, its lengths and tokens are columns of `rows`, which the
    properties below read.
    """

    handle: bytes
    key: bytes
    """Key that all attempts of the sequence share."""
    suspect: bytes
    """Name that it has if the engine dies of it, made of its key and of what it asks for."""
    seq: int
    """Number of the sequence, in the order of arrival."""
    rows: RowColumns
    sampling: SamplingParams
    stops: StopIds
    num_prompt: int
    max_len: int
    """Number of tokens, prompt and output, at which the sequence ends."""
    min_len: int
    """Position below which no stop id ends the sequence; the device samples none there either."""
    parked: bytes
    """Prompt and committed output as packed ids while the sequence holds no row; empty while it does."""
    namespace: bytes = b""
    priority: int = 0
    arrived_s: float = 0.0
    """Time at which the caller asked, for statistics of waiting; never in the future."""
    deadline_s: float = 0.0
    """Time at which it ends with reason `timeout`; 0.0: never."""
    draft_ids: bytes = b""
    """Guesses for the beginning of its output that came with the request, as packed ids."""
    prediction_ids: bytes = b""
    """Tokens that the output may resemble, as packed ids."""
    num_prompt_logprobs: int = 0
    """Number of prompt logprobs that an earlier attempt delivered."""
    num_delivered: int = 0
    """Number of output tokens that an earlier attempt delivered, if the output is made again from the start.
    """
    cached_tokens: int = -1
    """Number of prompt tokens found in the cache at its first admission; -1: not admitted yet."""
    tenant: str = ""
    """Name of its tenant; see runtime.ring.tenants."""
    is_again: bool = False
    """True if it was accepted before and is submitted again after a restart."""
    is_paid: bool = False
    """True if its tenant was charged for it before: this engine had it, or the one before."""
    guide: Guide | None = None
    """Structured-output guide, or None."""
    trace: TraceStamps | None = None
    """Trace timestamps from the processes before; None: not sampled."""
    wanted_from: int = NOTHING_WANTED
    """First position of its prompt whose logits are still wanted, so the prompt must be computed from there.
    """
    num_accepted_before: int = 0
    """Number of accepted guesses in earlier stays."""
    num_retractions: int = 0
    computed_len: int = 0
    """Number of tokens that were computed in earlier stays."""
    status: Status = WAITING
    row: int = -1
    num_given: int = 0
    """Number of tokens that it had when it got its row. Computing these is prefill."""
    lease: CacheNode = None
    """Cache node that it has locked. Its path holds exactly the pages of the row that the cache owns."""
    computes: tuple[int, bytes] | None = None
    """Page that other requests may wait for while this row computes it; see KVCacheManager.must_await."""
    awaits: tuple[int, bytes] | None = None
    """Page that it waits for while another row computes it."""
    place: Place = (0, False, 0, 0)
    """Sort key in the waiting queue while it waits; see WaitingQueue."""
    retained: tuple[RetainedPages, ...] = ()
    """Retention of its pages in the cache, by range."""
    processing: RowProcessing | None = None
    """Logits processors that are applied to it, or None."""
    features: tuple[RequestFeature, ...] = ()
    group: RowGroup | None = None
    """Its row group, if it needs several rows."""
    width: int = 1
    """Number of rows that it needs; more than one only with a group."""
    adapter: AdapterRef | None = None
    """LoRA adapter that it uses, or None."""
    slots: tuple[Hashable, ...] = ()
    """Contents of the device slots that it leases while it holds a row."""
    adapter_slot: int = NO_ADAPTER
    """Number of its adapter's slot in the stay that begins."""
    prompt_table: AdapterRef | None = None
    """Prompt table with the vectors of its virtual tokens, or None."""
    first_virtual: int = 0
    """First id that is a virtual token; all ids above it are, too."""
    prompt_slot: int = NO_ADAPTER
    """Number of its prompt table's slot in the stay that begins."""
    account: Account[Request] = None  # type: ignore[assignment]
    """Account of its tenant, set when it is accepted."""
    num_charged: int = 0
    """Number of its tokens that its tenant was charged for."""
    start_tag: int = 0
    """Virtual start time among the requests of all tenants; see FairOrder."""
    prompt_cost: int = 0
    """Cost of the tokens that have to be computed before it has output (FairOrder)."""
    is_held: bool = False
    """True while it waits behind the queue, because its tenant has as many sequences queued and running as
    may run.
    """
    came_s: float = 0.0
    """Time at which it arrived, by ServingTime; set in the turn in which it arrived."""
    waits_from_s: float = 0.0
    """Time at which its waiting would have begun if it had never left the queue. Valid while it is queued."""
    waited_s: float = 0.0
    """Seconds that it has spent in the queue. Valid while it is not queued."""
    shows_hypotheses: bool = False
    """True for a beam search whose client wants to see hypotheses while it runs."""
    goes_first: bool = False
    """True if it waits before new requests, because it was further before a restart."""
    num_made_again: int = 0
    """Number of attempts that this engine had before this one."""
    is_starved: bool = False
    """True once it has waited as long as a request may; it then goes before others."""

    def forget_slots(self) -> None:
        """Forget its device slots, which are given back."""
        self.slots, self.adapter_slot, self.prompt_slot = (), NO_ADAPTER, NO_ADAPTER

    def forget_output(self) -> None:
        """Drop the output of a waiting request, so that only its prompt is left."""
        self.parked = self.parked[: self.num_prompt * TOKEN_BYTES]

    @property
    def content(self) -> bytes:
        """Digest of what it asks for."""
        return content_in(self.suspect)

    @property
    def finished(self) -> bool:
        return self.status is FINISHED

    @property
    def head(self) -> Request:
        """Request that this group member belongs to, or the request itself."""
        return self if self.group is None else self.group.head

    @property
    def held_rows(self) -> tuple[int, ...]:
        """Return the rows that it holds, those of its group included."""
        return (self.row,) if self.group is None else tuple([each.row for each in self.group.members])

    @property
    def urgency(self) -> int:
        """Scheduling rank: its priority, or STARVED once it starves."""
        return STARVED if self.is_starved else self.priority

    @property
    def tokens(self) -> IntArray:
        """Prompt and committed output, [num_tokens] int32, as a view."""
        if self.row < 0:
            return unpack_ids(self.parked)
        return self.rows.tokens[self.row, : self.num_tokens]

    @property
    def num_tokens(self) -> int:
        return len(self.parked) // TOKEN_BYTES if self.row < 0 else self.rows.num_tokens_of[self.row]

    @property
    def num_output(self) -> int:
        return self.num_tokens - self.num_prompt

    @property
    def kv_len(self) -> int:
        return 0 if self.row < 0 else self.rows.kv_len_of[self.row]

    @property
    def num_in_flight(self) -> int:
        return 0 if self.row < 0 else self.rows.in_flight_of[self.row]

    @property
    def num_accepted_drafts(self) -> int:
        """Number of accepted guesses, which is the number of output tokens that took no step of their own."""
        now = 0 if self.row < 0 else self.rows.num_accepted_of[self.row]
        return self.num_accepted_before + now

    @property
    def predicted_len(self) -> int:
        """Number of its tokens once everything in flight is committed."""
        return self.num_tokens + self.num_in_flight

    @property
    def num_logprobs(self) -> int:
        return -1 if self.sampling.logprobs is None else self.sampling.logprobs

    def stops_at(self, token: int, position: int) -> bool:
        """Return True if this token at this absolute position ends the sequence."""
        return token in self.stops.ids and position >= self.min_len

    def cut(self, tokens: list[int]) -> list[int]:
        """Return sampled ids up to the first stop id or the length limit. It is the same list if nothing is
        cut.
        """
        start = self.num_tokens
        if start + len(tokens) > self.max_len:
            tokens = tokens[: self.max_len - start]
        if len(tokens) > 1 and not self.stops.ids.isdisjoint(tokens):
            for i, token in enumerate(tokens[:-1]):
                if self.stops_at(token, start + i):
                    return tokens[: i + 1]
        return tokens

    @property
    def contents(self) -> tuple[AdapterRef, ...]:
        """Return what it needs in device slots: its adapter, then its prompt table."""
        if self.adapter is None and self.prompt_table is None:
            return ()
        return tuple(each for each in (self.adapter, self.prompt_table) if each is not None)

    def num_virtual_of(self, num_tokens: int) -> int:
        """Return how many of its first num_tokens tokens are virtual."""
        return int(np.count_nonzero(self.tokens[:num_tokens] >= self.first_virtual))

    def note_slots(self, numbers: tuple[int, ...]) -> None:
        """Set the slot numbers of its contents, the first ones in `numbers`."""
        own = iter(numbers)
        if self.adapter is not None:
            self.adapter_slot = next(own)
        if self.prompt_table is not None:
            self.prompt_slot = next(own)

    def row_setup(self, row: int) -> RowSetup:
        """Return the settings of one stay that the device keeps for the row. Call it while the tokens are
        still parked.
        """
        setup = RowSetup.of(
            row,
            self.num_prompt,
            self.sampling,
            tokens=self.parked,
            min_len=self.min_len,
            stop_ids=self.stops.ids if self.min_len else (),
            adapter_slot=self.adapter_slot,
            processing=self.processing,
        )
        if self.prompt_table is None:
            return setup
        return msgspec.structs.replace(setup, prompt_slot=self.prompt_slot)


FeatureFactory: TypeAlias = "Callable[[Request], RequestFeature | None]"
"""Function that makes a feature for a new request, or returns None if the request did not ask for it. Raises
RequestError to refuse the request.
"""
