"""DraftTotals: guesses that were verified, and right, in all, by position and in the newest step."""

from __future__ import annotations

from runtime.sampling.table import MAX_DRAFT_TOKENS

NO_DRAFTS = (0, 0, 0)


class DraftTotals:
    """Told of each row whose guesses a step has verified."""

    def __init__(self) -> None:
        self._num_drafted = [0] * MAX_DRAFT_TOKENS
        """By position behind the known tokens,"""
        self._num_accepted = [0] * MAX_DRAFT_TOKENS
        """and of these the right ones."""
        self._num_requests = 0
        self._step = NO_DRAFTS

    def note_row(self, num_drafted: int, num_accepted: int) -> None:
        for position in range(num_drafted):
            self._num_drafted[position] += 1
        for position in range(num_accepted):
            self._num_accepted[position] += 1
        self._num_requests += 1
        drafted, accepted, requests = self._step
        self._step = (drafted + num_drafted, accepted + num_accepted, requests + 1)

    def take_step(self) -> tuple[int, int, int]:
        """(guesses, right ones, requests with some) since the last call."""
        step, self._step = self._step, NO_DRAFTS
        return step

    def totals(self) -> dict[str, int | list[int]]:
        """Since the start, for server_info. By position as far as there were guesses."""
        num_positions = MAX_DRAFT_TOKENS - self._num_drafted[::-1].count(0)
        return {
            "num_drafts": self._num_requests,
            "num_draft_tokens": sum(self._num_drafted),
            "num_accepted_draft_tokens": sum(self._num_accepted),
            "draft_tokens_by_position": self._num_drafted[:num_positions],
            "accepted_draft_tokens_by_position": self._num_accepted[:num_positions],
        }
