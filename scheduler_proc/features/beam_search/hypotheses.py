"""Hypotheses: the beams of one search and those that have ended, by the rules of transformers' `generate`.

    candidate    a running beam and one more token; its sum is the beam's and the token's score, in float32
    candidates   the best max(2, 1 + number of stop ids) * width of all beams, ties to the lower beam, then id
    ended        a candidate with a stop id, one that completes a stop word or a stop string, or one with the
                 last token there is room for; only the first `width` candidates may end. Its score is
                 sum / length ** length_penalty, the stop id counted
    complete     a running beam behind which a guide lets nothing come, not even a stop id; it has ended, too
    goes on      the first `width` candidates that have not ended

Knows no row, no page and no request.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from runtime.wire.format import FloatArray, IntArray
from scheduler_proc.features.beam_search.score_rules import BeamTokens
from scheduler_proc.features.beam_search.stop_texts import HypothesisText


class EarlyStopping(IntEnum):
    """Rule for when a search ends once `width` hypotheses have ended."""

    HEURISTIC = 0
    """End when the best running beam, scored at its current length, is no better than the worst ended
    hypothesis.
    """
    AT_ONCE = 1
    NEVER = 2
    """End when no running beam can reach a better score than the worst ended hypothesis."""


class SearchSettings(NamedTuple):
    width: int
    stop_ids: Collection[int]
    max_output: int
    """Maximum number of tokens of a hypothesis."""
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC
    num_top: int = 0
    """Number of most likely ids whose logprobs are kept with each token."""
    min_output: int = 0
    """Number of tokens before which stop ids are forbidden, and stop words and strings end nothing."""
    is_guided: bool = False
    """True if a guide says when stop ids may come, even before min_output tokens."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Banned sequences of ids: the last id of each must not follow the others."""
    prompt_end: tuple[int, ...] = ()
    """Last ids of the prompt, as many as the longest bad word needs."""

    diversity: float = 0.0
    """Added to a candidate's sum once for each beam before its own, when candidates are compared."""
    widths: tuple[int, ...] = ()
    """Number of beams after each token; the last entry holds for all further tokens. Empty: always `width`.
    """

    stop_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of ids that end a hypothesis."""
    text: HypothesisText | None = None
    """Text state of an empty output; None if there are no stop strings."""

    def width_at(self, num_tokens: int) -> int:
        """Return how many beams continue from beams of num_tokens tokens."""
        return self.widths[min(num_tokens, len(self.widths) - 1)] if self.widths else self.width

    def num_candidates(self, width: int) -> int:
        """Return how many candidates are examined when `width` beams continue."""
        return max(2, 1 + len(self.stop_ids) + len(self.stop_words)) * width

    @property
    def num_wanted(self) -> int:
        """Number of most likely next tokens of each beam that must be known, as some of them may be
        forbidden.
        """
        num_stop_ids = len(self.stop_ids) if self.min_output else 0
        return self.num_candidates(self.width) + num_stop_ids + len(self.bad_words)


class Path(NamedTuple):
    """Linked list of a hypothesis' tokens, from the last one back."""

    token: int
    logprob: float
    before: Path | None
    top: tuple[IntArray, FloatArray]
    """The num_top most likely ids at the token's position and their logprobs."""
    text: HypothesisText | None = None
    """Text state up to here, if there are stop strings."""

    def from_the_first(self) -> list[Path]:
        links = [self]
        while (before := links[-1].before) is not None:
            links.append(before)
        return links[::-1]


class Hypothesis(NamedTuple):
    """A sequence of a beam search that has ended."""

    score: float
    logprob: float
    """Sum of its tokens' logprobs in the model's own distribution."""
    path: Path
    by_stop: bool
    """True if it ended by a stop id, stop word or stop string, or because its guide was complete."""


class Continuation(NamedTuple):
    """A beam of the next step: the beam that it continues, and its token."""

    parent: int
    token: int


NO_TOP: tuple[IntArray, FloatArray] = (np.zeros(0, np.int32), np.zeros(0, np.float32))


class _Candidates(NamedTuple):
    """Candidates: arrays with one entry for each pair of a beam and a next token."""

    ids: IntArray
    parents: npt.NDArray[np.intp]
    logprobs: FloatArray
    sums: FloatArray
    own_sums: FloatArray


class Hypotheses:
    """Running beams of one search, numbered from the best to the worst, and its ended hypotheses."""

    def __init__(self, settings: SearchSettings) -> None:
        self._settings = settings
        self._stop_ids = frozenset(settings.stop_ids)
        self._looks_back = bool(settings.stop_words) or settings.text is not None
        """True if stop words or stop strings may end a hypothesis."""
        self._ends_of_words: dict[tuple[int, ...], frozenset[int]] = {}
        """Last ids of the bad words, by the ids before them."""
        for *before, last in settings.bad_words:
            those = self._ends_of_words.setdefault(tuple(before), frozenset())
            self._ends_of_words[tuple(before)] = those | {last}
        self._word_sizes = sorted({0, *map(len, self._ends_of_words)})
        """Numbers of ids before the last one in bad words."""
        self._sums: FloatArray = np.zeros(1, np.float32)
        self._own_sums = self._sums
        """Sums of the model's own logprobs, before rules."""
        self._paths: list[Path | None] = [None]
        self.ended: list[Hypothesis] = []
        """Ended hypotheses, the best first, at most `width` of them."""
        self.num_beams = 1
        """Number of beams that run, without rows that only fill the group."""
        self.num_tokens = 0
        """Number of output tokens of each running beam."""

    def advance(
        self, next_tokens: BeamTokens, num_rows: int, tops: Sequence[tuple[IntArray, FloatArray]] = ()
    ) -> list[Continuation]:
        """Advance the search by one token. Returns the beams that continue, at least num_rows of them; an
        empty list when the search has ended.

        next_tokens: candidates of each beam, `num_wanted` of them or all that may come. num_rows: number of
        rows, including those that only fill the group. tops: most likely ids and logprobs of each beam, if
        they are kept.
        """
        settings, width = self._settings, self._settings.width_at(self.num_tokens)
        num_candidates, forbidden = settings.num_candidates(width), self._forbidden()
        # With forbidden tokens, it is not known how many of the best candidates are forbidden.
        found = self._candidates(next_tokens, None if forbidden else num_candidates)
        ids, parents, logprobs = found.ids.tolist(), found.parents.tolist(), found.logprobs.tolist()
        before, num_top, stop_ids = self._paths, settings.num_top, self._stop_ids
        self.num_tokens += 1
        is_last = self.num_tokens >= settings.max_output
        ended: list[Hypothesis] = []
        running: list[int] = []
        texts: dict[int, HypothesisText | None] = {}

        def path_of(place: int) -> Path:
            parent = parents[place]
            top = self._top(tops[parent]) if num_top else NO_TOP
            return Path(ids[place], logprobs[place], before[parent], top, texts.get(place))

        rank = -1
        for place, token in enumerate(ids):
            if forbidden and token in forbidden[parents[place]]:
                continue
            rank += 1
            if rank >= width and (rank >= num_candidates or is_last or len(running) == width):
                break  # it can neither end nor go on
            by_stop = token in stop_ids  # the token stands for no text
            if self._looks_back and not by_stop:
                by_stop, texts[place] = self._look_at(parents[place], token)
            if not by_stop and not is_last:
                running.append(place)
            elif rank < width:
                texts.pop(place, None)
                score = self._score(found.sums[place])
                ended.append(Hypothesis(score, found.own_sums.item(place), path_of(place), by_stop))
        if ended:
            self._take_ended(ended)
        if is_last or not running:
            return []
        num_beams = self.num_beams = len(running)
        are_first = running[-1] == num_beams - 1
        # If there are fewer beams than rows, the other rows go on without a purpose: they have their pages
        # already.
        running += running[:1] * (num_rows - num_beams)
        self._paths = [path_of(place) for place in running]
        if are_first and len(running) == num_beams:  # nearly always
            self._sums, self._own_sums = found.sums[:num_beams], found.own_sums[:num_beams]
        else:
            self._sums, self._own_sums = found.sums[running], found.own_sums[running]
            self._sums[num_beams:] = -np.inf
        if not self._may_improve():
            return []
        return [Continuation(parents[place], ids[place]) for place in running]

    def end(self, beams: Sequence[int]) -> None:
        """End some beams as they are, because their guide lets nothing follow. Call it before `advance`, to
        which they pass no next token.
        """
        ended = [
            Hypothesis(self._score(self._sums[beam]), self._own_sums.item(beam), path, True)
            for beam in beams
            if (path := self._paths[beam]) is not None
        ]
        self._take_ended(ended)

    def so_far(self) -> list[Hypothesis]:
        """Return the result that the search would have if its beams ended now, best first."""
        running = [
            Hypothesis(self._score(self._sums[beam]), self._own_sums.item(beam), path, False)
            for beam, path in enumerate(self._paths[: self.num_beams])
            if path is not None
        ]
        return self._best_of([*self.ended, *running])

    def _best_of(self, ended: Sequence[Hypothesis]) -> list[Hypothesis]:
        return sorted(ended, key=lambda each: -each.score)[: self._settings.width]

    def _candidates(self, next_tokens: BeamTokens, most: int | None) -> _Candidates:
        """Return the best `most` candidates, or all, in order. Ties go to the lower beam, then to the lower
        id.
        """
        ids, parents, scores, logprobs = next_tokens
        sums = scores + self._sums[parents]
        compared = sums
        if self._settings.diversity:
            compared = sums + np.float32(self._settings.diversity) * parents
        order = np.lexsort((ids, parents, -compared))[:most]
        parents, logprobs = parents[order], logprobs[order]
        return _Candidates(ids[order], parents, logprobs, sums[order], logprobs + self._own_sums[parents])

    def _look_at(self, beam: int, token: int) -> tuple[bool, HypothesisText | None]:
        """Return True if this token ends the beam's output by a stop word or string, and else its new text
        state. `num_tokens` counts the token already.
        """
        settings = self._settings
        if settings.stop_words and self._completes_word(beam, token):
            return True, None
        path = self._paths[beam]
        text = settings.text if path is None else path.text
        if text is None:
            return False, None
        return text.after(token, may_match=self.num_tokens > settings.min_output)

    def _completes_word(self, beam: int, token: int) -> bool:
        """Return True if the beam's output ends with a stop word after this token. `num_tokens` counts it
        already.
        """
        settings, path = self._settings, self._paths[beam]
        if self.num_tokens <= settings.min_output:
            return False
        for *before, last in settings.stop_words:
            if token == last and len(before) < self.num_tokens:
                newest = _newest(path, len(before))
                if newest == tuple(before):
                    return True
        return False

    def _score(self, total: np.float32) -> float:
        """Return the score of a hypothesis of `num_tokens` tokens with this sum."""
        return float(total / np.float32(float(self.num_tokens) ** self._settings.length_penalty))

    def _top(self, likeliest: tuple[IntArray, FloatArray]) -> tuple[IntArray, FloatArray]:
        """Return the part of a beam's most likely ids and logprobs that is kept."""
        num_top = self._settings.num_top
        top_ids, top = likeliest
        return top_ids[:num_top].copy(), top[:num_top].copy()

    def _forbidden(self) -> list[Collection[int]]:
        """Return the ids that must not come next, by beam; an empty list if no beam forbids any."""
        settings, ends = self._settings, self._ends_of_words
        is_young = self.num_tokens < settings.min_output and not settings.is_guided
        if not is_young and not ends:
            return []
        always = self._stop_ids if is_young else frozenset[int]()
        found: list[Collection[int]] = []
        for path in self._paths[: self.num_beams]:
            end, forbidden = self._end_of(path, self._word_sizes[-1]), always
            for size in self._word_sizes:
                if size <= len(end) and (lasts := ends.get(end[len(end) - size :])):
                    forbidden = forbidden | lasts
            found.append(forbidden)
        return found

    def _end_of(self, path: Path | None, length: int) -> tuple[int, ...]:
        """Return the last `length` ids of prompt and beam."""
        newest = _newest(path, length)
        rest = length - len(newest)
        return (*(self._settings.prompt_end[-rest:] if rest else ()), *newest)

    def _take_ended(self, new: list[Hypothesis]) -> None:
        """Merge new hypotheses into `ended`, which keeps the best. Among equals the earlier one
        comes first.
        """
        is_full = len(self.ended) == self._settings.width
        if new and not (is_full and self._settings.early_stopping is EarlyStopping.AT_ONCE):
            self.ended = self._best_of([*self.ended, *new])

    def _may_improve(self) -> bool:
        """Return True if a running beam may still beat the worst ended hypothesis."""
        settings = self._settings
        if len(self.ended) < settings.width:
            return True
        if settings.early_stopping is EarlyStopping.AT_ONCE:
            return False
        length = self.num_tokens
        if settings.early_stopping is EarlyStopping.NEVER and settings.length_penalty > 0.0:
            length = settings.max_output
        best = self._sums.max() / np.float32(float(length) ** settings.length_penalty)
        return bool(best > self.ended[-1].score)


def _newest(path: Path | None, length: int) -> tuple[int, ...]:
    """Return the last `length` ids of an output, or all if there are fewer."""
    newest: list[int] = []
    while path is not None and len(newest) < length:
        newest.append(path.token)
        path = path.before
    return tuple(newest[::-1])
