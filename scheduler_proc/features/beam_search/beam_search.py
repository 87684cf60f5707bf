"""BeamSearch: the beam search of one request. Its rows form a group. The result is sent when the search ends,
and nothing before, unless the client wants to see hypotheses.

The result of a row is its most likely next tokens. The search chooses the next beams from those of all rows,
so its rows are planned only when their tokens are committed. A request that is retracted starts again and
gets the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np

from runtime.wire.format import FloatArray, IntArray, pack_ids
from runtime.wire.handle import next_sibling, split_handle
from runtime.wire.hypotheses import BeamScore, HypothesisSoFar
from runtime.wire.messages import Closed, CloseReason, TokenLogprobs
from scheduler_proc.cache.group_pages import keep_best, most_further_pages
from scheduler_proc.cache.kv_cache_manager import KVCacheManager
from scheduler_proc.core.request import Request, RowGroup
from scheduler_proc.core.samples import Sampled
from scheduler_proc.features.base import Cost, RequestFeature
from scheduler_proc.features.beam_search.hypotheses import Hypotheses, Hypothesis, SearchSettings
from scheduler_proc.features.beam_search.rule_batch import RuleBatch, RuledSearch, logits_of
from scheduler_proc.features.beam_search.score_rules import (
    NO_RULES,
    SLACK,
    BeamTokens,
    NextTokens,
    ScoreRules,
    device_sampling,
)
from scheduler_proc.features.beam_search.search_guide import SearchGuide
from scheduler_proc.features.beam_search.search_processors import SearchProcessors, scores_of


class Said(Protocol):
    """The part of the scheduler's Output that a search uses."""

    def add(self, handle: bytes, tokens: list[int]) -> None: ...
    def add_logprobs(self, logprobs: TokenLogprobs) -> None: ...
    def show(self, hypothesis: HypothesisSoFar) -> None: ...
    def close(self, closed: Closed) -> None: ...


class BeamSearch(RequestFeature):
    def __init__(
        self,
        req: Request,
        search: SearchSettings,
        num_skipped: int,
        kv: KVCacheManager,
        output: Said,
        batch: RuleBatch,
        guide: SearchGuide | None = None,
    ) -> None:
        """Begin a search. num_skipped: output tokens that an earlier attempt has delivered. batch: scores the
        candidates of all searches with rules together. guide: structured-output guide of the hypotheses, or
        None.
        """
        self._req = req
        self._search = search
        self._num_skipped = num_skipped
        self._kv = kv
        self._output = output
        self._hypotheses = Hypotheses(search)
        self._num_results = req.sampling.n
        self._first_rank = split_handle(req.handle)[2]
        self._has_logprobs = req.num_logprobs >= 0
        self._is_over = False
        self._guide = guide
        self._num_wanted = search.num_wanted
        self._processors = None if req.processing is None else SearchProcessors(req)
        is_alone = guide is not None or self._processors is not None
        self._rules = ScoreRules.of(req.sampling) or (NO_RULES if is_alone else None)
        self._batch = batch
        self._ruled: RuledSearch | None = None
        """Its entry in the batch, if it has rules that the batch applies."""
        if self._rules is not None and not is_alone and not self._rules.raises_what_was:
            most = self._num_wanted
            self._ruled = RuledSearch(self._rules, most, most + SLACK, search.width)
        req.sampling = device_sampling(req.sampling, self._num_wanted, self._rules)
        req.min_len = 0
        req.group = RowGroup(req, search.width, self._choose, self._foresee)
        req.group.masked_by = guide
        req.width = search.width
        if self._processors is not None:
            req.group.plan_row = self._processors.plan

    @property
    def num_beams(self) -> int:
        """Number of beams that run, without rows that run only to fill the group."""
        return self._hypotheses.num_beams

    @property
    def awaited(self) -> str:
        return "" if self._guide is None or self._guide.is_current else "guide"

    def ready(self) -> bool:
        return self._guide is None or self._guide.is_known()

    def cost(self) -> Cost:
        req, width = self._req, self._search.width
        return Cost(width, most_further_pages(self._kv, req.num_prompt, req.max_len, width))

    def row_opened(self, row: int) -> None:
        self._hypotheses = Hypotheses(self._search)
        if self._guide is not None:
            self._guide.begin()
        req = self._req
        if self._ruled is not None:
            self._ruled.begin(req.tokens[: req.num_prompt])
        if self._processors is not None:
            self._processors.begin()
        for held in req.held_rows:
            req.rows.plan_when_committed(held, True, self)

    def closing(self, closed: Closed) -> Closed:
        """Send the winning sequences if the search itself has ended, and end its other sequences."""
        winners = self._winners() if self._is_over else ()
        each = [self._closed(number, closed, winners) for number in range(self._num_results)]
        for other in each[1:]:
            self._output.close(other)
        if winners:
            tokens = [link.token for link in winners[0].path.from_the_first()]
            assert self._req.group is not None
            keep_best(self._kv, self._req.group, np.array(tokens, np.int32))
        return each[0]

    def release(self) -> None:
        if self._guide is not None:
            self._guide.close()
        self._req.group = None  # the group points back at the request: leave no cycle for the collector

    def _winners(self) -> Sequence[Hypothesis]:
        return self._ranks(self._hypotheses.ended)

    def _ranks(self, best_first: Sequence[Hypothesis]) -> Sequence[Hypothesis]:
        """Return the hypotheses that become sequences of the request."""
        return best_first[self._first_rank : self._first_rank + self._num_results]

    def _foresee(self, results: list[Sampled]) -> None:
        if self._ruled is not None:
            assert self._req.group is not None
            beams = self._req.group.beams
            self._batch.ask(self._ruled, results[: self.num_beams], lambda beam: beams[beam].tokens)

    def _choose(self, results: list[Sampled]) -> Sequence[tuple[int, int]] | None:
        assert self._req.group is not None
        guide = self._guide
        if guide is not None and not guide.is_known():
            return None
        if self._processors is not None:
            self._processors.check(results[: self.num_beams])
        if guide is not None and (over := [beam for beam in range(self.num_beams) if guide.is_over(beam)]):
            self._hypotheses.end(over)
        beams = self._hypotheses.advance(self._next_tokens(results), len(results), self._tops(results))
        self._is_over = not beams
        if beams and guide is not None:
            guide.follow(beams[: self.num_beams])
        if beams and self._ruled is not None:
            self._ruled.follow(beams[: self.num_beams])
        if beams and self._processors is not None:
            self._processors.follow(beams[: self.num_beams])
        if beams and self._req.shows_hypotheses:
            self._show()
        return beams

    def _show(self) -> None:
        """Send the hypotheses that would win if the search ended now."""
        for number, each in enumerate(self._ranks(self._hypotheses.so_far())):
            tokens = [link.token for link in each.path.from_the_first()]
            self._output.show(HypothesisSoFar(next_sibling(self._req.handle, number), pack_ids(tokens)))

    def _next_tokens(self, results: list[Sampled]) -> BeamTokens:
        """Return the candidates for the next token of each beam, without rows that only fill the group."""
        if self._ruled is not None:
            return self._batch.answer(self._ruled)
        if self._rules is None:
            each = [one.logprobs for one in results[: self.num_beams] if one.logprobs is not None]
            most = self._num_wanted
            return BeamTokens.likeliest([one.top_ids for one in each], [one.top for one in each], most)
        assert self._req.group is not None
        live = zip(self._req.group.beams[: self.num_beams], results, strict=False)
        return BeamTokens.joined(
            [self._one_by_one(number, beam, sampled) for number, (beam, sampled) in enumerate(live)]
        )

    def _tops(self, results: list[Sampled]) -> list[tuple[IntArray, FloatArray]]:
        """Return the most likely ids of each row and their logprobs, if the client wants any."""
        if not self._search.num_top:
            return []
        return [(one.logprobs.top_ids[0], one.logprobs.top[0]) for one in results if one.logprobs]

    def _one_by_one(self, number: int, beam: Request, sampled: Sampled) -> NextTokens:
        assert self._rules is not None
        assert sampled.logprobs is not None, "the row was planned without logprobs"
        most = self._num_wanted
        top_ids, top = sampled.logprobs.top_ids[0], sampled.logprobs.top[0]
        row, num_top = logits_of(sampled), most + SLACK
        allowed = None if self._guide is None else self._guide.allowed(number, len(row))
        likeliest = top_ids[:num_top], top[:num_top]
        processed = None if self._processors is None else scores_of(sampled)
        return self._rules.best(beam.tokens, beam.num_prompt, row, likeliest, most, allowed, processed)

    def _closed(self, number: int, closed: Closed, winners: Sequence[Hypothesis]) -> Closed:
        handle = next_sibling(self._req.handle, number)
        if number >= len(winners):  # if the end came from outside, or the rules left fewer hypotheses
            return msgspec.structs.replace(closed, handle=handle)
        won = winners[number]
        links = won.path.from_the_first()
        tokens = [link.token for link in links]
        new = links[self._num_skipped :]
        if new:
            self._output.add(handle, [link.token for link in new])
            if self._has_logprobs:
                self._output.add_logprobs(
                    TokenLogprobs(
                        handle,
                        np.array([link.logprob for link in new], np.float32).tobytes(),
                        b"".join([link.top[0].tobytes() for link in new]),
                        b"".join([link.top[1].tobytes() for link in new]),
                    )
                )
        reason: CloseReason = "stop" if won.by_stop else "length"
        stop_token = tokens[-1] if tokens[-1] in self._search.stop_ids else -1
        return msgspec.structs.replace(
            closed,
            handle=handle,
            reason=reason,
            stop_token=stop_token,
            beam=BeamScore(won.score, won.logprob),
        )
