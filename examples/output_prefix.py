"""A capability of requests: answers to some tenants begin with ids that the operator has chosen.

To serve with it, add to `feature_factories` in scheduler_proc/feature_factories.py, before the others:

    attach_output_prefix({"support": (9906, 11)})

docs/adding_a_feature.md says which hook is for what.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from runtime.base.errors import InvalidRequest
from scheduler_proc.core.request import Request
from scheduler_proc.core.scheduled_row import ScheduledRow
from scheduler_proc.features.base import RequestFeature


class OutputPrefix(RequestFeature):
    """Forces the first ids of one request's output. Where it is follows from the request's tokens alone, so a
    retraction, or an attempt that resumes, needs nothing more.
    """

    def __init__(self, req: Request, prefix: Sequence[int]) -> None:
        self._req = req
        self._prefix = prefix

    def plan_row(self, row: ScheduledRow[Any]) -> None:
        """Ask for a mask while the next id is one of the prefix. Tokens in flight count: they come first."""
        if self._req.predicted_len - self._req.num_prompt < len(self._prefix):
            row.make_masks = self._masks

    def _masks(self, num_guesses: int) -> list[bytes]:
        """Allow one id. Called when every earlier token is committed; ids behind the mask are forbidden.
        There are no guesses, as the row has no `note_guesses`.
        """
        forced = self._prefix[self._req.num_output]
        mask = bytearray(forced // 8 + 1)
        mask[-1] = 1 << forced % 8
        return [bytes(mask)]


def attach_output_prefix(prefixes: Mapping[str, Sequence[int]]) -> Callable[[Request], RequestFeature | None]:
    """A factory for the intake: gives OutputPrefix to each request of a tenant in the table."""

    def attach(req: Request) -> RequestFeature | None:
        prefix, allowed = prefixes.get(req.tenant), req.sampling.allowed_token_ids
        if not prefix:
            return None
        if allowed and not set(prefix) <= set(allowed):
            raise InvalidRequest(
                "allowed_token_ids: answers of this server begin with other ids", param="allowed_token_ids"
            )
        return OutputPrefix(req, prefix)

    return attach
