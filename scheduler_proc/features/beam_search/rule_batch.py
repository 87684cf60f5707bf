"""RuleBatch: candidates of all searches with rules in a step, computed in one pass over arrays.

The results equal those of ScoreRules for each beam, to the bit. Where it cannot be proved that the best
candidates are among the likeliest tokens and those that rules raise, ScoreRules examines the whole
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np

from runtime.wire.format import FloatArray, IntArray
from scheduler_proc.core.samples import Sampled
from scheduler_proc.features.beam_search.beam_history import BANNED, COUNT, BeamHistory
from scheduler_proc.features.beam_search.score_rules import (
    LEAST_SCORE,
    BeamTokens,
    NextTokens,
    ScoreRules,
    first_columns,
)


def logits_of(sampled: Sampled) -> FloatArray:
    """Return the logits [vocabulary] that a row was asked to report."""
    (logits,) = sampled.logits
    row: FloatArray = np.frombuffer(logits.frame, np.float32)
    return row


class RuledSearch:
    """Entry of one search in the batch."""

    def __init__(self, rules: ScoreRules, num_best: int, num_top: int, width: int) -> None:
        """num_best: number of candidates wanted for each beam. num_top: number of likeliest
        tokens examined.
        """
        self.rules = rules
        self.num_best = num_best
        self.is_whole = bool(rules.allowed)
        """True if only the ids in `further` may come."""
        self.found: BeamTokens | None = None
        """Answer to the latest question; None before it is computed."""
        self.num_top = num_top
        raised = rules.allowed or [each for each, value in rules.bias if value > 0]
        self.further: IntArray = np.unique(np.array(raised, np.int32))
        """Ids that are examined in addition to the likeliest ones, or alone if is_whole."""
        self._width = width
        self._bias: FloatArray | None = None
        self._prompt: IntArray = np.zeros(0, np.int32)
        self._history: BeamHistory | None = None
        self.results: Sequence[Sampled] = ()
        self._tokens_of: Callable[[int], IntArray] = lambda _: self._prompt

    def begin(self, prompt: IntArray) -> None:
        """Begin a stay with this prompt and no output."""
        self._prompt, self._history, self.found = prompt.copy(), None, None

    def ask(self, results: Sequence[Sampled], tokens_of: Callable[[int], IntArray]) -> None:
        """Ask for the next candidates. results: one for each beam. tokens_of: returns prompt and output of a
        beam.
        """
        self.results, self._tokens_of, self.found = results, tokens_of, None

    def follow(self, beams: Sequence[tuple[int, int]]) -> None:
        """Continue with the next beams, each given as (index of the current beam, token)."""
        assert self._history is not None, "asked first"
        self._history.follow(beams)

    def history(self) -> BeamHistory:
        """Return the history of its beams, made on first use."""
        if self._history is None:
            size = len(logits_of(self.results[0]))
            self._history = BeamHistory(self.rules, self._prompt, self._width, size)
            if self.rules.bias and self._bias is None:
                self._bias = np.zeros(size, np.float32)
                for each, value in self.rules.bias:
                    self._bias[each] += np.float32(value)
        return self._history

    def bias_of(self, ids: IntArray) -> FloatArray | None:
        """Return the bias to add to the logprobs of these ids; None if there is none. Needs `history`."""
        return None if self._bias is None else self._bias[ids]

    def look_at_all(self, beams: Sequence[int]) -> None:
        """Compute the candidates of these beams with ScoreRules, over as many ids as needed."""
        assert self.found is not None
        if beams:
            each = [self.found.of(beam) for beam in range(len(self.results))]
            for beam in beams:
                each[beam] = self._all_of(beam)
            self.found = BeamTokens.joined(each)

    def _all_of(self, beam: int) -> NextTokens:
        sampled = self.results[beam]
        assert sampled.logprobs is not None
        n = self.num_top
        top = sampled.logprobs.top_ids[0, :n], sampled.logprobs.top[0, :n]
        tokens = self._tokens_of(beam)
        return self.rules.best(tokens, len(self._prompt), logits_of(sampled), top, self.num_best)


class RuleBatch:
    """Searches that have asked for candidates in this step."""

    def __init__(self) -> None:
        self._asking: list[RuledSearch] = []

    def ask(
        self, search: RuledSearch, results: Sequence[Sampled], tokens_of: Callable[[int], IntArray]
    ) -> None:
        """Register a question of a search, as in RuledSearch.ask. All questions are answered together on the
        first `answer`.
        """
        search.ask(results, tokens_of)
        self._asking.append(search)

    def answer(self, search: RuledSearch) -> BeamTokens:
        """Return the candidates of a search that has asked."""
        if search.found is None:
            asking, self._asking = self._asking, []
            by_shape: dict[tuple[int, int, int, bool], list[RuledSearch]] = {}
            for each in asking:
                shape = (each.num_best, each.num_top, len(each.further), each.is_whole)
                by_shape.setdefault(shape, []).append(each)
            for those in by_shape.values():
                _score(those)
        assert search.found is not None, "it has not asked"
        return search.found


def _score(searches: Sequence[RuledSearch]) -> None:
    """Compute the answers of searches whose pools have the same size."""
    num_best, is_whole = searches[0].num_best, searches[0].is_whole
    sizes = [len(search.results) for search in searches]
    ids, logprobs, limits = _pools(searches, sizes)
    scores = _scores(searches, sizes, ids, logprobs)
    at = scores.shape[1] - num_best
    least = np.partition(scores, at, axis=1)[:, at] if at > 0 else np.full(len(scores), -np.inf, np.float32)
    kept = scores >= np.maximum(least, np.float32(LEAST_SCORE))[:, None]
    # A token outside the pool has no better score than its logprob, which is not better than the pool's last.
    is_enough = least > limits
    counts = kept.sum(axis=1)
    for beam in (counts > num_best).nonzero()[0].tolist():
        columns = kept[beam].nonzero()[0]
        kept[beam, columns[np.lexsort((ids[beam, columns], -scores[beam, columns]))[num_best:]]] = False
        counts[beam] = num_best
    places = np.flatnonzero(kept)
    parents = places // scores.shape[1]
    ids, scores, logprobs = ids.take(places), scores.take(places), logprobs.take(places)
    ends = [0, *counts.cumsum().tolist()]
    is_all_enough = is_whole or bool(is_enough.all())
    first = 0
    for search, size in zip(searches, sizes, strict=True):
        begin, end = ends[first], ends[first + size]
        search.found = BeamTokens(
            ids[begin:end], parents[begin:end] - first, scores[begin:end], logprobs[begin:end]
        )
        if not is_all_enough:
            own = is_enough[first : first + size]
            search.look_at_all(np.flatnonzero(~own).tolist())
        first += size


def _pools(searches: Sequence[RuledSearch], sizes: Sequence[int]) -> tuple[IntArray, FloatArray, FloatArray]:
    """Return candidate ids [beams, n], their logprobs, and for each beam [beams] the logprob that no other id
    exceeds in score. An id that occurs twice has the logprob -inf once.
    """
    rows = [sampled for search in searches for sampled in search.results]
    likeliest = [row.logprobs for row in rows if row.logprobs is not None]
    n, is_whole = searches[0].num_top, searches[0].is_whole
    ids: IntArray = first_columns([one.top_ids for one in likeliest], n)
    logprobs: FloatArray = first_columns([one.top for one in likeliest], n)
    if not len(searches[0].further):
        return ids, logprobs, logprobs[:, -1]
    logits = [logits_of(row) for row in rows]
    firsts = [row.item(first) for row, first in zip(logits, ids[:, 0].tolist(), strict=True)]
    shifts = np.array(firsts, np.float32) - logprobs[:, 0]
    further_of = [search.further for search, size in zip(searches, sizes, strict=True) for _ in range(size)]
    further = np.concatenate(further_of).reshape(len(rows), -1)
    each = [row.take(those) for row, those in zip(logits, further_of, strict=True)]
    rest = np.concatenate(each).reshape(further.shape) - shifts[:, None]
    # Sorted as one column, because the ids are sorted within each row.
    firsts_of_rows = np.arange(len(rows))[:, None] * len(logits[0])
    column, wanted = (further + firsts_of_rows).reshape(-1), ids + firsts_of_rows
    places = np.minimum(column.searchsorted(wanted), len(column) - 1)
    is_twice = column[places] == wanted
    twice = places[is_twice]
    flat = rest.reshape(-1)
    if is_whole:
        flat[twice] = logprobs[is_twice]
        return further, rest, logprobs[:, -1]
    flat[twice] = -np.inf
    both = np.concatenate((ids, further), axis=1), np.concatenate((logprobs, rest), axis=1)
    return *both, logprobs[:, -1]


def _scores(
    searches: Sequence[RuledSearch], sizes: Sequence[int], ids: IntArray, scores: FloatArray
) -> FloatArray:
    """Return the scores of logprobs [beams, n] under each search's rules, in the order and with the numbers
    of ScoreRules.
    """
    ends = list(accumulate(sizes))
    ids_of = [ids[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    known = np.concatenate([search.history().look(own) for search, own in zip(searches, ids_of, strict=True)])
    biases = [search.bias_of(own) for search, own in zip(searches, ids_of, strict=True)]
    if any(bias is not None for bias in biases):
        n = scores.shape[1]
        no_bias = [np.zeros((size, n), np.float32) for size in sizes]
        scores = scores + np.concatenate(
            [none if bias is None else bias for bias, none in zip(biases, no_bias, strict=True)]
        )
    rules = [search.rules for search in searches]
    if any(each.repetition != 1.0 for each in rules):
        penalty = np.repeat(np.array([each.repetition for each in rules], np.float32), sizes)[:, None]
        penalized = np.where(scores < 0, scores * penalty, scores / penalty)
        scores = np.where(known & ~BANNED, penalized, scores)
    if any(each.presence or each.frequency for each in rules):
        counts = known & COUNT
        presence, frequency = (
            np.repeat(np.array(values), sizes)[:, None]
            for values in ([each.presence for each in rules], [each.frequency for each in rules])
        )
        penalties = (presence + frequency * counts).astype(np.float32)
        scores = np.where(counts, scores - penalties, scores)
    return np.where(known & BANNED, np.float32(-np.inf), scores)
