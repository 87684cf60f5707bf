"""BeamHistory: token counts, n-grams and bans of each beam of a search, updated from step to step.

Each beam has a lane: a row of a table with one int32 for each id of the vocabulary, and the tokens of its
output. A fork takes over the lane of a hypothesis that no beam continues, and changes only what differs
between the two. So the cost of a step does not grow with prompt and output.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from runtime.wire.format import IntArray
from scheduler_proc.features.beam_search.score_rules import ScoreRules

IN_PROMPT = 1 << 30
"""Flag of an id that occurs in the prompt."""
BANNED = 1 << 29
"""Flag of an id that must not come next."""
COUNT = BANNED - 1
"""Mask of the bits that count how often an id occurs in the output."""


class BeamHistory:
    """History of the beams of one stay, which starts with a prompt and no output."""

    def __init__(self, rules: ScoreRules, prompt: IntArray, width: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._num_before = rules.ngram - 1
        """Number of tokens that decide, together with the next one, whether an n-gram repeats."""
        self._bans_all = rules.ngram == 1
        self.table: IntArray = np.zeros((width, vocab_size), np.int32)
        words = prompt[prompt < vocab_size]  # virtual tokens are not in the vocabulary
        self.table[:, words] = IN_PROMPT
        self._flat = self.table.reshape(-1)
        self._cells = self._flat.data
        self._in_prompt: dict[tuple[int, ...], list[int]] = {}
        """Last tokens of the prompt's n-grams, by the tokens before them."""
        self._in_output: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}
        """Output n-grams by their tokens except the last: (position of the last token in its lane, its
        number, the token).
        """
        tail: list[int] = []
        if self._num_before > 0:
            ids: list[int] = prompt.tolist()
            tail = ids[-self._num_before :]
            for gram in zip(*[ids[at:] for at in range(rules.ngram)], strict=False):
                if gram[-1] < vocab_size:
                    self._in_prompt.setdefault(gram[:-1], []).append(gram[-1])
        self._tokens = [list(tail) for _ in range(width)]
        """End of the prompt, and the output, by lane."""
        self._numbers = [[-1] * len(tail) for _ in range(width)]
        """Number of each of those tokens. Beams share a number where they share the token."""
        self._next_number = 0
        self._lanes = [0]
        """Lane of each beam."""
        self._firsts: npt.NDArray[np.intp] = np.zeros((1, 1), np.intp)
        """Index of the first table cell of each beam's lane."""

    @property
    def num_beams(self) -> int:
        return len(self._lanes)

    def follow(self, beams: Sequence[tuple[int, int]]) -> None:
        """Continue with the next beams, each given as (index of the current beam, token)."""
        before = self._lanes
        kept = {before[parent] for parent, _ in beams}
        free = [lane for lane in range(len(self._tokens)) if lane not in kept]
        after: list[int] = []
        for parent, _ in beams:
            lane = before[parent]
            if lane in kept:
                kept.remove(lane)
            else:
                source, lane = lane, free.pop()
                self._fork(source, lane)
            after.append(lane)
        cells, size, n, number = self._cells, self._vocab_size, self._num_before, self._next_number
        in_output = self._in_output
        for lane, (_, token) in zip(after, beams, strict=True):
            cells[lane * size + token] += 1
            tokens = self._tokens[lane]
            if n > 0 and len(tokens) >= n:
                end, entry = tuple(tokens[-n:]), (len(tokens), number, token)
                if end in in_output:
                    in_output[end].append(entry)
                else:
                    in_output[end] = [entry]
            tokens.append(token)
            self._numbers[lane].append(number)
            number += 1
        self._next_number = number
        if after != before:
            self._firsts = np.array(after, np.intp)[:, None] * self._vocab_size
        self._lanes = after

    def look(self, ids: IntArray) -> IntArray:
        """Return the flags and counts of ids [beams, n] in the lane of each beam, int32 with the
        bits above.
        """
        cells = self._cells
        banned = self._that_repeat() if self._num_before > 0 else ()
        for cell in banned:
            cells[cell] |= BANNED
        found: IntArray = self._flat.take(ids + self._firsts)
        for cell in banned:
            cells[cell] &= ~BANNED
        if self._bans_all:
            found[found != 0] |= BANNED
        return found

    def _that_repeat(self) -> list[int]:
        """Return the table cells of the ids that would complete an n-gram for a second time."""
        found: list[int] = []
        for lane in self._lanes:
            end, first = tuple(self._tokens[lane][-self._num_before :]), lane * self._vocab_size
            if end in self._in_prompt:
                found += [first + token for token in self._in_prompt[end]]
            if end in self._in_output:
                numbers = self._numbers[lane]
                followers = self._in_output[end]
                found += [first + token for at, number, token in followers if numbers[at] == number]
        return found

    def _fork(self, source: int, lane: int) -> None:
        tokens, numbers = self._tokens[source], self._numbers[source]
        old_tokens, old_numbers = self._tokens[lane], self._numbers[lane]
        same = min(len(numbers), len(old_numbers))
        while same and numbers[same - 1] != old_numbers[same - 1]:
            same -= 1
        cells, first = self._cells, lane * self._vocab_size
        for token in old_tokens[same:]:
            cells[first + token] -= 1
        for token in tokens[same:]:
            cells[first + token] += 1
        old_tokens[same:] = tokens[same:]
        old_numbers[same:] = numbers[same:]
