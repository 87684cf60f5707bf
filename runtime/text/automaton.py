"""Automaton: finds any of several patterns in a sequence of symbols that comes one by one.

Aho-Corasick. A state stands for the longest end of the input so far that begins a pattern; its link leads to
the state of the longest shorter one. Patterns are texts with characters as symbols, or arrays of token ids.

    patterns  a b c        state       0   1   2   3   4   5
              b c          depth       0   1   2   3   1   2        0 is the state of no beginning
                           leads to        a   b   c   b   c
                           link        0   0   4   5   0   0

A caller chooses the patterns, so they may be the worst there are. A state is a few bytes in four arrays, and
its link is found when an output first comes to it: a request that opens pays for its number of patterns, not
for their length. Finding links and following them together costs at most two looks per symbol, and once two
per state, so the patterns do not matter. One symbol alone can cost as many looks as the longest pattern has.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Generic, TypeVar

Pattern = TypeVar("Pattern", str, "array[int]")

UNKNOWN = -1


class Automaton(Generic[Pattern]):
    """Automaton over some patterns. Sequences that look for the same patterns share it; each keeps its own
    state, 0 at first.
    """

    __slots__ = ("_depths", "_forks", "_labels", "_links", "_match_lens", "first_symbols", "max_len")

    def __init__(self, patterns: Sequence[Pattern]) -> None:
        """Make the automaton of `patterns`: at least one, none of them empty."""
        assert all(patterns), "an empty pattern would match everywhere"
        self.max_len = max(map(len, patterns))
        self._labels: Pattern = patterns[0][:0]
        """Symbols that lead to the states, in order from state 1 on."""
        self._forks: dict[int, dict[str | int, int]] = {0: {}}
        """Transitions of states whose only successor is not the next state: target state by symbol."""
        self._depths = array("i", [0])
        """Number of pattern symbols that a state stands for."""
        self._match_lens = array("i", [0])
        """Length of the longest pattern that ends in a state, once its link is known; 0: none does."""
        self._add_all(patterns)
        self._links = array("i", [UNKNOWN]) * len(self._depths)
        self._links[0] = 0
        self.first_symbols = frozenset(self._forks[0])

    @property
    def num_states(self) -> int:
        return len(self._depths)

    def scan(self, state: int, symbols: Sequence[str | int], *, until_match: bool) -> tuple[int, int, int]:
        """Read symbols; with `until_match` only up to the first match. Returns (new state, number of symbols
        read, length of the longest pattern that ends there or 0).
        """
        # `step`, written out for the usual case: most of the time for a text with stop strings is spent here.
        forks, labels, links, match_lens = self._forks, self._labels, self._links, self._match_lens
        first = forks[0]
        for num_read, symbol in enumerate(symbols, 1):
            if not state:
                child = first.get(symbol, 0)
                if not child:
                    continue
            elif state in forks:
                child = forks[state].get(symbol, 0)
            else:
                child = state + 1 if labels[state] == symbol else 0
            if not child or links[child] == UNKNOWN:
                child = self.step(state, symbol)
            state = child
            if until_match and match_lens[state]:
                return state, num_read, match_lens[state]
        return state, len(symbols), 0

    def step(self, state: int, symbol: str | int) -> int:
        """Return the state after one more symbol."""
        child = self._child(state, symbol)
        while state and not child:
            state = self._links[state]
            child = self._child(state, symbol)
        if self._links[child] == UNKNOWN:
            self._link(child, state, symbol)
        return child

    def match_len(self, state: int) -> int:
        """Return the length of the longest pattern that ends in a state that was reached; 0 if none does."""
        return self._match_lens[state]

    def pending(self, state: int) -> int:
        """Return the state of the longest suffix that further symbols can complete to a pattern. It accepts
        the same continuations as `state`.
        """
        forks = self._forks
        while not forks.get(state, True):
            state = self._links[state]
        return state

    def depth(self, state: int) -> int:
        """Return how many symbols of a pattern's beginning have been read in this state."""
        return self._depths[state]

    def _child(self, state: int, symbol: str | int) -> int:
        """Return the state that a symbol leads to without following a link; 0 if there is none."""
        fork = self._forks.get(state)
        if fork is not None:
            return fork.get(symbol, 0)
        return state + 1 if self._labels[state] == symbol else 0

    def _link(self, state: int, parent: int, symbol: str | int) -> None:
        """Compute the link of a state, and those of the states that it leads to. Those of `parent`
        are known.
        """
        links = self._links
        found = []
        while links[state] == UNKNOWN:
            found.append(state)
            target = 0
            while parent and not target:
                parent = links[parent]
                target = self._child(parent, symbol)
            links[state] = target
            state = target
        for state in reversed(found):
            self._match_lens[state] = self._match_lens[state] or self._match_lens[links[state]]

    def _add_all(self, patterns: Sequence[Pattern]) -> None:
        """Create the states. Patterns are sorted, so that each shares states only with the one before it."""
        depths = array("i", range(self.max_len + 1))
        zeros = array("i", [0]) * len(depths)
        previous = self._labels
        # Runs of consecutive numbers among the states of `previous`: depth and number of each run's first
        # state.
        runs: list[tuple[int, int]] = []
        for pattern in sorted(patterns):
            num_shared = _num_shared(previous, pattern)
            if num_shared == len(pattern):
                continue  # the same again
            while runs and runs[-1][0] > num_shared:
                runs.pop()
            parent = runs[-1][1] + num_shared - runs[-1][0] if num_shared else 0
            first = len(self._depths)
            runs.append((num_shared + 1, first))
            if parent not in self._forks:
                self._forks[parent] = {self._labels[parent]: parent + 1}
            self._forks[parent][pattern[num_shared]] = first
            self._labels += pattern[num_shared:]
            self._depths += depths[num_shared + 1 : len(pattern) + 1]
            self._match_lens += zeros[num_shared + 1 : len(pattern) + 1]
            end = len(self._depths) - 1
            self._forks[end] = {}
            self._match_lens[end] = len(pattern)
            previous = pattern


def _num_shared(one: Pattern, other: Pattern) -> int:
    """Return the length of the common beginning."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[:middle] == other[:middle]:
            low = middle
        else:
            high = middle - 1
    return low
