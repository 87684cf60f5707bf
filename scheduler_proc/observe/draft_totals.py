"""DraftTotals: counts of verified and accepted guesses, in total, by position, and of the newest step."""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from runtime.sampling.table import MAX_DRAFT_TOKENS
from runtime.wire.format import IntArray

NO_DRAFTS = (0, 0, 0)


class DraftTotals:
    """Counts of guesses. Each row whose guesses a step has verified is reported to it."""

    def __init__(self) -> None:
        self._rows_by_drafted = [0] * (MAX_DRAFT_TOKENS + 1)
        """Number of times that a row had 0, 1, ... guesses."""
        self._rows_by_accepted = [0] * (MAX_DRAFT_TOKENS + 1)
        """Number of times that a row had 0, 1, ... accepted guesses."""
        self._step = NO_DRAFTS

    def note_row(self, num_drafted: int, num_accepted: int) -> None:
        self._rows_by_drafted[num_drafted] += 1
        self._rows_by_accepted[num_accepted] += 1
        drafted, accepted, requests = self._step
        self._step = (drafted + num_drafted, accepted + num_accepted, requests + 1)

    def note_rows(self, num_drafted: IntArray, num_accepted: IntArray) -> None:
        """Count the guesses of several rows, some of which may have none."""
        num_rows = int(np.count_nonzero(num_drafted))
        if not num_rows:
            return
        if num_rows < len(num_drafted):
            has_drafted = num_drafted > 0
            num_drafted, num_accepted = num_drafted[has_drafted], num_accepted[has_drafted]
        drafted, accepted, requests = self._step
        for number, count in enumerate(np.bincount(num_drafted).tolist()):
            self._rows_by_drafted[number] += count
            drafted += number * count
        for number, count in enumerate(np.bincount(num_accepted).tolist()):
            self._rows_by_accepted[number] += count
            accepted += number * count
        self._step = drafted, accepted, requests + num_rows

    def take_step(self) -> tuple[int, int, int]:
        """Return (guesses, accepted guesses, requests with guesses) since the last call, and clear them."""
        step, self._step = self._step, NO_DRAFTS
        return step

    def totals(self) -> dict[str, int | list[int]]:
        """Return the totals since the start, for server_info, by position up to the last one that had
        guesses.
        """
        drafted, accepted = _by_position(self._rows_by_drafted), _by_position(self._rows_by_accepted)
        num_positions = MAX_DRAFT_TOKENS - drafted.count(0)
        return {
            "num_drafts": sum(self._rows_by_drafted),
            "num_draft_tokens": sum(drafted),
            "num_accepted_draft_tokens": sum(accepted),
            "draft_tokens_by_position": drafted[:num_positions],
            "accepted_draft_tokens_by_position": accepted[:num_positions],
        }


def _by_position(rows_by_count: list[int]) -> list[int]:
    """Return counts by position: position i counts once for each row that had more than i."""
    return list(accumulate(rows_by_count[:0:-1]))[::-1]
