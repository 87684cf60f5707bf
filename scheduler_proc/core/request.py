"""Request: the scheduler's one record of a sequence; nobody else holds its life cycle.

Knows its limits, its stop ids and where its tokens are (its row's columns, or `parked`); knows no pages and
no loop.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import numpy as np

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
"""Function that gives (number of a beam, token) for each beam of the next step; nothing when all has ended,
None when that is not known yet.
"""
NOTHING_WANTED = 1 << 31
"""Position that no prompt has."""
STARVED = 1 << 20
"""Urgency above all priorities."""


class Status(IntEnum):
    """Place of a sequence in its life; everything from FINISHED on is over."""

    WAITING = 1
    RUNNING = 2
    FINISHED = 3


class StopIds:
    """Ids that end a sequence, as a set for single tokens and as a column for many rows at once."""

    __slots__ = ("column", "fit_the_column", "ids", "num_columns")

    def __init__(self, ids: frozenset[int]) -> None:
        self.ids = ids
        self.fit_the_column = len(ids) <= MAX_STOP_IDS
        self.column: IntArray = np.full(MAX_STOP_IDS, -1, np.int32)
        self.num_columns = len(ids) if self.fit_the_column else 0
        self.column[: self.num_columns] = sorted(ids)[: self.num_columns]


class RowGroup:
    """Rows of one request, which go on together: they are promised, seated, taken back and ended as one. Each
    is held by a member; the first is the request itself, the others are made for one stay.
    """

    def __init__(
        self, head: Request, width: int, choose: Choose, foresee: Callable[[list[Sampled]], None]
    ) -> None:
        """`choose`: asked when the results of all rows that run are here, in the order of the beams; asked
        again as long as it does not know. `foresee`: told of these results before the first group of the
        step is asked, so that what it takes to choose can be made for all groups at once.
        """
        self.head = head
        self.width = width
        self.choose = choose
        self.foresee = foresee
        self.plan_row: Callable[[ScheduledRow[Request]], None] | None = None
        """Function that is told of each row that is about to sample; None: nobody is."""
        self.members = [head]
        self.beams: list[Request] = []
        """The members whose rows run, the best first."""
        self._results: dict[int, Sampled] = {}

    def start(self, members: list[Request]) -> None:
        """Begin a stay: the request's own row runs, the others are still to get something to go on with."""
        self.members = [self.head, *members]
        self.beams = [self.head]

    def end(self) -> list[Request]:
        """End a stay. Returns the other members, which are no more."""
        others = self.members[1:]
        self.members, self.beams = [self.head], []
        self._results.clear()
        return others

    def take(self, member: Request, sampled: Sampled) -> None:
        """Keep a row's result until those of all are here."""
        self._results[member.row] = sampled

    def has_all(self) -> bool:
        """Tell whether the results of all rows that run are here."""
        return bool(self.beams) and len(self._results) == len(self.beams)

    def announce(self) -> None:
        """Say that `next_beams` will be asked."""
        self.foresee(self._of_beams())

    def next_beams(self) -> Sequence[tuple[int, int]] | None:
        """Return what goes on from the results of all, as `choose` does. They are kept while it is not
        known.
        """
        beams = self.choose(self._of_beams())
        if beams is not None:
            self._results.clear()
        return beams

    def _of_beams(self) -> list[Sampled]:
        return [self._results[beam.row] for beam in self.beams]


@dataclass(eq=False, slots=True)
class Request:
    """Record of one sequence. While it holds a row, its lengths and tokens are columns of `rows`; the
    properties below read them there.
    """

    handle: bytes
    key: bytes
    """Key that all attempts of the sequence have in common."""
    seq: int
    """Number of the sequence, in the order of arrival."""
    rows: RowColumns
    sampling: SamplingParams
    stops: StopIds
    num_prompt: int
    max_len: int
    """Number of tokens, prompt and output, at which the sequence ends."""
    min_len: int
    """Position below which no stop id stops the sequence (and the device samples none)."""
    parked: bytes
    """Prompt and committed output, packed, while it holds no row; empty while it does."""
    namespace: bytes = b""
    priority: int = 0
    arrived_s: float = 0.0
    """Moment at which the caller asked, for the statistics of waiting; never in the future."""
    deadline_s: float = 0.0
    """Moment at which it ends with reason `timeout`; 0.0: never."""
    draft_ids: bytes = b""
    """Guesses at the beginning of its output that came with it, as packed ids."""
    prediction_ids: bytes = b""
    """Tokens that its output may resemble, as packed ids."""
    num_prompt_logprobs: int = 0
    """Number of its prompt's logprobs that an earlier attempt delivered."""
    num_delivered: int = 0
    """Number of its output's tokens that an earlier attempt delivered, where it is made again whole."""
    cached_tokens: int = -1
    """Number of prompt tokens found in the cache when it was first admitted; -1: not admitted yet."""
    tenant: str = ""
    """Name of the tenant whose it is: see runtime.ring.tenants."""
    is_again: bool = False
    """True if it was let in before and is made again after a restart."""
    guide: Guide | None = None
    """Form that its output must have."""
    trace: TraceStamps | None = None
    """Stamps of it on the way here; None: it is not sampled."""
    wanted_from: int = NOTHING_WANTED
    """The first position of its prompt whose logits are still to be looked at: it has to be computed."""
    num_accepted_before: int = 0
    """Guesses that were right in stays that it has lost."""
    num_retractions: int = 0
    computed_len: int = 0
    """Number of tokens that were computed in stays that it has lost."""
    status: Status = Status.WAITING
    row: int = -1
    num_given: int = 0
    """Number of tokens that it came to its row with: to compute these is prefill."""
    lease: CacheNode = None
    """The cache node that it has locked: as deep as the pages of its row that the cache owns."""
    computes: tuple[int, bytes] | None = None
    """Page that others may wait for while this row computes it: see KVCacheManager.must_await."""
    awaits: tuple[int, bytes] | None = None
    """Page that it waits for while another row computes it."""
    place: Place = (0, False, 0, 0)
    """Place in the waiting queue, while it waits: see WaitingQueue."""
    retained: tuple[RetainedPages, ...] = ()
    """Wishes of how firmly the cache is to keep its pages."""
    processing: RowProcessing | None = None
    """Logits processors that its tokens are drawn with."""
    features: tuple[RequestFeature, ...] = ()
    group: RowGroup | None = None
    """Group of its rows, if it holds several."""
    width: int = 1
    """Number of rows that it takes: more than one where it has a group."""
    adapter: AdapterRef | None = None
    """LoRA adapter that its tokens are computed with."""
    slots: tuple[Hashable, ...] = ()
    """Contents of slots of the device that it leases while it holds a row."""
    adapter_slot: int = NO_ADAPTER
    """Number of its adapter's slot in the stay that begins."""
    prompt_table: AdapterRef | None = None
    """Table of the vectors of the virtual tokens among its ids."""
    first_virtual: int = 0
    """First id that is a virtual token; so are all above it."""
    prompt_slot: int = NO_ADAPTER
    """Number of its prompt table's slot in the stay that begins."""
    account: Account[Request] = None  # type: ignore[assignment]
    """Account of its tenant, from when it is taken in."""
    num_charged: int = 0
    """Number of its tokens that its tenant's account has counted."""
    start_tag: int = 0
    """Turn of it among the requests of other tenants: see FairOrder."""
    is_held: bool = False
    """True while it waits behind the queue, as its tenant has as many in it and in rows as may run."""
    came_s: float = 0.0
    """Moment at which it came, by ServingTime: known from the turn on in which it did."""
    waits_from_s: float = 0.0
    """Moment at which its waiting would have begun if it had never left the queue; meant while it is there.
    """
    waited_s: float = 0.0
    """Seconds that it was in the queue; meant while it is not there."""
    shows_hypotheses: bool = False
    """True for a beam search whose client looks on."""
    is_starved: bool = False
    """True once it has waited for as long as may be: from then on it goes before others."""

    def forget_slots(self) -> None:
        """Forget its slots of the device, which are given back."""
        self.slots, self.adapter_slot, self.prompt_slot = (), NO_ADAPTER, NO_ADAPTER

    def forget_output(self) -> None:
        """Forget the output of a request that waits for its next row: it keeps the prompt alone."""
        self.parked = self.parked[: self.num_prompt * TOKEN_BYTES]

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def head(self) -> Request:
        """Request of a group whose member this is; else itself."""
        return self if self.group is None else self.group.head

    @property
    def held_rows(self) -> tuple[int, ...]:
        """Return the rows that it holds, if it holds any, with those of its group."""
        return (self.row,) if self.group is None else tuple([each.row for each in self.group.members])

    @property
    def urgency(self) -> int:
        """Rank that it is scheduled by: its priority, until it starves; then more than any."""
        return STARVED if self.is_starved else self.priority

    @property
    def tokens(self) -> IntArray:
        """Return [num_tokens] int32, a view: prompt and committed output."""
        if self.row < 0:
            return unpack_ids(self.parked)
        return self.rows.tokens[self.row, : self.num_tokens]

    @property
    def num_tokens(self) -> int:
        return len(self.parked) // TOKEN_BYTES if self.row < 0 else self.rows.num_tokens.item(self.row)

    @property
    def num_output(self) -> int:
        return self.num_tokens - self.num_prompt

    @property
    def kv_len(self) -> int:
        return 0 if self.row < 0 else self.rows.kv_len.item(self.row)

    @property
    def num_in_flight(self) -> int:
        return 0 if self.row < 0 else self.rows.in_flight.item(self.row)

    @property
    def num_accepted_drafts(self) -> int:
        """Guesses that were right: as many tokens of its output took no step of their own."""
        now = 0 if self.row < 0 else self.rows.num_accepted.item(self.row)
        return self.num_accepted_before + now

    @property
    def predicted_len(self) -> int:
        """Number of its tokens once everything in flight is committed."""
        return self.num_tokens + self.num_in_flight

    @property
    def num_logprobs(self) -> int:
        return -1 if self.sampling.logprobs is None else self.sampling.logprobs

    def stops_at(self, token: int, position: int) -> bool:
        """Tell whether this token, at this absolute position, ends the sequence."""
        return token in self.stops.ids and position >= self.min_len

    def cut(self, tokens: list[int]) -> list[int]:
        """Return sampled ids without those past a stop id or the length limit; the same list when there are
        none.
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
        """Return what it needs on the device: adapter, then prompt table."""
        if self.adapter is None and self.prompt_table is None:
            return ()
        return tuple(each for each in (self.adapter, self.prompt_table) if each is not None)

    def num_virtual_of(self, num_tokens: int) -> int:
        """Return how many of its first tokens are virtual."""
        return int(np.count_nonzero(self.tokens[:num_tokens] >= self.first_virtual))

    def note_slots(self, numbers: tuple[int, ...]) -> None:
        """Take the numbers of the slots of its contents, which come first."""
        own = iter(numbers)
        if self.adapter is not None:
            self.adapter_slot = next(own)
        if self.prompt_table is not None:
            self.prompt_slot = next(own)

    def row_setup(self, row: int) -> RowSetup:
        """Return what the device keeps for one stay. Called while the tokens are still parked."""
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
"""Function that makes a feature for a new request, or None when it did not ask for it. Raises RequestError to
refuse the request.
"""
