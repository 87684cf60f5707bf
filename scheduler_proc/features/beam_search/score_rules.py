"""ScoreRules: penalties, bias, n-gram bans and allowed ids of a beam search, applied to a row of logits.

They work on log-softmax in float32, as transformers' processors do, before the running sum is added. This
module scores one beam, whose tokens it examines from first to last; `rule_batch` scores the beams of many
searches together, to the same bits. Knows no row, no page and no request.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from runtime.sampling.table import PARAMETERS
from runtime.wire.format import BoolArray, FloatArray, IntArray
from runtime.wire.sampling_params import SamplingParams

LEAST_SCORE = float(np.finfo(np.float32).min)
"""Lowest score of an id that may come. Forbidden ids have -inf."""
MAX_FEW = 4096
"""Maximum number of ids that are all examined when a guide allows no others."""
SLACK = 32
"""Number of extra likeliest tokens that are fetched. If penalties lower some, the others suffice, and the
whole vocabulary need not be examined.
"""


class NextTokens(NamedTuple):
    """Candidates for the next token of one beam, the best first."""

    ids: IntArray
    scores: FloatArray
    """Scores to be added to the beam's sum."""
    logprobs: FloatArray
    """Logprobs of the same ids in the model's own distribution."""


class BeamTokens(NamedTuple):
    """Candidates for the next token of all beams of a search, without rows that only fill the group."""

    ids: IntArray
    parents: npt.NDArray[np.intp]
    """Index of the beam of each candidate, ascending."""
    scores: FloatArray
    logprobs: FloatArray

    @staticmethod
    def likeliest(ids: Sequence[IntArray], logprobs: Sequence[FloatArray], most: int) -> BeamTokens:
        """Return the first `most` of the most likely ids [1, n] of each beam, with their logprobs [1, n]."""
        found: IntArray = first_columns(ids, most)
        scores: FloatArray = first_columns(logprobs, most).reshape(-1)
        return BeamTokens(found.reshape(-1), _parents(*found.shape), scores, scores)

    def of(self, beam: int) -> NextTokens:
        """Return the candidates of one beam."""
        own = self.parents == beam
        return NextTokens(self.ids[own], self.scores[own], self.logprobs[own])

    @staticmethod
    def joined(each: Sequence[NextTokens]) -> BeamTokens:
        """Return the candidates of all beams as one."""
        return BeamTokens(
            np.concatenate([one.ids for one in each]),
            np.repeat(np.arange(len(each)), [len(one.ids) for one in each]),
            np.concatenate([one.scores for one in each]),
            np.concatenate([one.logprobs for one in each]),
        )


class ScoreRules(NamedTuple):
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    allowed: tuple[int, ...] = ()
    """Ids that may come. Empty: all."""
    ngram: int = 0
    """Length of the n-grams that must not occur twice in prompt and output; 0: no limit."""

    @staticmethod
    def of(sampling: SamplingParams) -> ScoreRules | None:
        """Return the rules of a request, or None if it has none."""
        rules = ScoreRules(*[getattr(sampling, name) for name in RULE_NAMES])
        return None if rules == NO_RULES else rules

    @property
    def raises_what_was(self) -> bool:
        """True if an id can move up among the best because it occurred before."""
        return self.repetition < 1.0 or self.presence < 0 or self.frequency < 0

    def best(
        self,
        tokens: IntArray,
        num_prompt: int,
        logits: FloatArray,
        top: tuple[IntArray, FloatArray],
        num_best: int,
        by_guide: BoolArray | None = None,
        processed: FloatArray | None = None,
    ) -> NextTokens:
        """Return the best candidates of one beam; fewer than num_best if fewer may come.

        - tokens: prompt and output. logits [vocabulary]: the model's. top: most likely ids and their
          logprobs, most likely first.
        - by_guide [vocabulary]: ids that the guide allows; None: all.
        - processed [vocabulary]: scores that replace the logprobs before the rules; None: none.
        """
        top_ids, top_logprobs = top
        logprobs_of = ModelLogprobs(logits, top_ids, top_logprobs)
        pool: npt.NDArray[np.integer[Any]] = self._pool(top_ids, tokens, num_prompt, len(logits))
        is_whole = bool(self.allowed)
        if by_guide is not None:
            ids = np.flatnonzero(by_guide)
            if len(ids) <= MAX_FEW:
                pool, is_whole = ids, True

        def scores_of(ids: npt.NDArray[np.integer[Any]]) -> FloatArray:
            scores = logprobs_of(ids) if processed is None else processed[ids]
            scores = self._scores(ids, scores, tokens, num_prompt, len(logits))
            if by_guide is not None:
                scores[~by_guide[ids]] = -np.inf
            return scores

        values = scores_of(pool)
        # A token outside the pool has no better score than its logprob, which is not better than the pool's
        # last; but this does not hold for scores that processors have changed.
        limit = top_logprobs[-1] if processed is None else np.inf
        if not is_whole and not _least_of_best(values, num_best) > limit:
            pool = np.arange(len(logits))
            values = scores_of(pool)
            kept = values >= max(_least_of_best(values, num_best), LEAST_SCORE)
            pool, values = pool[kept], values[kept]
        order = np.lexsort((pool, -values))[:num_best]
        order = order[values[order] > -np.inf]
        best_ids: IntArray = pool[order].astype(np.int32)
        return NextTokens(best_ids, values[order], logprobs_of(best_ids))

    def _scores(
        self,
        ids: npt.NDArray[np.integer[Any]],
        scores: FloatArray,
        tokens: IntArray,
        num_prompt: int,
        vocab_size: int,
    ) -> FloatArray:
        """Turn the logprobs of these ascending ids into scores, in place, and return them."""
        if self.bias:
            places, found = _places(ids, np.array([each for each, _ in self.bias], np.intp))
            scores[places] += np.array([value for _, value in self.bias], np.float32)[found]
        if self.repetition != 1.0:
            was_seen = np.zeros(vocab_size, np.bool_)
            was_seen[tokens[tokens < vocab_size]] = True  # virtual tokens are not in the vocabulary
            places = np.flatnonzero(was_seen[ids])
            values, penalty = scores[places], np.float32(self.repetition)
            scores[places] = np.where(values < 0, values * penalty, values / penalty)
        if self.presence or self.frequency:
            said, counts = np.unique(tokens[num_prompt:], return_counts=True)
            places, found = _places(ids, said)
            penalties = self.presence + self.frequency * counts[found]
            scores[places] -= penalties.astype(np.float32)
        if 0 < self.ngram <= len(tokens):
            places, _ = _places(ids, self._repeated(tokens))
            scores[places] = -np.inf
        if self.allowed:
            places, _ = _places(ids, np.array(self.allowed, np.intp))
            kept = scores[places]
            scores.fill(-np.inf)
            scores[places] = kept
        return scores

    def _repeated(self, tokens: IntArray) -> IntArray:
        """Return the ids that would complete an n-gram for a second time."""
        size, last = self.ngram, tokens[self.ngram - 1 :]
        is_same = np.ones(len(last), np.bool_)
        for at in range(size - 1):
            is_same &= tokens[at : at + len(last)] == tokens[len(tokens) - size + 1 + at]
        return last[is_same]

    def _pool(
        self, top_ids: IntArray, tokens: IntArray, num_prompt: int, vocab_size: int
    ) -> npt.NDArray[np.intp]:
        """Return the ids that may be the best: the likeliest, and those that the rules raise."""
        if self.allowed:
            return np.unique(np.array(self.allowed, np.intp))
        parts: list[npt.NDArray[Any]] = [top_ids]
        if self.bias:
            parts.append(np.array([each for each, value in self.bias if value > 0], np.intp))
        if self.repetition < 1.0:
            parts.append(tokens[tokens < vocab_size])
        elif self.presence < 0 or self.frequency < 0:
            parts.append(tokens[num_prompt:])
        return np.unique(np.concatenate(parts)) if len(parts) > 1 else np.sort(top_ids)


class ModelLogprobs(NamedTuple):
    """Logprobs of any ids in the model's distribution, computed from its logits. Those of the likeliest ids
    are given.
    """

    logits: FloatArray
    top_ids: IntArray
    top_logprobs: FloatArray

    def __call__(self, ids: npt.NDArray[np.integer[Any]]) -> FloatArray:
        """Return the logprobs of these ids."""
        found: FloatArray = self.logits[ids] - np.float32(self.logits[self.top_ids[0]] - self.top_logprobs[0])
        by_id = np.argsort(self.top_ids)
        at = np.searchsorted(self.top_ids, ids, sorter=by_id)
        places = by_id[np.minimum(at, len(by_id) - 1)]
        is_top = self.top_ids[places] == ids
        found[is_top] = self.top_logprobs[places[is_top]]
        return found


def first_columns(each: Sequence[npt.NDArray[Any]], n: int) -> npt.NDArray[Any]:
    """Stack arrays of one row below each other, each cut to its first n columns."""
    if len({one.size for one in each}) > 1:  # results of several steps
        each = [one[:, :n] for one in each]
    return np.concatenate(each)[:, :n]


@cache
def _parents(num_beams: int, num_each: int) -> npt.NDArray[np.intp]:
    return np.arange(num_beams).repeat(num_each)


def _places(
    ids: npt.NDArray[np.integer[Any]], wanted: npt.NDArray[np.integer[Any]]
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
    """Return the indices in the ascending `ids` of those wanted ids that occur, and a mask of which occur."""
    places = np.searchsorted(ids, wanted)
    found = places < len(ids)
    found[found] = ids[places[found]] == wanted[found]
    return places[found], found


def _least_of_best(values: FloatArray, num_best: int) -> float:
    """Return the num_best-th best value; -inf if there are not so many."""
    if len(values) <= num_best:
        return -np.inf
    least: float = np.partition(values, -num_best)[-num_best].item()
    return least


NO_RULES = ScoreRules()
RULE_NAMES = (
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "allowed_token_ids", "no_repeat_ngram_size"),
)
"""Names of the sampling parameters that rules come from, in the order of ScoreRules' fields."""


def device_sampling(sampling: SamplingParams, num_wanted: int, rules: ScoreRules | None) -> SamplingParams:
    """Return the sampling parameters that the device gets for a search that wants num_wanted candidates: to
    report them, since its sampled token is ignored.
    """
    neutral = {p.name: p.neutral for p in PARAMETERS if p.example is not None}
    changes: dict[str, Any] = {"temperature": 0.0, "seed": sampling.seed, "logprobs": num_wanted}
    if rules is not None:
        changes |= {"logprobs": num_wanted + SLACK, "return_generation_logits": True}
    return msgspec.structs.replace(sampling, **(neutral | changes))
